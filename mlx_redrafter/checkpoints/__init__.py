"""Loading of a target and its proposer from folders or repositories, and the bundled pair."""
