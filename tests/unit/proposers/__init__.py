"""Tests of mlx_redrafter/proposers, one file per module."""
