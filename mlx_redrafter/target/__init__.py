"""The target: stock mlx-lm models and their caches; the only folder that knows their insides."""
