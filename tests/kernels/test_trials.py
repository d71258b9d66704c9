"""Trials at load accept kernels that are equal and no slower, and nothing else."""

import json
import logging
from inspect import unwrap

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.tuner.lora import LoRALinear

from mlx_redrafter.checkpoints import loading
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.kernels import small_t, tree_attention, trials
from mlx_redrafter.kernels.attention import AttentionShape, attention_shapes
from mlx_redrafter.kernels.layers import choices, layers_by_shape
from mlx_redrafter.kernels.small_t import source_of
from mlx_redrafter.kernels.tree_attention import AttentionVariant, attention_source
from mlx_redrafter.kernels.trials import AttentionTrial, ProductTrial, Times, use_kernels
from mlx_redrafter.kernels.variant import (
    DENSE_ORDERS,
    FEW,
    MANY,
    USUAL,
    AnyVariant,
    DenseShape,
    DenseVariant,
    MatrixShape,
    Variant,
)
from mlx_redrafter.proposers.draft_model import DraftModel
from tests.helpers.cli import run
from tests.helpers.drafts import Scripted
from tests.helpers.equality import Scored, assert_same_tokens, ids, stock_tokens, tokens
from tests.helpers.models import quantize_wide, tiny_llama, wrapped_tokenizer
from tests.helpers.oracles import are_equal, logits_of_tree
from tests.kernels.attention_emulator import AttentionKernels
from tests.kernels.emulator import Kernels
from tests.kernels.stand_in import (
    check_kernels,
    emulated,
    emulated_attention,
    refuse_to_compile,
    stand_in,
    stand_in_attention,
)
from tests.kernels.test_small_t import LAUNCHED

VOCAB_SIZE = 64
DIFFERENT = "its bits are not those of MLX's kernel for one row"
FORMAT = Variant(4, 32, "float16", "qmv")
# Constants of the arithmetic by variant: how each stands in the source, and another one. Where
# eight SIMD groups share an output of a dense matrix, a part of the last block is missing.
CONSTANTS: list[tuple[AnyVariant, list[tuple[str, str]]]] = [
    (Variant(2, 32, "float32"), [("VALUES = 16", "VALUES = 8"), ("/ 4.0f", "/ 8.0f"),
        ("/ 16.0f", "/ 8.0f"), ("/ 64.0f", "/ 32.0f"), ("0x0c", "0x04"), ("0x30", "0x10"),
        ("0xc0", "0x40")]),
    (Variant(3, 32, "float32"), [("VALUES = 16", "VALUES = 8"), ("i += 8", "i += 4"),
        ("- 1;", "- 2;"), ("BITS / 8", "BITS / 16"), ("BITS % 8", "BITS % 4"),
        ("float(1 << bit)", "float(2 << bit)"), ("& (MASK << bit)", "& MASK")]),
    (Variant(6, 32, "float32"), [("VALUES = 8", "VALUES = 16"), ("i += 4", "i += 8"),
        ("BITS > 8", "BITS > 11"), ("byte + 1", "byte"), ("(8 - bit)", "(9 - bit)"),
        ("* 256.0f", "* 128.0f"), ("j == 0", "j <= 1")]),
    (Variant(4, 32, "float32"), [("VALUES = 16", "VALUES = 8"), ("/ 16.0f", "/ 32.0f"),
        ("/ 256.0f", "/ 128.0f"), ("/ 4096.0f", "/ 2048.0f"), ("0x000f", "0x0007"),
        ("0x0f00", "0x0700"), ("0xf000", "0x7000")]),
    (Variant(8, 32, "float32"), [("VALUES = 8", "VALUES = 4"), ("packed[3]", "packed[2]"),
        ("BITS = 8", "BITS = 4"), ("GROUP = 32", "GROUP = 64"), ("BLOCK = 32", "BLOCK = 16"),
        ("i += 4", "i += 8"), ("sums[t] * b", "b")]),
    (Variant(4, 32, "float32", mode="mxfp4"), [("VALUES = 16", "VALUES = 8"),
        ("GROUP = 32", "GROUP = 64"), ("<< 23", "<< 22"), ("0x400000", "0x800000"), ("& 7", "& 3"),
        ("16384.0f", "8192.0f"), ("& 8", "& 4")]),
    (DenseVariant("float32", *MANY), [("LANES = 32", "LANES = 16"), ("GROUPS = 8", "GROUPS = 4"),
        ("BLOCK = 4", "BLOCK = 2"), ("int k = 4", "int k = 2"),
        ("4 * (group * LANES", "4 * (LANES"), ("end = BLOCK", "end = 0"),
        ("K % BLOCK > 0", "K % BLOCK > 999")]),
    (DenseVariant("float32", *MANY), [("k += BLOCK", "k += BLOCK / 2"), ("LANES / 2", "LANES / 4"),
        ("by /= 2", "by /= 4"), ("wl[r * K", "wl[0 * K"), ("x[t * K", "x[0 * K"),
        ("totals[0][lane]", "totals[1][lane]"), ("int g = 1", "int g = 2")]),
    (DenseVariant("float32", *MANY), [("lane % ROWS) * N", "lane / TILE) * N"),
        ("r * ROWS + t]", "r * ROWS]"), ("TILE * tile", "tile"), ("/ GROUPS * (32", "* (32"),
        ("k + i < K", "k + i + 1 < K")]),
    (DenseVariant("float32", *FEW), [("LANES = 4", "LANES = 8"), ("+ lane / LANES", ""),
        ("32 / LANES", "64 / LANES"), ("if (lane % LANES == 0)", "if (lane == 0)")]),
]  # fmt: skip


def _half_as_long(trial: ProductTrial, equal: object, rows: int) -> Times:
    """Times of a machine where our kernels take half of MLX's time, except for 5 rows."""
    return Times(stock=1.0, kernel=1.0 if rows == 5 else 0.5)


def kernels_of_model() -> Kernels:
    """What the layers of `quantised_model` and `dense_model` may use."""
    variants = [FORMAT, *(DenseVariant("float16", *order) for order in DENSE_ORDERS)]
    return emulated((variant, t) for variant in variants for t in LAUNCHED)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an Apple GPU, as far as these tests can tell."""
    stand_in(monkeypatch, kernels_of_model())
    monkeypatch.setattr(ProductTrial, "measure", _half_as_long)


def quantised_model(head_size: int = 8) -> nn.Module:
    """A tiny model in float16, and in 4 bits where there are whole groups of inputs."""
    model = tiny_llama(vocab_size=VOCAB_SIZE, layers=1, head_size=head_size)
    model.set_dtype(mx.float16)
    quantize_wide(model)
    mx.eval(model.parameters())
    return model


def warning_of_use(model: nn.Module, caplog: pytest.LogCaptureFixture) -> str:
    """Let a model use the kernels that qualify; return the only warning, as none does."""
    with caplog.at_level(logging.WARNING):
        use_kernels(model)
    assert choices(model) == ()
    (line,) = caplog.messages
    return line


def dense_model() -> nn.Module:
    """A tiny model in float16 whose head is its embedding."""
    model = tiny_llama(vocab_size=VOCAB_SIZE, layers=1, head_size=16)
    model.args.tie_word_embeddings = True
    del model["lm_head"]
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


def _layer(number: int) -> tuple[MatrixShape, nn.Module]:
    layer = nn.QuantizedLinear(512, 32, group_size=32, bits=number)
    return MatrixShape(number, 32, "float32", 512, 32), layer


def assert_exact(model: nn.Module, plain: list[mx.array], text: list[Scored]) -> None:
    """Check the logits of a tree and a drafted text against those of single tokens."""
    assert are_equal(logits_of_tree(model, follow=False), plain)
    script = Scripted(ids(text), VOCAB_SIZE)
    assert_same_tokens(text, tokens(model, [1, 5, 9], script, max_tokens=len(text)))


@pytest.mark.parametrize("build", [quantised_model, dense_model])
@pytest.mark.usefixtures("machine")
def test_trees_and_drafted_texts_have_the_bits_of_single_tokens(build):
    model = build()
    plain, text = logits_of_tree(model, follow=True), stock_tokens(model, [1, 5, 9], 16)
    assert not are_equal(logits_of_tree(model, follow=False), plain)  # another order of additions
    use_kernels(model)
    assert are_equal(logits_of_tree(model, follow=True), plain)
    assert_exact(model, plain, text)


@pytest.mark.usefixtures("machine")
def test_equal_kernels_are_used_where_they_are_faster(monkeypatch):
    model = quantised_model()
    with monkeypatch.context() as patch:
        patch.setenv(trials.SWITCH, "0")
        use_kernels(model)
        assert choices(model) == ()
    use_kernels(model)
    (*_, last) = choices(model)
    assert len(choices(model)) == 5  # sizes of matrices; a part of the key of step times
    assert "rows=(2, 3, 4, 6, 7, 8" in last
    assert "16)" in last


def test_kernels_are_tried_unless_told_not_to(monkeypatch):
    tried: list[nn.Module] = []
    monkeypatch.setattr(loading, "use_kernels", tried.append)
    Pair(drafter="lookup").load(kernels=False)
    assert tried == []
    model, *_ = Pair(drafter="lookup").load()
    assert tried == [model]


def _layer_of(variant: AnyVariant) -> tuple[MatrixShape | DenseShape, nn.Module]:
    if isinstance(variant, DenseVariant):
        inputs = 1100 if variant.groups == 8 else 57
        return DenseShape("float32", inputs, 65), nn.Linear(inputs, 65)
    if variant.mode == "affine":
        return _layer(variant.bits)
    layer = nn.QuantizedLinear(512, 32, bias=False, group_size=32, bits=4, mode="mxfp4")
    layer.scales[0] = 0
    return MatrixShape(4, 32, "float32", 512, 32, "mxfp4"), layer


@pytest.mark.parametrize(("variant", "wrong"), CONSTANTS, ids=str)
def test_wrong_constants_are_refused(monkeypatch, variant, wrong):
    """Each in the source of another number of rows, as all are compiled together."""
    shape, layer = _layer_of(variant)
    sources = {(variant, rows): source_of(variant, rows) for rows in range(2, 2 + len(wrong))}
    changed = {}
    for (key, source), change in zip(sources.items(), wrong, strict=True):
        assert change[0] in source.body
        changed[key] = source._replace(body=source.body.replace(*change))
    stand_in(monkeypatch, Kernels(changed))
    monkeypatch.setattr(type(shape), "variants", lambda self: iter([variant]))
    for rows, change in enumerate(wrong, start=2):
        monkeypatch.setattr(trials, "ROWS", range(rows, rows + 1))
        tried = ProductTrial(shape, [layer])  # type: ignore[arg-type]
        assert (tried.equal, tried.failure) == (None, DIFFERENT), change


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("inputs", "order"), [(57, FEW), (150, USUAL), (1100, MANY)])
def test_dense_layers_with_biases_are_equal(inputs, order):
    layer = nn.Linear(inputs, 40)
    layer.bias = 10 * mx.random.normal((40,))
    layer.set_dtype(mx.float16)
    tried = ProductTrial(DenseShape("float16", inputs, 40), [layer])
    assert (tried.equal, tried.failure) == (DenseVariant("float16", *order), None)


def test_times_are_those_of_both(monkeypatch):
    shape, layer = _layer(8)
    variant = Variant(8, 32, "float32")
    stand_in(monkeypatch, emulated([(variant, 3)]))
    monkeypatch.setattr(trials, "ROWS", range(3, 4))
    tried = ProductTrial(shape, [layer])
    assert tried.equal == variant
    assert tried.times[3].kernel > tried.times[3].stock > 0  # threads are slow in the emulator
    assert tried.rows == ()
    stand_in_attention(monkeypatch, emulated_attention())
    monkeypatch.setattr(AttentionTrial, "find_equal", lambda self: None)
    times = AttentionTrial(AttentionShape(4, 2, 64, "float16"), 1).measure(20, 2)
    assert times.kernel > times.stock > 0


@pytest.mark.usefixtures("machine")
def test_what_does_not_compile_is_not_used(monkeypatch, capsys, caplog):
    refuse_to_compile(monkeypatch, small_t)
    model = quantised_model()
    shown = check_kernels(monkeypatch, capsys, model, "--json")
    assert shown.code == 1
    (shape, *_) = json.loads(shown.out)["shapes"]
    assert shape["failure"].startswith("[metal::Device] Unable to build")
    assert shape["rows"] == []
    assert warning_of_use(model, caplog) == (
        "MLX's kernels are used for 5 of 5 shapes: for 64 x 32, 4 bits, groups of 32, "
        "float16, [metal::Device] Unable to build metal library from source; "
        "`redrafter-mlx check --kernels` shows all"
    )


def test_layers_with_adapters_and_other_formats_are_left_alone():
    model = nn.Sequential(
        LoRALinear.from_base(nn.QuantizedLinear(32, 16, group_size=32, bits=4)),
        nn.QuantizedLinear(16, 16, group_size=16, mode="nvfp4"),
        nn.QuantizedLinear(64, 16, group_size=32, bits=4),  # MLX has a kernel for 64 inputs
        nn.QuantizedLinear(32, 16, group_size=32, bits=8, mode="mxfp8"),
        nn.QuantizedLinear(32, 24, group_size=32, bits=4),
        nn.QuantizedLinear(64, 24, group_size=32, bits=3),
        nn.QuantizedEmbedding(40, 32, group_size=32, bits=8),
    )
    found = [(shape.outputs, len(layers)) for shape, layers in layers_by_shape(model).items()]
    assert found == [(24, 1), (24, 1), (40, 1)]


def test_mxfp4_needs_a_model_of_one_dtype():
    """Its layers do not say which one inputs have."""
    layer = nn.QuantizedLinear(32, 16, bias=False, group_size=32, bits=4, mode="mxfp4")
    model = nn.Sequential(layer, nn.RMSNorm(16), nn.RMSNorm(16))
    model.set_dtype(mx.bfloat16)
    assert list(layers_by_shape(model)) == [MatrixShape(4, 32, "bfloat16", 32, 16, "mxfp4")]
    model.layers[1].set_dtype(mx.float32)
    assert list(layers_by_shape(model)) == []


def test_the_order_of_variants():
    for shape, names in (
        ((4, 64, "float16", 1024), ["qmv_fast_4_bits_64_float16", "qmv_4_bits_64_float16"]),
        ((8, 32, "bfloat16", 320), ["qmv_8_bits_32_bfloat16"]),
        ((2, 32, "float32", 320), ["qmv_fast_2_bits_32_float32"]),
    ):
        assert [str(one) for one in MatrixShape(*shape, 8).variants()] == names


@pytest.mark.usefixtures("machine")
def test_the_table(monkeypatch, capsys):
    shown = check_kernels(monkeypatch, capsys, quantised_model())
    assert shown.code == 0
    notes = [line.partition(" for ")[0] for line in shown.err.splitlines()]
    assert notes == ["timing the kernel"] * 5
    first, second, third, fourth, *_ = shown.out.splitlines()
    assert first.startswith("chip ")
    assert "mlx 0." in first
    assert second == "64 x 32, 4 bits, groups of 32, float16; layers: 2"
    assert third == "  equal: qmv_4_bits_32_float16"
    assert fourth == "   2 rows: 500.000 ms, MLX's 1000.000 ms, used"
    assert "   5 rows: 1000.000 ms, MLX's 1000.000 ms\n" in shown.out


@pytest.mark.skipif(mx.metal.is_available(), reason="there is an Apple GPU")
def test_the_table_needs_an_apple_gpu(capsys):
    shown = run(capsys, "check", "--kernels")
    assert (shown.code, shown.out) == (2, "")
    assert "--kernels needs an Apple GPU, found Device(" in shown.err


NAME = "scaled_dot_product_attention"
SHAPE = AttentionShape(4, 2, 64, "float16")


def _as_long(trial: AttentionTrial, equal: object, rows: int) -> Times:
    """Times of a machine where our kernel takes MLX's time, but twice that for 5 nodes."""
    return Times(stock=1.0, kernel=2.0 if rows == 5 else 1.0)


@pytest.fixture
def attending_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an Apple GPU, as far as these tests can tell."""
    stand_in_attention(monkeypatch, emulated_attention())
    monkeypatch.setattr(trials, "is_available", lambda: True)
    monkeypatch.setattr(AttentionTrial, "measure", _as_long)
    # Threads are slow in the emulator.
    monkeypatch.setattr(trials, "FEW_KEYS", (5,))
    monkeypatch.setattr(trials, "MAX_KEYS", (40,))
    monkeypatch.setattr(trials, "PARENTS", (0, 0, 0, 1, 3))


@pytest.fixture
def no_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models without matrices that there are kernels for."""
    monkeypatch.setattr(trials, "layers_by_shape", lambda model: {})


def _attending_model() -> nn.Module:
    model = tiny_llama(vocab_size=VOCAB_SIZE, layers=1, head_size=64)
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


@pytest.mark.usefixtures("attending_machine")
def test_drafted_text_and_logits_are_plain_with_both_kernels(monkeypatch):
    stand_in(monkeypatch, kernels_of_model())
    monkeypatch.setattr(ProductTrial, "measure", lambda *_: Times(1.0, 0.5))
    model = quantised_model(head_size=64)
    plain = logits_of_tree(model, follow=True)
    use_kernels(model)
    with monkeypatch.context() as patch:
        patch.setattr("mlx_redrafter.kernels.attention.is_available", lambda: False)
        assert not are_equal(logits_of_tree(model, follow=False), plain)
    assert_exact(model, plain, stock_tokens(model, [1, 5, 9], 8))


@pytest.mark.usefixtures("attending_machine")
def test_kernels_may_be_equal_up_to_the_shorter_of_the_limits(monkeypatch):
    stock_call = mx.fast.scaled_dot_product_attention

    def two_passes(*rows: mx.array, **options: object) -> mx.array:
        y = stock_call(*rows, **options)
        return -y if rows[1].shape[2] > 8 else y

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", two_passes)
    monkeypatch.setattr(trials, "FEW_KEYS", (1,))
    monkeypatch.setattr(trials, "MAX_KEYS", (40, 5))
    trial = AttentionTrial(SHAPE, 1)
    assert (trial.equal, trial.failure) == (5, None)


@pytest.mark.usefixtures("attending_machine", "no_matrices")
@pytest.mark.parametrize(("max_keys", "is_used"), [(7, False), (8, True)])
def test_the_limit_counts_the_keys_of_the_deepest_node(monkeypatch, max_keys, is_used):
    """The tree follows 3 tokens, and its deepest node is the fifth on its path: beyond it, MLX."""
    monkeypatch.setattr(trials, "MAX_KEYS", (max_keys,))
    model = _attending_model()
    stock = logits_of_tree(model, follow=False)
    use_kernels(model)
    assert f"max_keys={max_keys}" in choices(model)[0]
    assert are_equal(logits_of_tree(model, follow=False), stock) != is_used


@pytest.mark.usefixtures("attending_machine", "no_matrices")
def test_a_wrong_order_is_refused(monkeypatch, capsys):
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


@pytest.mark.usefixtures("attending_machine", "no_matrices")
def test_equal_attention_is_used_where_it_is_no_slower(monkeypatch, capsys):
    model = _attending_model()
    assert attention_shapes(model) == {SHAPE: 1}
    assert attention_shapes(tiny_llama(layers=1)) == {}  # heads of 8
    use_kernels(model)
    (choice,) = choices(model)
    assert "max_keys=40, rows=(2, 3, 4, 6, 7," in choice
    shown = check_kernels(monkeypatch, capsys, _attending_model())
    assert shown.code == 0
    assert "\n  equal: up to 40 keys\n" in shown.out
    assert "   4 rows: 1000.000 ms, MLX's 1000.000 ms, used\n" in shown.out
    assert "   5 rows: 2000.000 ms, MLX's 1000.000 ms\n" in shown.out


@pytest.mark.usefixtures("attending_machine", "no_matrices")
def test_attention_that_does_not_compile_is_not_used(monkeypatch, caplog):
    refuse_to_compile(monkeypatch, tree_attention)
    model = _attending_model()
    assert warning_of_use(model, caplog) == (
        "MLX's kernels are used for 1 of 1 shapes: for attention of 4 heads, 2 of keys, of 64, "
        "float16, [metal::Device] Unable to build metal library from source; "
        "`redrafter-mlx check --kernels` shows all"
    )


@pytest.mark.parametrize("first", ["kernel", "levels"])
def test_drafters_with_attention_of_their_own_are_hooked_beside_the_kernel(monkeypatch, first):
    """A draft model out of the same file as the target: its levels and our kernel, in any order."""
    monkeypatch.setattr(llama, NAME, unwrap(llama.scaled_dot_product_attention))
    model, smaller = _attending_model(), tiny_llama(vocab_size=VOCAB_SIZE, layers=1, seed=3)
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
