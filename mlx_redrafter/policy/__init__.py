"""Draft plans of every step: how many tokens to draft and to verify; no text depends on them."""
