"""Kinds of drafters that can be trained, each in its own way."""
