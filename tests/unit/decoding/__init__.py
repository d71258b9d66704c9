"""Tests of mlx_redrafter/decoding."""
