"""Tests of mlx_redrafter/policy, one file per module."""
