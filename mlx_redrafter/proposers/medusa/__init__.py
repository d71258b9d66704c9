"""Medusa heads (arXiv 2401.10774): each proposes the tokens of one depth, all from one state."""
