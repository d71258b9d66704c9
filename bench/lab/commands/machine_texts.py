"""Texts of local ranks against those of one process: every family and every kind of proposer.

The ranks run scripts of the tests, so the command needs a checkout and what the tests need.
"""

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

import typer

from mlx_redrafter.bench.lab.ranks import started
from mlx_redrafter.bench.result_file import new_result, write_result
from mlx_redrafter.errors import ResourceError

PROPOSERS, FAMILIES = "tests.machines.proposers", "tests.machines.families"
# Families without experts, which MLX computes in 16 bits on a CPU, too.
DENSE = "iquestloopcoder", "llama", "ministral3", "qwen2", "qwen3", "qwen3_5"
# Scripts of the ranks, one after the other, with their words.
WORK = (
    (PROPOSERS,),
    (PROPOSERS, "MTP"),
    (PROPOSERS, "slow", "recurrent", "lookup"),
    (FAMILIES,),
    (FAMILIES, "dtype=bfloat16", *DENSE),
)
# Seconds that a script may take, a multiple of what a busy machine needs.
LIMIT = 3600.0


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", default="2,3,4", help="Numbers of ranks; default: 2,3,4.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result.")


def run(options: Namespace) -> None:
    """Run all scripts on each number of ranks; write the result after each of them."""
    sizes = [int(size) for size in options.ranks.split(",")]
    result = new_result("machine texts", {"ranks": sizes}, rows=[])
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", PROPOSERS, folder], check=True)
        for size in sizes:
            for script, *words in WORK:
                given = [folder] if script == PROPOSERS else []
                with started(["-m", script, *given, *words], size) as ranks:
                    first, *others = ranks.wait(LIMIT)
                lines = [line for line in first.out.splitlines() if line.startswith("{")]
                result["rows"] += [{"ranks": size, **json.loads(line)} for line in lines]
                write_result(options.out, result)
                if first.code != 0:
                    failed.append([script, *words, *(one.out[-200:] for one in (first, *others))])
    wrong = [row for row in result["rows"] if not all(row["checks"].values())]
    for row in wrong:
        typer.echo(json.dumps(row), err=True)
    tokens = sum(row["tokens"] for row in result["rows"])
    typer.echo(f"{len(result['rows'])} rows, {tokens} tokens, {len(wrong)} rows with differences")
    if failed:
        raise ResourceError(f"expected texts of every script, found {failed}; look at their causes")
    if any(row["dtype"] == "float32" for row in wrong):
        raise typer.Exit(1)
