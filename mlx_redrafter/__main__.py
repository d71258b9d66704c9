"""``python -m mlx_redrafter``."""

from mlx_redrafter.cli.main import run

run()
