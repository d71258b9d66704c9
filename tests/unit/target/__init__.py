"""Tests of mlx_redrafter/target, one file per module."""
