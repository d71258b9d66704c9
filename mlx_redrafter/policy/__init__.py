"""How much to draft, step by step; no text depends on it."""
