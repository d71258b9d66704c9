"""Compare texts of real models with stock mlx-lm's, under several conditions.

For a text that differs, it gives the gap of mlx-lm's two best logits there, and how much mlx-lm's
own logits change if it reads the same tokens in one pass. The gap is a tie if it is at most twice
that.
The texts of each model and precision are kept in a file of the folder, and not decoded again. The
exit code is 1 if a text differs where there is no tie.
"""

from argparse import ArgumentParser, Namespace
from itertools import chain
from pathlib import Path
from typing import Any, cast

from mlx_redrafter.bench.lab.exactness import COLUMNS, decode_texts, tabulate
from mlx_redrafter.bench.lab.options import at_least
from mlx_redrafter.bench.lab.real_models import MODELS, PRECISIONS, find_model
from mlx_redrafter.bench.prompts import encode_prompts, fit_prompts, read_prompts, select_prompts
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import CommonSettings
from mlx_redrafter.checkpoints.bundled import checkpoint_name
from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.cli.bench_output import parse_shapes, progress, refuse_texts


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help=".jsonl files")
    parser.add_argument("--num-prompts", type=at_least(1), default=40)
    parser.add_argument("--max-prompt", type=at_least(1), help="leave out prompts of more tokens")
    parser.add_argument("--context", type=at_least(1), help="tokens that all prompts are fitted to")
    parser.add_argument("-m", "--max-tokens", type=at_least(2), default=200)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--drafters", nargs="+", default=["lookup"], help="lookup, or folders")
    parser.add_argument("--shapes", default="1x5,4x5x9", help="fixed shapes, beside the default")
    parser.add_argument("--batch-size", type=at_least(2), default=4)


def run(arguments: Namespace) -> None:
    wrong = 0
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for name in arguments.models:
        for precision in arguments.precisions:
            folder = find_model(MODELS[name], precision)
            path = arguments.out / f"{folder.name}.json"
            found = _compare(arguments, folder, path)
            rows += tabulate(MODELS[name].name, precision, found)
            wrong += sum(not (one.is_equal or one.is_tie) for one in found)
    for row in rows:
        print(f"| {' | '.join(row)} |")
    refuse_texts(wrong)


def _compare(arguments: Namespace, folder: Path, path: Path) -> Any:
    drafters: dict[str, Any] = {}
    for name in arguments.drafters:
        model, tokenizer, drafters[checkpoint_name(name)] = load(folder, drafter=name)
    prompts = list(chain.from_iterable(map(read_prompts, arguments.prompts)))
    prompts = list({prompt.text: prompt for prompt in prompts}.values())
    if arguments.context is not None:
        chosen = select_prompts(prompts, arguments.num_prompts)
        chosen = fit_prompts(tokenizer, chosen, prompts, arguments.context)
    else:
        most = arguments.max_prompt
        encoded = encode_prompts(tokenizer, prompts)
        short = [
            prompt
            for prompt, one in zip(prompts, encoded, strict=True)
            if most is None or len(one.ids) <= most
        ]
        chosen = select_prompts(short, arguments.num_prompts)
    names = "num_prompts", "max_prompt", "context", "max_tokens", "shapes", "batch_size"
    configuration = {"model": folder.name, "drafters": list(drafters)} | {
        name: getattr(arguments, name) for name in names
    }
    recording = Recording(path, "exact", configuration, resume=True)
    settings = CommonSettings(model, tokenizer, cast("Any", None), arguments.max_tokens)
    with progress("Batches") as on_progress:
        return decode_texts(
            settings,
            drafters,
            parse_shapes(arguments.shapes),
            encode_prompts(tokenizer, chosen),
            arguments.batch_size,
            recording,
            on_progress,
        )
