"""What must hold for every seed, shape and draft."""
