"""The ``redrafter-mlx`` command line: parse, call the library, print."""
