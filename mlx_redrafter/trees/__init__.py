"""Trees of draft tokens, several of them padded to one size, and the largest of many scores."""
