"""Prompt files: MT-bench, Spec-Bench and SPEED-Bench, plain JSON lines, and text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.bench.runs import EncodedPrompt
from mlx_redrafter.checks import parse_line, read_file
from mlx_redrafter.engine.prompt_encoding import encode_question
from mlx_redrafter.errors import CheckpointError, ConfigError, first_line

# Categories of Spec-Bench, besides the one that holds MT-bench's eight categories.
SPEC_BENCH_CATEGORIES = frozenset({"translation", "summarization", "qa", "math_reasoning", "rag"})
# Those of them that SPEED-Bench does not have.
ONLY_SPEC_BENCH = frozenset({"translation", "math_reasoning"})
# Spec-Bench's name for MT-bench's categories together.
MULTI_TURN = "multi_turn"
# Name of a dataset on the hub with its configuration, such as nvidia/SPEED-Bench:qualitative.
DATASET = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")
# Beginning of the prompts that SPEED-Bench does not publish itself.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
# Category of prompts in files without categories.
NO_CATEGORY = "all"


@dataclass(frozen=True)
class Prompt:
    """A prompt without a chat template; its name is distinct in its file."""

    name: str
    category: str
    text: str


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts in a file, or of a dataset on the Hugging Face Hub.

    A ``.jsonl`` file has one object per line, and a ``.parquet`` file one per row, with "turns"
    (MT-bench, Spec-Bench, SPEED-Bench), "prompt" or "text"; "category" and "question_id" or "id"
    are optional. Of several turns the first is the prompt, as the later ones need answers. Any
    other file is text, with empty lines between prompts. A dataset is named with its configuration,
    such as ``nvidia/SPEED-Bench:throughput_8k``.
    """
    dataset, suffix = DATASET.fullmatch(path.as_posix()), path.suffix.lower()
    if dataset is not None and not path.exists():
        rows = list(chain.from_iterable(map(_read_parquet, _download(dataset[1], dataset[2]))))
    elif suffix == ".parquet":
        rows = _read_parquet(path)
    elif suffix == ".jsonl":
        # `splitlines` also divides at characters that JSON allows in a text, such as U+2028.
        lines = enumerate(read_file(path, "prompts").split("\n"), start=1)
        rows = [_parse(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    elif suffix == ".json":
        raise ConfigError(f"expected a text, .jsonl or .parquet file, found {path}; convert it")
    else:
        blocks = [block.strip() for block in read_file(path, "prompts").split("\n\n")]
        rows = [{"text": block} for block in blocks if block]
    prompts = [_as_prompt(row, path, number) for number, row in enumerate(rows, start=1)]
    if not prompts:
        raise ConfigError(f"no prompts in {path}")
    missing = sum(prompt.text.startswith(PLACEHOLDER) for prompt in prompts)
    if missing:
        raise ConfigError(
            f"{missing} of the {len(prompts)} prompts in {path} are not published there; fill them "
            "in with prepare_data.py of NVIDIA's specdec_bench, and give the file that it writes"
        )
    return _as_spec_bench(_with_own_names(prompts))


def fit_prompts(
    tokenizer: TokenizerWrapper, prompts: Sequence[Prompt], fillers: Sequence[Prompt], length: int
) -> list[Prompt]:
    """Give prompts about ``length`` tokens, those of the chat template included.

    Longer ones are cut, and ``fillers`` are put before shorter ones, in this order.
    """
    found = []
    for prompt in prompts:
        missing = length - len(encode_question(tokenizer, prompt.text))
        if missing < 0:
            ids = tokenizer.encode(prompt.text, add_special_tokens=False)
            text = tokenizer.decode(ids[: max(0, len(ids) + missing)])
        else:
            text = _filler(tokenizer, prompt, fillers, missing) + prompt.text
        if not text:
            raise ConfigError(f"expected prompts of more tokens than a chat has, got {length}")
        found.append(replace(prompt, text=text))
    return found


def _filler(
    tokenizer: TokenizerWrapper, prompt: Prompt, fillers: Sequence[Prompt], length: int
) -> str:
    ids: list[int] = []
    for filler in fillers:
        if len(ids) >= length:
            break
        if filler.name != prompt.name:
            ids += tokenizer.encode(filler.text + "\n\n", add_special_tokens=False)
    if len(ids) < length:
        raise ConfigError(
            f"expected other prompts of {length} tokens to put before a short one, found "
            f"{len(ids)}; give a file with more or longer prompts"
        )
    return str(tokenizer.decode(ids[len(ids) - length :]))


def select_prompts(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """Select the first ``count`` prompts, from all categories alternately; None keeps all."""
    if count is None or count >= len(prompts):
        return list(prompts)
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    rounds = zip_longest(*by_category.values())
    return [prompt for one in rounds for prompt in one if prompt is not None][:count]


def encode_prompts(tokenizer: TokenizerWrapper, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
    """Encode prompts as token ids, in the chat format if the tokenizer has one."""
    return [
        EncodedPrompt(one.name, one.category, encode_question(tokenizer, one.text), one.text)
        for one in prompts
    ]


def describe_prompts(path: Path, prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
    """Describe the prompts for a result: file name, and name, category and length of each."""
    return {
        "prompt_file": path.name,
        "prompts": [[prompt.name, prompt.category, len(prompt.ids)] for prompt in prompts],
    }


def _read_parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} is a Parquet file; run `pip install pyarrow`, or give a .jsonl file"
        ) from error
    try:
        return list(parquet.read_table(path).to_pylist())
    except (ArrowException, OSError) as error:
        raise ConfigError(f"cannot read the prompts in {path}: {first_line(error)}") from error


def _download(repository: str, configuration: str) -> list[Path]:
    try:
        folder = snapshot_download(
            repository, repo_type="dataset", allow_patterns=[f"*{configuration}/*.parquet"]
        )
    except Exception as error:  # the hub's libraries raise exceptions of many kinds
        raise CheckpointError(
            f"cannot download the dataset {repository}: {first_line(error)}"
        ) from error
    found = sorted(Path(folder).rglob(f"{configuration}/*.parquet"))
    if not found:
        raise CheckpointError(f"the dataset {repository} has no configuration {configuration!r}")
    return found


def _parse(line: str, place: str) -> Any:
    try:
        return parse_line(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not valid JSON: {error}") from error


def _as_prompt(values: Any, path: Path, number: int) -> Prompt:
    place = f"{path}, prompt {number}"
    if isinstance(values, str):
        values = {"text": values}
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: expected an object or a string, got {type(values).__name__}")
    text, turns = values.get("prompt", values.get("text")), values.get("turns")
    if isinstance(turns, list) and turns:
        text = turns[0]
    if not isinstance(text, str) or not text:
        raise ConfigError(f'{place}: expected a text in "turns", "prompt" or "text"')
    name = values.get("question_id", values.get("id", number))
    return Prompt(str(name), str(values.get("category", NO_CATEGORY)), text)


def _with_own_names(prompts: list[Prompt]) -> list[Prompt]:
    """Number all prompts if some share a name, as in files that were joined."""
    if len({prompt.name for prompt in prompts}) == len(prompts):
        return prompts
    return [replace(prompt, name=str(number)) for number, prompt in enumerate(prompts, start=1)]


def _as_spec_bench(prompts: list[Prompt]) -> list[Prompt]:
    """Give prompts Spec-Bench's six categories, if the file is Spec-Bench."""
    if not any(prompt.category in ONLY_SPEC_BENCH for prompt in prompts):
        return prompts
    known = {*SPEC_BENCH_CATEGORIES, NO_CATEGORY}
    return [
        prompt if prompt.category in known else Prompt(prompt.name, MULTI_TURN, prompt.text)
        for prompt in prompts
    ]
