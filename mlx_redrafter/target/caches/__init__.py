"""Caches that hold a token tree beside the committed tokens, one file per kind of layer."""
