"""Loading a target and its drafter from folders or repositories, and the bundled pair."""
