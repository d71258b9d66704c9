"""EAGLE heads as proposers."""
