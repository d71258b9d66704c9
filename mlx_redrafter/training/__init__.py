"""Training a drafter for one target, on the machine that will use it."""
