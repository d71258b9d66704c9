"""Tests of mlx_redrafter/decoding, one file per module."""
