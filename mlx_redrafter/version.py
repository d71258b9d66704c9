"""The one place that holds the version; nothing else may be imported to read it."""

__version__ = "0.1.0"
