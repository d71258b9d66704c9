"""Replay an agent's conversation, with branches, through the kept prompts and after a restart.

For every kind of cache: the tokens processed of those that an ideal prefix cache processes, the
time to the first token by turn, and whether every text is that of a cold start. The exit code is 1
if a text differs. Random models.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import typer

from mlx_redrafter.bench.lab.agent_trace import Trace
from mlx_redrafter.bench.lab.options import at_least
from mlx_redrafter.bench.lab.trace_models import CONFIGS, VOCAB_SIZE, make_model
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import DataError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.models import LoadedModel
from mlx_redrafter.server.prefix_store import PrefixStore

# Tokens with which quantization begins, and its elements per group.
QUANTISED: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 1000}
# Maximum size of the kept prompts, in bytes.
MAX_BYTES = 4 << 30


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--kind", choices=CONFIGS, action="append", help="all kinds by default")
    parser.add_argument("--turns", type=at_least(1), default=40)
    parser.add_argument("--tokens", type=at_least(100), default=30_000, help="of the last prompt")
    parser.add_argument("-m", "--max-tokens", type=at_least(1), default=40)
    parser.add_argument(
        "--cold-every", type=at_least(0), default=1, help="turns per cold start to compare; 0: none"
    )


def run(arguments: Namespace) -> None:
    """Run the command."""
    wrong = 0
    for kind in arguments.kind or CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            replay = _Replay(kind, arguments.max_tokens)
            for name in ("before the restart", "after it"):
                typer.echo(f"{kind}, {name}: {replay.replay(Path(folder), arguments)}")
            wrong += replay.num_wrong
    if wrong:
        raise DataError(f"{wrong} texts differ from those of a cold start")


class _Replay:
    """Replays of one conversation.

    Args:
        kind: Kind of the cache.
        max_tokens: Maximum number of tokens of an answer.

    Attributes:
        num_wrong: Number of texts that differ from those of a cold start.
    """

    def __init__(self, kind: str, max_tokens: int):
        from mlx_lm.tokenizer_utils import load

        how = QUANTISED if kind == "quantised" else {}
        self._options = GenerationOptions(max_tokens=max_tokens, **how)
        tokenizer = load(find_bundled("target"))
        tokenizer._eos_token_ids = set()
        self._engine = Engine(make_model(kind), tokenizer, "lookup")
        self._cold: dict[int, list[int]] = {}
        self._known: list[list[int]] = []
        self.num_wrong = 0

    def replay(self, folder: Path, arguments: Namespace) -> str:
        """Replay the conversation with the prompts kept in a folder; return what was measured."""
        sizes = (arguments.turns, arguments.tokens)
        trace = Trace(*sizes, vocab_size=VOCAB_SIZE, texts=list(self._known))
        store = PrefixStore(MAX_BYTES, folder, MAX_BYTES)
        loaded = LoadedModel(self._engine, self._options, store)
        cold = LoadedModel(self._engine, self._options, PrefixStore(0))
        processed, times, cold_times = 0, list[float](), list[float]()
        num_equal, num_wrong = 0, self.num_wrong

        def answer(prompt: list[int]) -> list[int]:
            nonlocal processed, num_equal
            found, num_cached, seconds = self._write(loaded, prompt)
            processed += len(prompt) - num_cached
            times.append(seconds)
            turn, every = len(times), arguments.cold_every
            if every and turn % every == 0:
                if turn not in self._cold:
                    self._cold[turn], _, seconds = self._write(cold, prompt)
                    cold_times.append(seconds)
                is_equal = found == self._cold[turn]
                num_equal, self.num_wrong = num_equal + is_equal, self.num_wrong + (not is_equal)
            return found

        trace.replay(answer)
        store.close()
        self._known = trace.texts
        shown = " ".join(f"{1000 * one:.0f}" for one in times)
        more = f"; cold median {1000 * statistics.median(cold_times):.0f}" if cold_times else ""
        return (
            f"{processed} tokens processed of {trace.num_prompt}, {trace.num_ideal} by an ideal "
            f"cache ({trace.num_ideal / processed:.4f}); {num_equal} texts equal to cold ones, "
            f"{self.num_wrong - num_wrong} different; ms to the first token, median "
            f"{1000 * statistics.median(times):.0f}{more}, by turn: {shown}"
        )

    def _write(self, loaded: LoadedModel, prompt: list[int]) -> tuple[list[int], int, float]:
        """Write a text; return its tokens, the number of cached ones, and seconds to the first."""
        start, first, tokens = time.perf_counter(), 0.0, list[int]()
        prefix, options = loaded.prefixes.take(prompt), self._options
        stream = self._engine.stream(
            prompt[prefix.length :],
            prompt_cache=prefix.cache,
            history=[prompt[: prefix.length]],
            prompt_progress_callback=lambda done, total: prefix.note(done),
            prompt_chunk_size=prefix.chunk_size,
            **vars(options),
        )
        for response in stream:
            first = first or time.perf_counter() - start
            tokens.append(response.token)
        loaded.prefixes.keep([*prompt, *tokens], len(prompt), prefix)
        return tokens, prefix.length, first
