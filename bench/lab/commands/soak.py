"""Load a server of two models with requests of all protocols, and kill it now and then.

The exit code is 1 if an answer is wrong, or a request failed that must not.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import typer

from mlx_redrafter.bench.lab.options import at_least
from mlx_redrafter.bench.lab.soak import ServedProcess, ask_alone, run_clients
from mlx_redrafter.bench.lab.soak_requests import make_cases
from mlx_redrafter.checkpoints.bundled import find_bundled
from mlx_redrafter.errors import DataError

# Chat templates of the two models, which make their texts different.
TEMPLATES = {
    "first": "{% for one in messages %}{{ one.content }} {% endfor %}",
    "second": "{% for one in messages %}She said: {{ one.content }} {% endfor %}",
}
# Maximum size of the log, in bytes.
MAX_LOG = 4 << 20


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", type=Path, help="folder of the model; default: bundled")
    parser.add_argument("--requests", type=at_least(1), default=2000)
    parser.add_argument("--clients", type=at_least(1), default=16, help="concurrent clients")
    parser.add_argument("--kills", type=at_least(0), default=3, help="times to kill the server")
    parser.add_argument("-m", "--max-tokens", type=at_least(1), default=24)
    parser.add_argument("--seed", type=at_least(0), default=0)


def run(arguments: Namespace) -> None:
    """Run the command."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        problems = _soak(arguments, folder)
    finally:
        shutil.rmtree(folder)
    if problems:
        raise DataError(f"{len(problems)} problems, the first: {problems[0]}")


def _make_models(model: Path, folder: Path) -> list[str]:
    """Copy a model twice, each with a chat template."""
    for name, template in TEMPLATES.items():
        shutil.copytree(model, folder / name)
        path = folder / name / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return list(TEMPLATES)


def _soak(arguments: Namespace, folder: Path) -> list[str]:
    models = folder / "models"
    models.mkdir()
    names = _make_models(arguments.model or find_bundled("target"), models)
    size = sum(path.stat().st_size for path in (models / names[0]).iterdir())
    options = ["--model", str(models), "--drafter", "lookup", "--max-model-bytes", str(3 * size)]
    options += ["--prompt-cache-bytes", str(32 << 20), "--prompt-disk-bytes", str(64 << 20)]
    server = ServedProcess([*options, "--max-waiting", "64"], folder / "log")
    problems: list[str] = []
    try:
        cases = make_cases(names, arguments.max_tokens)
        expected = ask_alone(server.port, cases)
        typer.echo(f"{len(cases)} kinds of requests; at first {server.measure()}")
        rounds = arguments.kills + 1
        count, before = max(1, arguments.requests // rounds), None
        for number in range(rounds):
            start = time.monotonic()
            is_last = number == rounds - 1
            outcome = run_clients(
                server,
                cases,
                expected,
                count,
                arguments.clients,
                arguments.seed + number,
                None if is_last else 0.3 + 0.4 * number / rounds,
            )
            now = server.measure()
            seconds = time.monotonic() - start
            typer.echo(f"{dict(outcome.counts)} in {seconds:.0f} s; {now}")
            problems += outcome.wrong
            for problem in outcome.wrong:
                typer.echo(problem)
            if before is not None and is_last and now.get("files", 0) > before.get("files", 0) + 50:
                problems.append(f"open files grew from {before} to {now}")
            before = now
        if before is not None and before["log"] > MAX_LOG:
            problems.append(f"the log has {before['log']} bytes")
        if code := server.end():
            problems.append(f"exit code {code} at the end")
    finally:
        server.process.kill()
    return problems
