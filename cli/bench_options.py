"""Options that the commands of ``redrafter-mlx bench`` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from mlx_redrafter.checks import check_int, check_number
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.cli.text_options import Overwrite
from mlx_redrafter.destinations import check_destination
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.runs import CommonSettings, EncodedPrompt

Resume = Annotated[bool, "Continue the interrupted benchmark in --out."]
TextTokens = Annotated[int, "Maximum number of tokens per text.", "--max-tokens", "-m"]
Repeats = Annotated[int, "Number of rounds per prompt."]
PromptFile = Annotated[
    Path,
    "Prompts: a .jsonl or .parquet file as of MT-bench, Spec-Bench or SPEED-Bench, or "
    'with "prompt" or "text" in each row; text with empty lines between prompts; or a dataset '
    "such as nvidia/SPEED-Bench:qualitative.",
    "--prompts",
]


@dataclass(frozen=True)
class Prompts:
    prompts: PromptFile
    num_prompts: Annotated[
        int | None, "Number of prompts, from all categories alternately; all by default."
    ] = None

    def __post_init__(self) -> None:
        if self.num_prompts is not None:
            check_int("num_prompts", self.num_prompts, 1)

    def encode(self, settings: CommonSettings, length: int | None = None) -> list[EncodedPrompt]:
        """Encode the prompts as token ids, each with ``length`` tokens if that is given."""
        from mlx_redrafter.bench import prompts
        from mlx_redrafter.engine.prompt_encoding import check_prompt
        from mlx_redrafter.machines.leading import target_of

        found = prompts.read_prompts(self.prompts)
        chosen = prompts.select_prompts(found, self.num_prompts)
        if length is not None:
            chosen = prompts.fit_prompts(settings.tokenizer, chosen, found, length)
        encoded = prompts.encode_prompts(settings.tokenizer, chosen)
        target = target_of(settings.model)
        for one in encoded:
            try:
                check_prompt(one.ids, 0, target)
            except ConfigError as error:
                raise ConfigError(f"prompt {one.name} of {self.prompts}: {error}") from error
        return encoded


@dataclass(frozen=True)
class Rounds:
    """Texts that several decoding methods generate in interleaved runs."""

    max_tokens: TextTokens = 128
    repeats: Repeats = 3
    cool_down: Annotated[float, "Seconds to rest before every run."] = 0.0

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1)
        check_int("repeats", self.repeats, 1)
        check_number("cool_down", self.cool_down, 0, 1e6)


@dataclass(frozen=True)
class ShortRounds(Rounds):
    max_tokens: TextTokens = 64
    repeats: Repeats = 2


@dataclass(frozen=True)
class Output:
    """The result file of a benchmark: a new one, or the one to continue."""

    panel: ClassVar = None
    out: Annotated[Path | None, "JSON file for the result.", "-o"] = None
    resume: Resume = False
    overwrite: Overwrite = False

    def beside(self, *suffixes: str) -> list[Path]:
        """Return the files that a benchmark writes next to its result, by their suffixes."""
        out = self.out  # "." has no name that may get a suffix
        return [] if out is None else [out.parent / f"{out.stem}{one}" for one in suffixes]

    def check(
        self, kind: str, inputs: Sequence[str | Path | None], beside: Sequence[Path] = ()
    ) -> None:
        """Check before any work that the result and the files ``beside`` it may be written."""
        from mlx_redrafter.bench.result_file import read_result

        if self.out is None:
            return
        if self.out in beside:
            raise ConfigError(f"expected a JSON file, found {self.out}; give a name in .json")
        continues, is_finished = self.resume and self.out.exists(), False
        if continues:
            is_finished = "disturbances" in read_result(self.out, kind)
        elif self.out.is_file() and not self.overwrite:
            raise ConfigError(
                f"{self.out} exists; resume it with --resume, choose another file, or add "
                "--overwrite"
            )
        for one in (self.out, *beside):  # the others were written at the end
            is_own = continues if one is self.out else is_finished
            check_destination(one, inputs, is_own, self.overwrite, is_folder=False)

    def begin(
        self,
        kind: str,
        pair: Pair,
        settings: CommonSettings,
        prompts: Path,
        encoded: Sequence[EncodedPrompt],
        **others: Any,
    ) -> Recording:
        """Begin or resume the recording, described by the pair, the prompts and other settings."""
        from mlx_redrafter.bench.prompts import describe_prompts
        from mlx_redrafter.bench.recording import Recording
        from mlx_redrafter.bench.result_file import pair_names

        assert settings.drafter is not None
        names = pair_names(pair.model, pair.drafter_name, settings.drafter)
        described = {**names, **describe_prompts(prompts, encoded), **others}
        return Recording(self.out, kind, described, self.resume, self.overwrite)


def load_settings(pair: Pair, max_tokens: int) -> CommonSettings:
    from mlx_redrafter.bench.runs import CommonSettings

    return CommonSettings(*pair.load(), max_tokens)
