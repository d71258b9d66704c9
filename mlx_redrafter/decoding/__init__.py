"""The core: one step after another of draft, verify, accept, commit; knows no proposer."""
