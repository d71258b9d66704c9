"""One file per module of the library."""
