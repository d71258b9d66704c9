"""Tests of mlx_redrafter/engine."""
