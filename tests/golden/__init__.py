"""Outcomes recorded by an earlier version, which later ones must reproduce."""
