"""The test suite, arranged by what it proves."""
