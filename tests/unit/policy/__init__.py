"""Tests of mlx_redrafter/policy."""
