"""Output of a conversion: the weights, their provenance, and a model card in the hub's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.checkpoint_files import named_parameters, shared_name
from mlx_redrafter.convert.conversion_options import (
    Config,
    Conversion,
    ConversionOptions,
)
from mlx_redrafter.convert.publication import CARD_FILE, PROVENANCE_KEY, publish
from mlx_redrafter.convert.selftest import SelfTest
from mlx_redrafter.convert.source import Source
from mlx_redrafter.convert.stored import DTYPES
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.checkpoint import check_finite, check_token_ids, write_drafter
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.mtp.network import MtpConfig
from mlx_redrafter.proposers.quantization import quantization_of, quantize_drafter
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.version import __version__

_TEMPLATE = """---
library_name: mlx
tags:
- mlx
- redrafter
- speculative-decoding
{base_model}---

# {title}

{kind} {purpose}, converted from `{source}` for \
mlx_redrafter {version}. It makes the target's text appear faster; the text stays the target's.

    redrafter-mlx generate --model {target} --drafter PATH-OF-THIS-FOLDER --prompt "..."

| | |
|---|---|
{rows}

{notes}
The licence is that of `{source}`; read it there before you pass these weights on.
"""

_KINDS: Mapping[type, str] = {
    DrafterConfig: "A [Recurrent Drafter](https://arxiv.org/abs/2403.09919)",
    BlockConfig: "A block drafter",
    EagleConfig: "An [EAGLE](https://arxiv.org/abs/2503.01840) head",
    MedusaConfig: "[Medusa](https://arxiv.org/abs/2401.10774) heads",
    MtpConfig: "An MTP module",
}


# Error message for a source that is quantised.
QUANTISED = (
    "expected a drafter that is not quantised, found one that is; convert the published drafter"
)


@dataclass(frozen=True)
class ConvertedDrafter:
    """A drafter that is ready to be written, with the config to write.

    ``name_set`` is the source's naming convention, ``measured`` None without a self-test, and
    ``target`` the name of the target if the source gives one.
    """

    network: DraftNetwork
    name_set: str
    measured: SelfTest | None
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    target: str | None = None


def finish(
    network: DraftNetwork,
    name: str,
    names: Mapping[str, str],
    options: ConversionOptions,
    is_cast: Callable[[str], bool] = lambda own: True,
) -> None:
    """Check, cast and quantise the weights of a network; waits for the device.

    For messages, ``name`` is that of its checkpoint and ``names`` are those there by the network's.
    ``is_cast`` tells whether a floating-point weight changes its dtype.
    """
    if quantization_of(network) is not None:
        raise CheckpointError(QUANTISED)
    check_token_ids(network, name)
    dtype = DTYPES[options.dtype]
    for own, tensor in named_parameters(network).items():
        if is_cast(own) and mx.issubdtype(tensor.dtype, mx.floating):
            network.load_weights([(own, tensor.astype(dtype))], strict=False)
    check_finite(network, name, names)
    if options.quantization is not None:
        quantize_drafter(network, options.quantization.bits, options.quantization.group_size)
    network.eval()
    mx.eval(network.parameters())


def write_conversion(
    destination: Path, source: Source, options: ConversionOptions, drafter: ConvertedDrafter
) -> Conversion:
    """Write a converted drafter to a folder, which appears whole or not at all."""
    provenance = {
        "source": source.name,
        "sha256": source.sha256(),
        "converter": f"mlx_redrafter {__version__}",
        "name_set": drafter.name_set,
        "target": drafter.target if options.target is None else shared_name(options.target),
        "self_test": None if drafter.measured is None else drafter.measured.to_dict(),
        "notes": list(drafter.notes),
    }
    config = drafter.network.config
    with publish(destination) as folder:
        write_drafter(drafter.network, folder, {PROVENANCE_KEY: provenance})
        stored_as = str(options.quantization or options.dtype)
        card = render_card(destination.resolve().name, config, stored_as, provenance)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
    return Conversion(config, provenance, tuple(drafter.warnings))


def render_card(
    title: str, config: Config, quantization: str, provenance: Mapping[str, Any]
) -> str:
    """Render the card as Markdown."""
    target = provenance["target"]
    rows = {"drafter": config.summary, "vocabulary": config.vocab_size, "weights": quantization}
    self_test = provenance["self_test"]
    if self_test is not None:
        rows["first drafts accepted"] = (
            f"{self_test['acceptance']:.1%} of {self_test['positions']} (greedy)"
        )
    return _TEMPLATE.format(
        base_model=f"base_model: {target}\n" if target and target.count("/") == 1 else "",
        title=title,
        kind=_KINDS[type(config)],
        purpose=f"for `{target}`" if target else "for the model it was trained with",
        source=provenance["source"],
        version=provenance["converter"].split()[-1],
        target=target or "MODEL",
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        notes="".join(f"- {note}\n" for note in provenance["notes"]),
    )
