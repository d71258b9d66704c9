"""The recurrent drafter of ReDrafter (arXiv 2403.09919)."""
