"""Every supported architecture against stock mlx-lm, with tiny random weights."""
