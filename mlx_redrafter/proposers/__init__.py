"""What proposes the tokens that the target verifies, one file or folder per kind."""
