"""Get two published models, SmolLM2-135M-Instruct and Gemma 3 270M, and print their folders.

The environment variable MLX_REDRAFTER_REAL_MODELS names the folder that they are kept in.
"""

from argparse import ArgumentParser, Namespace

from mlx_redrafter.bench.lab.real_models import MODELS, PRECISIONS, find_model


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["float32"])


def run(arguments: Namespace) -> None:
    for name in arguments.models:
        for precision in arguments.precisions:
            print(find_model(MODELS[name], precision), flush=True)
