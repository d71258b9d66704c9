"""Trials at load accept tree attention that is equal and no slower, and nothing else."""

import logging
from inspect import unwrap

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

from mlx_redrafter.kernels import attention_trials, selection, tree_attention
from mlx_redrafter.kernels.attention import AttentionShape, attention_shapes
from mlx_redrafter.kernels.attention_trials import AttentionTrial
from mlx_redrafter.kernels.layers import choices
from mlx_redrafter.kernels.product_trials import ProductTrial
from mlx_redrafter.kernels.selection import use_kernels
from mlx_redrafter.kernels.tree_attention import AttentionVariant, attention_source
from mlx_redrafter.kernels.trial import Times
from mlx_redrafter.proposers.draft_model import DraftModel
from tests.helpers.drafts import Scripted
from tests.helpers.equality import assert_same_tokens, ids, stock_tokens, tokens
from tests.helpers.models import tiny_llama, wrapped_tokenizer
from tests.kernels.attention_emulator import AttentionKernels
from tests.kernels.emulator import needs_emulator
from tests.kernels.stand_in import (
    check_kernels,
    emulated_attention,
    refuse_to_compile,
    stand_in,
    stand_in_attention,
)
from tests.kernels.test_trials import (
    VOCAB_SIZE,
    are_equal,
    kernels_of_model,
    logits_of_tree,
    quantised_model,
)

NAME = "scaled_dot_product_attention"
SHAPE = AttentionShape(4, 2, 64, "float16")


def _as_long(trial: AttentionTrial, equal: object, rows: int) -> Times:
    """Times of a machine where our kernel takes MLX's time, but twice that for 5 nodes."""
    return Times(stock=1.0, kernel=2.0 if rows == 5 else 1.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an Apple GPU, as far as these tests can tell."""
    stand_in_attention(monkeypatch, emulated_attention())
    monkeypatch.setattr(selection, "is_available", lambda: True)
    monkeypatch.setattr(AttentionTrial, "measure", _as_long)
    # Threads are slow in the emulator.
    monkeypatch.setattr(attention_trials, "FEW_KEYS", (5,))
    monkeypatch.setattr(attention_trials, "MAX_KEYS", (40,))
    monkeypatch.setattr(attention_trials, "PARENTS", (0, 0, 0, 1, 3))


@pytest.fixture
def no_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models without matrices that there are kernels for."""
    monkeypatch.setattr(selection, "layers_by_shape", lambda model: {})


def _model() -> nn.Module:
    model = tiny_llama(vocab_size=VOCAB_SIZE, layers=1, head_size=64)
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


@needs_emulator
@pytest.mark.usefixtures("machine")
def test_drafted_text_and_logits_are_plain_with_both_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, kernels_of_model())
    monkeypatch.setattr(ProductTrial, "measure", lambda *_: Times(1.0, 0.5))
    model = quantised_model(head_size=64)
    plain = logits_of_tree(model, follow=True)
    use_kernels(model)
    assert are_equal(logits_of_tree(model, follow=False), plain)
    with monkeypatch.context() as patch:
        patch.setattr("mlx_redrafter.kernels.attention.is_available", lambda: False)
        assert not are_equal(logits_of_tree(model, follow=False), plain)
    text = stock_tokens(model, [1, 5, 9], 8)
    drafted = tokens(model, [1, 5, 9], Scripted(ids(text), VOCAB_SIZE), max_tokens=8)
    assert_same_tokens(text, drafted, "with kernels")


@needs_emulator
@pytest.mark.usefixtures("machine", "no_matrices")
def test_longer_texts_are_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are equal up to the shorter of the limits only; trees beyond it go without."""
    model = _model()
    stock = logits_of_tree(model, follow=False)
    stock_call = mx.fast.scaled_dot_product_attention

    def two_passes(*rows: mx.array, **options: object) -> mx.array:
        y = stock_call(*rows, **options)
        return -y if rows[1].shape[2] > 8 else y

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", two_passes)
    monkeypatch.setattr(attention_trials, "FEW_KEYS", (1,))
    monkeypatch.setattr(attention_trials, "MAX_KEYS", (40, 5))
    trial = AttentionTrial(SHAPE, 1)
    assert (trial.equal, trial.failure) == (5, None)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", stock_call)
    monkeypatch.setattr(attention_trials, "MAX_KEYS", (5,))
    use_kernels(model)
    assert "max_keys=5" in choices(model)[0]
    assert are_equal(logits_of_tree(model, follow=False), stock)  # 3 tokens and a path of 5


@needs_emulator
@pytest.mark.usefixtures("machine", "no_matrices")
@pytest.mark.parametrize(("max_keys", "is_used"), [(7, False), (8, True)])
def test_the_limit_counts_the_keys_of_the_deepest_node(
    monkeypatch: pytest.MonkeyPatch, max_keys: int, is_used: bool
) -> None:
    """The tree follows 3 tokens, and its deepest node is the fifth on its path."""
    monkeypatch.setattr(attention_trials, "MAX_KEYS", (max_keys,))
    model = _model()
    stock = logits_of_tree(model, follow=False)
    use_kernels(model)
    assert f"max_keys={max_keys}" in choices(model)[0]
    assert are_equal(logits_of_tree(model, follow=False), stock) != is_used


@needs_emulator
@pytest.mark.usefixtures("machine", "no_matrices")
def test_a_wrong_order_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = AttentionVariant(64, "float32")  # 16 bits hide most of it
    source = attention_source(variant).replace("int i = group;", "int i = group ^ (group >> 1);")
    stand_in_attention(monkeypatch, AttentionKernels({variant: source}))
    model = tiny_llama(vocab_size=VOCAB_SIZE, layers=1, head_size=64)
    shown = check_kernels(monkeypatch, capsys, model)
    assert shown.code == 1
    assert shown.out.splitlines()[1:] == [
        "attention of 4 heads, 2 of keys, of 64, float32; layers: 1",
        "  failed: its bits are not those of MLX's attention for one token",
    ]


@needs_emulator
@pytest.mark.usefixtures("machine", "no_matrices")
def test_equal_attention_is_used_where_it_is_no_slower(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _model()
    assert attention_shapes(model) == {SHAPE: 1}
    use_kernels(model)
    (choice,) = choices(model)
    assert "max_keys=40, rows=(2, 3, 4, 6, 7," in choice
    shown = check_kernels(monkeypatch, capsys, _model())
    assert shown.code == 0
    assert "\n  equal: up to 40 keys\n" in shown.out
    assert "   4 rows: 1000.000 ms, MLX's 1000.000 ms, used\n" in shown.out
    assert "   5 rows: 2000.000 ms, MLX's 1000.000 ms\n" in shown.out


@needs_emulator
@pytest.mark.usefixtures("machine", "no_matrices")
def test_what_does_not_compile_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_to_compile(monkeypatch, tree_attention)
    model = _model()
    with caplog.at_level(logging.WARNING):
        use_kernels(model)
    assert choices(model) == ()
    (line,) = caplog.messages
    assert line == (
        "MLX's kernels are used for 1 of 1 shapes: for attention of 4 heads, 2 of keys, of 64, "
        "float16, [metal::Device] Unable to build metal library from source; "
        "`redrafter-mlx check --kernels` shows all"
    )


def test_attention_of_other_kinds_is_left_alone() -> None:
    assert attention_shapes(tiny_llama(layers=1)) == {}  # heads of 8


@pytest.mark.parametrize("first", ["kernel", "levels"])
def test_drafters_with_attention_of_their_own_are_hooked_beside_the_kernel(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A draft model out of the same file as the target: its levels and our kernel, in any order."""
    monkeypatch.setattr(llama, NAME, unwrap(llama.scaled_dot_product_attention))
    model, smaller = _model(), tiny_llama(vocab_size=VOCAB_SIZE, layers=1, seed=3)
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    text = stock_tokens(model, [1, 5, 9], 8)
    for _ in range(2):
        if first == "kernel":
            attention_shapes(model)
        drafter = DraftModel(smaller, tokenizer)
        attention_shapes(model)
    assert len(llama.scaled_dot_product_attention.redrafter_hooks) == 2
    drafted = tokens(model, [1, 5, 9], drafter, tokenizer=tokenizer, max_tokens=8)
    assert_same_tokens(text, drafted, "with both hooks")
