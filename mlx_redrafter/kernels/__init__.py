"""Kernels of this package for Apple GPUs."""
