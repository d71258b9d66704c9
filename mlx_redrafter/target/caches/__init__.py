"""Caches that hold the committed tokens and a token tree, one file per kind of layer."""
