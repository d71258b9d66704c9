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

import errno

# What to do about a file or a disk, by error number.
_ADVICE = {
    errno.ENOSPC: "make room on the disk, or choose another one",
    errno.EDQUOT: "make room on the disk, or choose another one",
    errno.EIO: "make room on the disk, or choose another one",
    errno.EFBIG: "make room on the disk, or choose another one",
    errno.EACCES: "choose a path that you may use, or change its permissions",
    errno.EPERM: "choose a path that you may use, or change its permissions",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def explain(error: OSError) -> str:
    """What is wrong with a file or a disk, and what to do about it."""
    if error.strerror is None:  # raised by a library, with a text of its own
        return str(error) or type(error).__name__
    advice = _ADVICE.get(error.errno or 0, "choose another path" if error.filename else "")
    return "; ".join(filter(None, [error.strerror, advice]))


def first_line(error: BaseException) -> str:
    """First line of an exception's text, or its type where there is none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
