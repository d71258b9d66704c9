"""The command line, from arguments to output and exit code."""
