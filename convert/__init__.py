"""Making drafters trained with PyTorch loadable here, and the other way round.

Every file is read as data: nothing that a checkpoint contains is looked up, imported or called.
"""
