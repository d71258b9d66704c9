"""Scripts of a release, which run from a checkout: its notes, and a formula for Homebrew."""
