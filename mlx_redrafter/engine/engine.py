"""The engine, which outlives texts: a target, its proposer, and what is learned about both.

    model, tokenizer, drafter = load("org/model", drafter="org/drafter")
    engine = Engine(model, tokenizer, drafter)
    for response in engine.stream("Once upon a time", max_tokens=100):
        print(response.text, end="")

Threads may share an engine, load it in one and use it in others. Each text belongs to the thread
that reads its stream; any thread may cancel it.
"""

import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checks import check_instance, check_int
from mlx_redrafter.decoding.delivery import DecodingStats, ProgressCallback, Request
from mlx_redrafter.decoding.grammar_masks import GrammarMasks, LateMasks, Masks, TokenBytes
from mlx_redrafter.decoding.processors import LogitsProcessor, ProcessorChain
from mlx_redrafter.decoding.protocols import DraftPolicy, Proposer
from mlx_redrafter.decoding.sampling import KeyedSampler, Sampler, StockSampler, TokenSampler
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.learned_state import LearnedState
from mlx_redrafter.engine.memory_guard import MemoryGuard
from mlx_redrafter.engine.prompt_encoding import check_prompt, encode_prompt
from mlx_redrafter.engine.responses import BatchStream, CacheLocks, ResponseStream
from mlx_redrafter.engine.stored_costs import CONTEXT, doubt_times, step_costs
from mlx_redrafter.errors import ConfigError, shown
from mlx_redrafter.generation_options import GenerationOptions, Quantisation
from mlx_redrafter.grammar import Grammar, LateGrammar, read_vocabulary
from mlx_redrafter.machines.leading import target_of
from mlx_redrafter.policy.adaptive import AdaptivePolicy
from mlx_redrafter.policy.batch import BatchPolicy
from mlx_redrafter.policy.plans import SHORTEST, WIDEST, FixedPolicy, StepCosts
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.lookup import Contexts, Lookup, LookupFirst
from mlx_redrafter.thread_streams import end_streams_with_thread

# A cache may go from one engine to another.
_claims = CacheLocks()

AnyDrafter = Proposer | Literal["lookup"] | None

OPTION_NAMES = frozenset(one.name for one in fields(GenerationOptions))
# Advice for options that only mlx-lm has.
MLX_LM_OPTIONS = {
    "num_draft_tokens": "here beam_length counts those tokens and the root, so give beam_width=1 "
    "and beam_length one higher, or neither",
    "max_kv_size": "here a cache keeps all tokens; leave it out, or give kv_bits for less memory",
    "verbose": "here print the text, or each part that stream_generate yields",
}


class Engine:
    """A target and a proposer, ready for any number of texts.

    Args:
        model: A model loaded by `mlx_redrafter.load` or by mlx-lm.
        tokenizer: The model's tokenizer.
        drafter: A drafter of this model from `mlx_redrafter.load`, "lookup" for prompt lookup, None
            for plain decoding.
        memory: Learned state of earlier texts; a new one by default.

    Raises:
        CheckpointError: The drafter was made for another model.
        ConfigError: An argument is of another kind (a ValueError).
        UnsupportedTargetError: Trees of this model would not be exact.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        drafter: AnyDrafter = "lookup",
        memory: LearnedState | None = None,
    ):
        end_streams_with_thread()
        expected = "a model that mlx_redrafter.load or mlx_lm.load has loaded"
        check_instance("model", model, nn.Module, expected)
        if isinstance(tokenizer, type) or not hasattr(tokenizer, "eos_token_id"):
            raise ConfigError(f"tokenizer must be the model's tokenizer, got {shown(tokenizer)}")
        is_wrapped = isinstance(tokenizer, TokenizerWrapper)
        self.tokenizer = tokenizer if is_wrapped else TokenizerWrapper(tokenizer)
        self.target = target_of(model)
        self.memory = LearnedState() if memory is None else memory
        check_instance("memory", self.memory, LearnedState, "the `memory` of an engine")
        self.memory.passes = self.target.share_passes(self.memory.passes)
        self.proposer = _find_proposer(drafter, self.memory)
        if self.proposer is not None:
            self.proposer.check_fit(self.target, self.tokenizer)
        self._network = None if isinstance(self.proposer, Lookup) else self.proposer
        self._streams: weakref.WeakSet[ResponseStream | BatchStream] = weakref.WeakSet()
        self._is_closed = False
        self._lock = threading.Lock()
        self._token_bytes: TokenBytes | None = None

    def stream(
        self,
        prompt: str | Sequence[int] | mx.array,
        *,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] | None = None,
        prompt_cache: Sequence[Any] | None = None,
        prompt_progress_callback: ProgressCallback | None = None,
        prompt_chunk_size: Callable[[int], int] | None = None,
        history: Sequence[Sequence[int]] | Contexts = (),
        grammar: Grammar | LateGrammar | None = None,
        shared: Scheduler | None = None,
        **options: Any,
    ) -> ResponseStream:
        """Begin a text; its responses come one per token.

        Args:
            prompt: Text, or token ids.
            sampler: A sampler in mlx-lm's form instead of ``temp`` to ``seed``: the tokens are
                those of ``mlx_lm.generate_step`` with the same ``mx.random.seed``. It must depend
                on its argument and on ``mx.random.state`` only, and draw as many random numbers for
                every argument, as mlx-lm's do.
            logits_processors: Functions of the tokens so far and the logits, in mlx-lm's form.
            prompt_cache: A cache from mlx-lm's ``make_prompt_cache``, the target's layers and then,
                as in mlx-lm, those of a draft model, an EAGLE head or an MTP module; it holds the
                prompt and the tokens yielded once the iterator has ended or was closed. With
                ``kv_bits`` it is a list whose layers are replaced by quantised ones, as in mlx-lm.
            prompt_progress_callback: Callback for the prompt tokens processed and their number.
            prompt_chunk_size: Function that returns the maximum size of the next chunk of the
                prompt for the number of tokens processed, if less than ``prefill_step_size``.
            history: Token ids of earlier texts that prompt lookup searches, too, such as those
                that ``prompt_cache`` holds; or the `Contexts` of the texts before, to which this
                one adds.
            grammar: Grammar of the text, or of its end; it allows every token, after the logits
                processors. A text that ``max_tokens`` cuts may be incomplete.
            shared: Scheduler from `share`: the text shares its forward passes with the others of
                that scheduler, whatever options each has. Texts whose K/V entries are quantised
                otherwise than those of the first one are decoded alone, in turns with them.
            **options: Fields of `GenerationOptions`.

        Raises:
            ConfigError: An option is out of range (a ValueError), the prompt is empty or too long,
                the grammar does not go with the tokenizer, or the engine is closed.
            UnsupportedTargetError: Trees in this prompt cache would not be exact.
        """
        layers = _as_list("prompt_cache", prompt_cache)
        _check_layers(layers)
        _claims.check(layers)  # first of all, as caches in use hold what they may
        chosen = self._options(options)
        if sampler is not None and chosen.given_sampling:
            given = ", ".join(chosen.given_sampling)
            raise ConfigError(f"sampler= replaces {given}; give one or the other")
        _check_callable(
            sampler=sampler,
            prompt_progress_callback=prompt_progress_callback,
            prompt_chunk_size=prompt_chunk_size,
        )
        processors = _as_list("logits_processors", logits_processors)
        _check_callable(**{f"logits_processors[{i}]": one for i, one in enumerate(processors)})
        if chosen.quantisation is not None and isinstance(prompt_cache, tuple):
            raise ConfigError("prompt_cache must be a list with kv_bits, which replaces its layers")
        if shared is not None:
            check_instance("shared", shared, Scheduler, "the scheduler of engine.share()")
            if shared.target.model is not self.target.model:
                raise ConfigError("shared is the scheduler of another model; make one by share()")
        masks = None if grammar is None else self.masks(grammar)
        request = replace(
            self._request(prompt, chosen, prompt_progress_callback),
            keeps_cache=prompt_cache is not None or sampler is not None,
            chunk_size=prompt_chunk_size,
        )
        Lookup().after(history).check_fit(self.target, self.tokenizer)
        sequence = self._open(request, chosen, history, sampler, processors, prompt_cache, masks)
        stream = ResponseStream(sequence, self.tokenizer, shared)
        _claims.claim(layers, stream)
        self._register(stream)
        return stream

    def stream_batch(
        self,
        prompts: Sequence[str | Sequence[int] | mx.array],
        *,
        batch_size: int = 8,
        grammar: Grammar | LateGrammar | None = None,
        **options: Any,
    ) -> BatchStream:
        """Generate texts that share their forward passes; each is that of `stream` for its prompt.

        Args:
            prompts: Texts, or token ids; texts begin in this order as others end.
            batch_size: Maximum number of texts at once.
            grammar: Grammar of every text, as in `stream`.
            **options: Fields of `GenerationOptions`, which hold for every text, the seed too.

        Raises:
            ConfigError: As `stream`; an error says which prompt is meant.
        """
        chosen = self._options(options)
        check_int("batch_size", batch_size, 1)
        if grammar is not None:
            self.masks(grammar)  # raises for one that does not go with the tokenizer
        check_instance("prompts", prompts, (list, tuple), "a list")
        requests = [self._batch_request(i, one, chosen) for i, one in enumerate(prompts)]
        sequences = (
            self._open(request, chosen, masks=None if grammar is None else self.masks(grammar))
            for request in requests
        )
        stream = BatchStream(self._share(chosen), sequences, self.tokenizer, batch_size)
        self._register(stream)
        return stream

    def share(self) -> Scheduler:
        """Return a scheduler that batches the passes of streams that one thread reads in turns.

        Streams come and go, and each text is the one that it is alone.
        """
        end_streams_with_thread()
        return self._share(self._options({}))

    def generate(self, prompt: str | Sequence[int] | mx.array, **options: Any) -> str:
        """Generate a complete text; the options are those of `stream`."""
        return "".join(response.text for response in self.stream(prompt, **options))

    def masks(self, grammar: Grammar | LateGrammar) -> Masks:
        """Make a text's masks; raise ConfigError if the grammar does not go with the tokenizer."""
        tokenizer, size = self.tokenizer, self.target.vocab_size
        if isinstance(grammar, LateGrammar):
            if self._token_bytes is None:
                self._token_bytes = TokenBytes(read_vocabulary(tokenizer, size))
            grammars = grammar.grammars.items()
            matchers = {name: one.matcher(tokenizer, size) for name, one in grammars}
            return LateMasks(grammar, matchers, self._token_bytes)
        check_instance("grammar", grammar, Grammar, "a Grammar, such as Grammar.json_schema(...)")
        return GrammarMasks(lambda: grammar.matcher(tokenizer, size))

    def new_prompt_cache(self) -> list[Any]:
        """Make a ``prompt_cache``: layers of the target, then those of the proposer."""
        has_layers = self.proposer is not None and self.proposer.num_layers
        networks = self.networks if has_layers else self.networks[:1]
        return [layer for one in networks for layer in make_prompt_cache(one)]

    @property
    def networks(self) -> list[nn.Module]:
        """The target's model, and the networks of the proposer."""
        own = () if self.proposer is None else self.proposer.networks
        return [self.target.model, *own]

    def close(self) -> None:
        """Cancel all texts, in all threads; no other text can begin."""
        with self._lock:
            self._is_closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()

    def _register(self, stream: ResponseStream | BatchStream) -> None:
        """Let `close` cancel a stream, or cancel it now: to open one may have timed steps."""
        with self._lock:
            self._streams.add(stream)
            is_closed = self._is_closed
        if is_closed:
            stream.cancel()

    def _options(self, options: dict[str, Any]) -> GenerationOptions:
        if self._is_closed:
            raise ConfigError("the engine is closed; make a new one")
        for name in options.keys() - OPTION_NAMES:
            if name in MLX_LM_OPTIONS:
                raise ConfigError(f"{name} is mlx-lm's option; {MLX_LM_OPTIONS[name]}")
            similar = get_close_matches(name, OPTION_NAMES, n=1, cutoff=0.5)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")
        return GenerationOptions(**options)

    def _batch_request(
        self, number: int, prompt: str | Sequence[int] | mx.array, options: GenerationOptions
    ) -> Request:
        try:
            request = self._request(prompt, options)
            check_prompt(request.prompt, 0, self.target)
        except ConfigError as error:
            raise ConfigError(f"prompt {number}: {error}") from error
        return request

    def _request(
        self,
        prompt: str | Sequence[int] | mx.array,
        options: GenerationOptions,
        on_progress: ProgressCallback | None = None,
    ) -> Request:
        return Request(
            prompt=encode_prompt(self.tokenizer, prompt),
            stop_tokens=frozenset(self.tokenizer.eos_token_ids),
            max_tokens=options.max_tokens,
            prefill_step_size=options.prefill_step_size,
            on_progress=MemoryGuard().watching(on_progress or (lambda done, total: None)),
        )

    def _open(
        self,
        request: Request,
        options: GenerationOptions,
        history: Sequence[Sequence[int]] | Contexts = (),
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        prompt_cache: Any = None,
        masks: Masks | None = None,
    ) -> SequenceDecoder:
        target, ids, own = self.target, request.prompt, []
        cached, num_own = prompt_cache, 0 if self.proposer is None else self.proposer.num_layers
        if cached is not None and len(cached) == target.num_layers + num_own:
            # mlx-lm's convention: the target's layers, then those of the draft model.
            cached, own = cached[: target.num_layers], cached[target.num_layers :]
        self.memory.passes = target.share_passes(self.memory.passes)
        cache = target.caches.new(cached, options.quantisation, prompt_cache)
        check_prompt(ids, cache.length, target)
        if options.max_tokens < 0 and target.context_length is not None:
            # A prompt that fills the context still has a next token.
            room = max(1, target.context_length - cache.length - len(ids))
            request = replace(request, max_tokens=room, ends_with_context=True)
        params = options.sampling(secrets.randbits(32))
        token_sampler: TokenSampler = (
            KeyedSampler(params, target.vocab_size) if sampler is None else StockSampler(sampler)
        )
        drafting, policy = None, None
        # One token needs neither drafts nor times, unless a cache of the proposer is to be filled.
        if self.proposer is not None and (options.max_tokens != 1 or own):
            proposer, policy = self._plan(options, history, cache.length + len(ids))
            drafting = proposer.open(target, ids, options.couple, own)
        is_free = not logits_processors and masks is None
        chain = None if is_free else ProcessorChain(logits_processors, ids, masks)
        on_close = partial(self._conclude, policy, options.couple)
        return SequenceDecoder(
            target, cache, token_sampler, request, drafting, policy, chain, on_close
        )

    def _conclude(self, policy: DraftPolicy | None, couple: bool, stats: DecodingStats) -> None:
        """Keep the estimates of a sequence's policy when it ends."""
        if not isinstance(policy, AdaptivePolicy):
            return
        if policy.is_used:
            state = policy.conclude()
            stats.shapes = policy.shapes()
            if couple:
                self.memory.policy = state
            if state.ratios.are_low:
                doubt_times(self.target, self._network, self.memory.timed)
        if couple:
            self.memory.keep()

    def _share(self, options: GenerationOptions) -> Scheduler:
        scheduler, proposer = Scheduler(self.target), self.proposer
        cache = scheduler.batch.cache
        if proposer is not None:
            memory = self._estimates(options)
            scheduler.batch.policy = BatchPolicy(
                lambda: self._costs(self._network),
                lambda: cache.num_slots,  # the scheduler would refer to itself
                memory.batches,
                lambda: memory.policy,
                proposer.max_length,
                isinstance(proposer, DraftNetwork),
            )
        return scheduler

    def _estimates(self, options: GenerationOptions) -> LearnedState:
        """Return the estimates of earlier texts; those of coupled drafts fit no others."""
        if not options.couple:
            return LearnedState()
        has_own = self.proposer is None or self.proposer.networks
        self.memory.recall(self.networks, "" if has_own else type(self.proposer).__name__)
        return self.memory

    def _costs(
        self,
        network: Proposer | None,
        length: int = CONTEXT,
        quantisation: Quantisation | None = None,
    ) -> StepCosts:
        """Return the costs of steps, in seconds, for a text that begins with ``length`` tokens."""
        return step_costs(self.target, network, length, self.memory.timed, quantisation)

    def _plan(
        self, options: GenerationOptions, history: Sequence[Sequence[int]] | Contexts, length: int
    ) -> tuple[Proposer, DraftPolicy]:
        """Choose the proposer and the policy of a text that begins with ``length`` tokens."""
        proposer, plan = self.proposer, options.plan
        assert proposer is not None
        quantisation = options.quantisation and options.quantisation.of_text(length)
        if isinstance(proposer, Lookup):
            proposer = proposer.after(history)
        # Without a fixed plan, a tree may be smaller than its plan.
        _check_plan(plan or DraftPlan(WIDEST.shape, SHORTEST.num_nodes), proposer)
        if plan is not None:
            return proposer, FixedPolicy(plan, self._costs(None, quantisation=quantisation))
        network = self._network
        costs = self._costs(network, length, quantisation)
        if network is not None:
            proposer = LookupFirst(self.memory.lookup.after(history), network)
        before = self._estimates(options).policy
        return proposer, AdaptivePolicy(costs, before, max_length=proposer.max_length)


def _find_proposer(drafter: AnyDrafter, memory: LearnedState) -> Proposer | None:
    if drafter is None:
        return None
    if isinstance(drafter, str) and drafter == "lookup":
        return memory.lookup
    expected = "a drafter that mlx_redrafter.load has loaded, 'lookup' or None"
    # Classes have the attributes of a proposer, too.
    if isinstance(drafter, type) or not isinstance(drafter, Proposer):
        raise ConfigError(f"drafter must be {expected}, got {shown(drafter)}")
    return drafter


def _check_layers(layers: Sequence[object]) -> None:
    for layer in layers:
        if not hasattr(layer, "state"):
            raise ConfigError(
                "prompt_cache must hold caches from mlx_lm.models.cache.make_prompt_cache(model), "
                f"got {shown(layer)}"
            )


def _as_list(name: str, values: Any) -> list[Any]:
    """Return the values of an option as a list, which is empty for None."""
    check_instance(name, values, (list, tuple, type(None)), "a list")
    return list(values or ())


def _check_callable(**given: object) -> None:
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} must be a function, got {shown(value)}")


def _check_plan(plan: DraftPlan, proposer: Proposer) -> None:
    rows, shape = proposer.num_rows, plan.shape
    hint = " (the root counts as one), as far as the drafter's heads reach"
    check_int("beam_length", shape.length, 2, proposer.max_length, hint)
    if rows is not None:
        hint = f" with the {rows} tokens that the drafter proposes"
        check_int("beam_width", shape.width, 1, rows, hint)
        if shape.select == "top_n":
            most = 1 + shape.levels * min(shape.level_nodes, rows)
            check_int("tree_nodes", plan.num_nodes, 1, most, hint)
