"""``python -m mlx_redrafter.cli``."""

from mlx_redrafter.cli.main import run

run()
