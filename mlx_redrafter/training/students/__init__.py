"""Kinds of drafters that can be trained."""
