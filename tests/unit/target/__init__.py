"""Tests of mlx_redrafter/target."""
