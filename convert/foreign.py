"""The interface that conversion needs from every kind of drafter."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoints.identity import targets_in_config
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.publication import PROVENANCE_KEY
from mlx_redrafter.convert.selftest import AS_IT_SAYS, Reading, choose_reading, predict_next
from mlx_redrafter.convert.source import Source
from mlx_redrafter.errors import ConfigError, quote
from mlx_redrafter.proposers.checkpoint import check_shapes, give_weights
from mlx_redrafter.proposers.layer_sizes import build
from mlx_redrafter.target.target import Target

# Options that only some kinds have.
SPECIAL = ("rnn_activation", "vocab_slice", "tree")


class ForeignDrafter:
    """A drafter in a checkpoint whose headers have been read.

    Creating one raises `CheckpointError` if the checkpoint cannot be converted, and `ConfigError`
    if an option is for another kind.

    Attributes:
        noun: Name of the kind, with its article; ``linked`` begins a card, with a link to the
            paper.
        takes: Those of `SPECIAL` that the kind has.
        network: Class of its networks.
        kind: Description of the checkpoint.
        name_set: Naming convention of its tensors; ``names`` are theirs, by the network's.
        target: Name of the target if the checkpoint gives one.
        is_cast: Function that returns whether a floating-point weight gets the dtype of the
            options.
    """

    noun: str
    linked: str
    takes: tuple[str, ...] = ()
    network: type[Any]
    kind: str
    name_set: str
    names: Mapping[str, str]
    config: Any
    target: str | None = None

    def __init__(self, source: Source, options: ConversionOptions):
        for name in SPECIAL:
            if getattr(options, name) is not None and name not in self.takes:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is not for {self.noun}; leave it out")
        self.source, self.options = source, options
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.is_cast: Callable[[str], bool] = lambda own: True

    def check(self, *remedy: str) -> None:
        """Raise `CheckpointError` unless its network can have the stored tensors as its weights."""
        shapes = {own: self.source.tensors[name].shape for own, name in self.names.items()}
        check_shapes(build(self.network, self.config), shapes, self.source.name, self.names)
        self.source.check_dtypes(self.names, *remedy)

    def describe(self, noun: str, layout: str) -> str:
        """Describe the checkpoint: a kind, its layout or that it was converted, and its target."""
        config = self.source.config
        target = self.target or next(iter(targets_in_config(config)), None)
        text = noun + (", written by this converter" if PROVENANCE_KEY in config else layout)
        return f"{text}, for {quote(target)}" if target else text

    def build(self) -> Any:
        """Make the network with the stored weights, in their dtype."""
        network = build(self.network, self.config)
        return give_weights(network, self.read(), self.source.name, self.names)

    def read(self) -> dict[str, mx.array]:
        """Read the stored weights, in the form that the network has; their sizes are checked."""
        return {own: self.source.tensors[name].read() for own, name in self.names.items()}

    def test(self, network: Any, target: Target, tokenizer: TokenizerWrapper) -> Reading[Any]:
        """Choose the reading of the config that the target accepts most, and calibrate with it.

        The network of the result is the one to write.
        """
        return choose_reading({AS_IT_SAYS: network}, target, tokenizer, predict_next)
