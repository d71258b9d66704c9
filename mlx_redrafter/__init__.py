"""Lossless speculative decoding with Recurrent Drafter for MLX language models."""
from mlx_redrafter.version import __version__
