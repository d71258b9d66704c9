"""Conversion of Medusa heads."""

from dataclasses import replace

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.foreign import ForeignDrafter
from mlx_redrafter.convert.selftest import AS_IT_SAYS, Reading, choose_reading, dequantised
from mlx_redrafter.convert.source import Source
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.medusa.layouts import read_heads
from mlx_redrafter.proposers.medusa.network import Medusa, calibrate, predict, rank_accuracies
from mlx_redrafter.target.target import Target


class ForeignMedusa(ForeignDrafter):
    noun = "Medusa heads"
    linked = "[Medusa](https://arxiv.org/abs/2401.10774) heads"
    takes = ("vocab_slice", "tree")
    network = Medusa
    config: MedusaConfig

    def __init__(self, source: Source, options: ConversionOptions):
        super().__init__(source, options)
        self.config, self.name_set, self.names, self.notes = read_heads(
            source.config, source.shapes
        )
        self.check()
        self.kind = self.describe(self.noun, f" with {self.name_set} names")
        if options.tree is not None and options.target is None:
            if options.tree == "static" and self.config.rank_accuracies is None:
                raise ConfigError(
                    "a static tree needs --target, to measure how often each rank is accepted"
                )
            self.config = replace(self.config, tree=options.tree)

    def test(self, network: Medusa, target: Target, tokenizer: TokenizerWrapper) -> Reading[Medusa]:
        copied = dequantised(network)
        found = choose_reading(
            {AS_IT_SAYS: copied}, target, tokenizer, lambda heads, _, text: predict(heads, text)[0]
        )
        accuracies = rank_accuracies(copied, found.texts)
        tree = self.options.tree or copied.config.tree
        config = calibrate(copied, found.texts)
        network.config = replace(config, rank_accuracies=accuracies, tree=tree)
        return found._replace(network=network)
