"""SpecFormer as a proposer."""
