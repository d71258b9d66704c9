"""A target over several machines: rank 0 leads, all other ranks follow."""
