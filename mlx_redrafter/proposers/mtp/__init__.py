"""MTP modules: a layer that a model was trained with, and mlx-lm leaves out."""
