"""The exceptions of this package.

    RedrafterError
    ├── ConfigError (also a ValueError)      an option or a config value is out of range
    ├── CheckpointError                      a model or drafter file cannot be used
    ├── UnsupportedTargetError               the target or its cache cannot be decoded exactly
    ├── NonFiniteError                       NaN or infinity where numbers were expected
    ├── DataError                            a text or prompt file cannot be used for training
    └── ResourceError                        not enough disk or memory for what was asked

Every message says what was expected, what was found and what to do about it.
"""


class RedrafterError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(RedrafterError, ValueError):
    """An option or a configuration value is impossible or contradicts another one."""


class CheckpointError(RedrafterError):
    """A checkpoint is missing, truncated, foreign, or does not fit the model it is used with."""


class UnsupportedTargetError(RedrafterError):
    """The target's architecture, positions or cache have no exact tree decoding here."""


class NonFiniteError(RedrafterError):
    """Weights or logits contain NaN or infinity."""


class DataError(RedrafterError):
    """A file of texts or prompts is missing, malformed, or too small to train on."""


class ResourceError(RedrafterError):
    """The disk or the memory is too small for what was asked."""
