"""The protocols that clients speak: each is a reader and a writer of the same record.

The readers raise `Refusal` for a value that does not fit, and for a field that is not supported.
"""
