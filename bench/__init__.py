"""Benchmarks: what drafting gains on this machine, where a step's time goes, what a chip would do.

Speed is always a ratio to stock mlx-lm on the same weights, measured in turns in one run.
"""
