"""Every architecture: texts that share passes, at random times, against stock mlx-lm."""

import copy
import random
from collections.abc import Generator, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache

from mlx_redrafter.decoding import prefill
from mlx_redrafter.decoding.delivery import Token
from mlx_redrafter.decoding.sampling import gumbel_noise
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import decode
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.generation_options import Quantisation, SamplingParams
from mlx_redrafter.target.caches import batch_layers
from mlx_redrafter.target.caches.batch_cache import BatchCache
from mlx_redrafter.target.caches.recurrent import RecurrentCache
from mlx_redrafter.target.caches.tree_cache import parts_of
from mlx_redrafter.target.target import Target
from tests.helpers.calls import at_call
from tests.helpers.equality import ids, stock_tokens
from tests.helpers.few_shapes import use_few_shapes
from tests.models import tiny_models, trees
from tests.models.test_architectures import TEXT_MODELS, disagreement
from tests.models.tiny_models import VOCAB_SIZE, build, main_rope, tiny_config
from tests.models.trees import DraftsOnDevice, read_by_stock, rows_of, sequence_of

# Maximum difference of entries, of the largest one: states differ by up to 3e-5 on some machines.
TOLERANCE = 5e-5
# Passes of a text that are kept: two whose tokens it takes, two that wait for it, and the newest.
MAX_VISITS = 5
# Models whose layers are of each kind, for tests of paths that all kinds share.
KINDS = [
    "llama", "gemma3", "gemma3n", "llama4", "longcat_flash", "qwen3_5", "granitemoehybrid",
    "falcon_h1", "baichuan_m1", "lfm2", "jamba", "recurrent_gemma", "mamba2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buffers grow often, and rings come round in short texts."""
    monkeypatch.setattr(batch_layers, "GROWTH", 4)
    monkeypatch.setattr(batch_layers, "SPARE", 4 * (trees.DRAFT_LENGTH + 1))


class Case(NamedTuple):
    """A text as stock mlx-lm decodes it, and its cache after ``num_taken`` tokens.

    After these the reader goes away.
    """

    prompt: list[int]
    params: SamplingParams
    num_taken: int
    text: list[int]
    cache: list[Any]


def random_case(rng: random.Random, model: nn.Module, quantisation: Quantisation | None) -> Case:
    """Make a text that stock mlx-lm decodes, with the noise of its seed."""
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 3, 8, 9, 25]))]
    length = rng.randrange(4, 18)
    num_taken = rng.choice([length, rng.randrange(1, length + 1)])
    params = SamplingParams(temp=rng.choice([0.0, 1.0]), seed=rng.randrange(100))
    return make_case(model, prompt, length, num_taken, params, quantisation)


def make_case(
    model: nn.Module,
    prompt: list[int],
    length: int,
    num_taken: int,
    params: SamplingParams,
    quantisation: Quantisation | None = None,
) -> Case:
    """Let stock mlx-lm decode a text of ``length`` tokens."""
    noise = gumbel_noise(params.seed, len(prompt) + mx.arange(length), VOCAB_SIZE) * params.temp
    cache, text, cache_then = make_prompt_cache(model), [], []
    if prompt[:-1]:
        read_by_stock(model, prompt[:-1], cache, quantisation)
    logits = read_by_stock(model, prompt[-1:], cache, quantisation)
    for number in range(length):
        text.append(int(mx.argmax(logits + noise[number]).item()))
        logits = read_by_stock(model, text[-1:], cache, quantisation)
        if len(text) == num_taken:
            cache_then = copy.deepcopy(cache)
    return Case(prompt, params, num_taken, text, cache_then)


def poison_what_texts_leave(patch: pytest.MonkeyPatch) -> None:
    """Fill each slot that becomes idle with NaN, or the largest codes."""
    leave = BatchCache.leave

    def leave_poison(cache: BatchCache, slot: int, own: Any) -> None:
        leave(cache, slot, own)
        poison(cache, slot)

    patch.setattr(BatchCache, "leave", leave_poison)


def poison(cache: BatchCache, slot: int) -> None:
    for part in cache._parts:
        if isinstance(part, RecurrentCache):
            state = part.stock.cache
            part.stock.cache = [one if one is None else _poisoned(one, slot) for one in state]
        else:
            part._buffers = [_poisoned(buffer, slot) for buffer in part._buffers]


def _poisoned(array: mx.array, slot: int) -> mx.array:
    poison = 2**32 - 1 if array.dtype == mx.uint32 else mx.nan
    is_here = mx.arange(array.shape[0]).reshape(-1, *[1] * (array.ndim - 1)) == slot
    return mx.where(is_here, mx.array(poison, dtype=array.dtype), array)


def decode_together(
    model_type: str, target: Target, quantisation: Quantisation | None = None, num_texts: int = 3
) -> None:
    """Decode random texts in a batch and compare tokens and caches with stock mlx-lm."""
    rng, model, scheduler = random.Random(model_type), target.model, Scheduler(target)
    cases = [random_case(rng, model, quantisation) for _ in range(num_texts)]
    texts: list[SequenceDecoder] = []
    readers: dict[int, Generator[Token]] = {}
    found: list[list[int]] = []
    while readers or len(texts) < num_texts:
        if len(texts) < num_texts and (not readers or rng.random() < 0.3):
            case, number = cases[len(texts)], len(texts)
            # Every third text decodes plainly.
            drafts = DraftsOnDevice([*case.prompt, *case.text]) if number % 3 else None
            cache = target.caches.new(quantisation=quantisation)
            options = {"max_tokens": len(case.text), "keeps_cache": True, "cache": cache}
            texts.append(sequence_of(target, case.prompt, drafts, case.params, **options))
            found.append([])
            readers[number] = decode(texts[number], scheduler.step, scheduler.leave)
        # Passes are dropped to which no text may have to go back.
        assert max(map(len, scheduler.batch.cache._history.visits), default=0) <= MAX_VISITS
        number = rng.choice(list(readers))
        token = next(readers[number], None)
        if token is not None:
            found[number].append(token.id)
        if token is None or len(found[number]) == cases[number].num_taken:
            readers.pop(number).close()
    for case, text, tokens in zip(cases, texts, found, strict=True):
        assert tokens == case.text[: case.num_taken]
        assert_same_entries(text.own_cache.stock, case.cache)


def assert_same_entries(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for layer, stock in zip(parts_of(found), parts_of(expected), strict=True):
        assert getattr(layer, "offset", None) == getattr(stock, "offset", None)
        if stock.empty() or isinstance(stock, QuantizedKVCache):
            continue
        # No later token attends to the oldest entry of a ring.
        oldest = slice(int(isinstance(stock, RotatingKVCache)), None)
        for rows, stock_rows in zip(rows_of(layer), rows_of(stock), strict=True):
            if stock_rows[..., oldest, :].size:
                difference = disagreement(rows[..., oldest, :], stock_rows[..., oldest, :])
                assert difference <= TOLERANCE


@pytest.mark.parametrize("model_type", TEXT_MODELS)
def test_texts_that_come_and_go(monkeypatch, model_type):
    poison_what_texts_leave(monkeypatch)
    decode_together(model_type, Target(build(tiny_config(model_type, main_rope(model_type)))))


@pytest.mark.parametrize("model_type", KINDS)
def test_a_text_that_leaves_a_batch_before_the_first_pass_of_that(model_type):
    """It comes beside another one, which has ended with its own first pass."""
    target = Target(build(tiny_config(model_type, main_rope(model_type))))
    case = make_case(target.model, trees.PROMPT, 12, 12, trees.GREEDY)
    for count in range(1, 6):
        options = {"max_tokens": 12, "keeps_cache": True}
        drafts = DraftsOnDevice([*case.prompt, *case.text])
        text = sequence_of(target, case.prompt, drafts, **options)
        other, scheduler = sequence_of(target, [5], max_tokens=1), Scheduler(target)
        reader, beside = (decode(one, scheduler.step, scheduler.leave) for one in (text, other))
        found = [next(reader).id for _ in range(count)]
        assert len(list(beside)) == 1
        assert [*found, *(token.id for token in reader)] == case.text
        assert_same_entries(text.own_cache.stock, case.cache)


@pytest.mark.parametrize("model_type", KINDS)
def test_a_text_that_leaves_and_comes_again_between_two_passes_of_a_batch(model_type):
    """A text ends; the other one, alone, is about to make its own pass when a third one comes."""
    target = Target(build(tiny_config(model_type, main_rope(model_type))))
    scheduler, cases, texts = Scheduler(target), [], []
    for number, (size, length) in enumerate([(9, 4), (1, 11), (9, 7)]):
        prompt = [(7 * number + 3 * k + 5) % VOCAB_SIZE for k in range(size)]
        cases.append(make_case(target.model, prompt, length, length, trees.GREEDY))
        drafts = DraftsOnDevice([*prompt, *cases[-1].text]) if number else None
        options = {"max_tokens": length, "keeps_cache": True}
        texts.append(sequence_of(target, prompt, drafts, **options))
    readers = [decode(text, scheduler.step, scheduler.leave) for text in texts]
    found: list[list[int]] = [[], [], []]
    # Each number reads a token of a text, which begins when it is first read.
    for number in map(int, "0001101122211121112122"):
        found[number] += [token.id for token in islice(readers[number], 1)]
        if len(found[number]) == cases[number].num_taken:
            readers[number].close()
    for case, text, tokens in zip(cases, texts, found, strict=True):
        assert tokens == case.text
        assert_same_entries(text.own_cache.stock, case.cache)


@pytest.mark.parametrize("model_type", TEXT_MODELS)
def test_prompts_share_their_passes(monkeypatch, model_type):
    """Ends of up to three tokens are trees of the first step, as stock mlx-lm reads tokens."""
    monkeypatch.setattr(prefill, "MAX_END", 3)
    target = Target(build(tiny_config(model_type, main_rope(model_type))))
    prompts = [[(3 * n + k) % VOCAB_SIZE for k in range(n)] for n in (12, 8, 9, 8, 11)]
    options = {"max_tokens": 3, "prefill_step_size": 25, "keeps_cache": True}
    texts = {sequence_of(target, prompt, **options): list[int]() for prompt in prompts}
    scheduler = Scheduler(target)
    scheduler.begin(list(texts))
    while not all(text.is_closed for text in texts):
        for text, tokens in trees.step_together(scheduler):
            texts[text] += tokens
    for prompt, (text, tokens) in zip(prompts, texts.items(), strict=True):
        cache = make_prompt_cache(target.model)
        *_, end = ends = {8: (0, 5), 12: (0, 5, 8, 11)}.get(len(prompt), (0, 5, 8))
        chunks = [prompt[i:j] for i, j in pairwise(ends)] + [[token] for token in prompt[end:]]
        for chunk in chunks:
            logits = read_by_stock(target.model, chunk, cache, None)
        for token in tokens:
            assert token == int(mx.argmax(logits).item())
            logits = read_by_stock(target.model, [token], cache, None)
        assert len(tokens) == 3
        assert_same_entries(text.own_cache.stock, cache)


@pytest.mark.parametrize("model_type", KINDS)
def test_buckets(monkeypatch, model_type):
    use_few_shapes(monkeypatch)
    decode_together(model_type, Target(build(tiny_config(model_type))), num_texts=5)


# With few codes on the border of two values: rounding changes some codes of other seeds.
@pytest.mark.parametrize("start", [0, 20])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "falcon_h1"])
def test_quantised_entries(monkeypatch, model_type, start):
    """Texts join the batch once their entries are quantised."""
    poison_what_texts_leave(monkeypatch)
    passes: list[Any] = []
    at_call(monkeypatch, BatchCache, "expect", lambda cache, trees: passes.append(trees))
    target = Target(build(tiny_models.wide_config(model_type)))
    decode_together(model_type, target, Quantisation(8, tiny_models.GROUP_SIZE, start))
    assert passes


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "llama4", "qwen3_5", "lfm2"])
def test_poison_spoils_the_text_of_its_slot_alone(model_type):
    """Show that the other tests would notice entries or states of another slot."""
    model = build(tiny_config(model_type))
    rng, target = random.Random(1), Target(model)
    scheduler = Scheduler(target)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(3)]
    texts = [sequence_of(target, prompt, max_tokens=20) for prompt in prompts]
    readers = [decode(text, scheduler.step, scheduler.leave) for text in texts]
    found: list[list[int]] = [[] for _ in texts]

    def read_and_poison() -> None:
        for number in range(20):
            if number == 6:
                poison(scheduler.batch.cache, texts[1].cache.number)
            for own, reader in zip(found, readers, strict=True):
                own.append(next(reader).id)

    with pytest.raises(NonFiniteError):
        read_and_poison()
    for i in (0, 2):
        found[i] += [token.id for token in readers[i]]
        assert found[i] == ids(stock_tokens(model, prompts[i], 20))


def test_texts_that_begin_together_get_their_slots_at_once(monkeypatch):
    sizes: list[int] = []
    at_call(monkeypatch, BatchCache, "resize", lambda cache, slots, size, _: sizes.append(size))
    target = Target(build(tiny_config("llama")))
    scheduler = Scheduler(target)
    scheduler.begin([sequence_of(target, [3, 4 + i], max_tokens=2) for i in range(5)])
    while not scheduler.batch.cache.slots:
        scheduler.advance()
    assert 8 in sizes
    assert not {1, 2, 4} & set(sizes)
