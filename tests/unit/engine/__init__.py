"""Tests of mlx_redrafter/engine, one file per module."""
