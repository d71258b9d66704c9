"""The library's calls: an engine and its streams, generation functions, conversations."""
