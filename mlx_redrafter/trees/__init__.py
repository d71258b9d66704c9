"""Token trees, batches of trees, and exact top-k."""
