"""Tests of mlx_redrafter/proposers."""
