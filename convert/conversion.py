"""Conversion of a foreign checkpoint to a folder with an MLX drafter, its provenance and a card."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_redrafter.checkpoint_files import named_parameters, shared_name, write_text
from mlx_redrafter.checkpoints.cards import CARD_FILE, render_card
from mlx_redrafter.checkpoints.identity import REPOSITORY, targets_in_config
from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.checks import as_mapping
from mlx_redrafter.convert.conversion_options import DTYPES, ConversionOptions
from mlx_redrafter.convert.foreign import ForeignDrafter
from mlx_redrafter.convert.publication import PROVENANCE_KEY, check_output, publish
from mlx_redrafter.convert.recognition import recognise
from mlx_redrafter.convert.selftest import Reading
from mlx_redrafter.convert.vocabulary import fit_head
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.checkpoint import check_finite, write_drafter
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.quantization import (
    check_quantization,
    quantization_of,
    quantize_drafter,
)
from mlx_redrafter.target.target import Target
from mlx_redrafter.version import __version__


class Conversion(NamedTuple):
    config: Any
    provenance: dict[str, Any]
    warnings: tuple[str, ...]


def convert_drafter(
    path_or_repo: str | Path,
    destination: Path,
    options: ConversionOptions | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Convert a drafter of any kind; ``destination`` appears whole or not at all.

    Args:
        path_or_repo: Folder or hub repository of the drafter.
        destination: Folder to write: new, empty, or an earlier conversion, which is replaced.
        options: Options of the conversion; by default float16, without a self-test.
        overwrite: Whether ``destination`` may hold other files.

    Raises:
        CheckpointError: The source cannot be used or does not fit the target.
        ConfigError: The options contradict the drafter, or ``destination`` holds other files.
        NonFiniteError: Weights are not finite, or too large for the dtype.
    """
    options = options or ConversionOptions()
    check_quantization(options.q_bits, options.q_group_size)
    inputs = [path_or_repo, options.target, *(options.vocab_text or ())]
    check_output(destination, *inputs, overwrite=overwrite)
    source, kind = recognise(path_or_repo)
    if isinstance(kind, str):
        raise CheckpointError(
            "expected a recurrent or block drafter, an EAGLE head, Medusa heads or an MTP module, "
            f"found {kind}"
        )
    drafter = kind(source, options)
    target = tokenizer = tested = None
    if options.target is not None:
        model, tokenizer, _ = load(options.target)
        target = Target(model)
    network = drafter.build()
    if target is not None and tokenizer is not None and "vocab_slice" in drafter.takes:
        fit_head(network, drafter, target, tokenizer)
    _finish(network, drafter)
    if target is not None and tokenizer is not None:
        network.check_fit(target, tokenizer)
        tested = drafter.test(network, target, tokenizer)
        network = tested.network
    return _write(destination, network, drafter, tested)


def _finish(network: DraftNetwork, drafter: ForeignDrafter) -> None:
    """Check, cast and quantise the weights of a network; waits for the device."""
    if quantization_of(network) is not None:
        raise CheckpointError(
            "expected a drafter that is not quantised, found one that is; convert the published one"
        )
    name, options = drafter.source.name, drafter.options
    dtype: mx.Dtype = getattr(mx, options.dtype or DTYPES[0])
    for own, tensor in named_parameters(network).items():
        if drafter.is_cast(own) and mx.issubdtype(tensor.dtype, mx.floating):
            network.load_weights([(own, tensor.astype(dtype))], strict=False)
    check_finite(network, name, drafter.names)
    if options.quantize:
        quantize_drafter(network, options.q_bits, options.q_group_size)
    network.eval()
    mx.eval(network.parameters())


def _write(
    destination: Path, network: DraftNetwork, drafter: ForeignDrafter, tested: Reading[Any] | None
) -> Conversion:
    options = drafter.options
    measured, notes, warnings = None, [*drafter.notes], [*drafter.warnings]
    if tested is not None:
        measured = {"positions": len(tested.matches), "acceptance": tested.acceptance}
        notes += [tested.line] if tested.line else []
        warnings += tested.warnings()
    # A drafter of this package has the name, tokens and weights of the model it was trained for.
    trained_for = as_mapping(drafter.source.config.get("target"))
    named = filter(REPOSITORY.fullmatch, targets_in_config(drafter.source.config))
    target = drafter.target or next(named, None)
    if options.target is not None:
        target = shared_name(options.target)
    provenance = {
        "source": drafter.source.name,
        "sha256": drafter.source.sha256(),
        "converter": f"mlx_redrafter {__version__}",
        "name_set": drafter.name_set,
        "target": target,
        "self_test": measured,
        "notes": notes,
    }
    with publish(destination) as folder:
        known = {"target": dict(trained_for)} if trained_for else {}
        write_drafter(network, folder, {**known, PROVENANCE_KEY: provenance})
        card = _describe(destination.resolve().name, drafter, network.config, provenance)
        write_text(folder / CARD_FILE, card)
    return Conversion(network.config, provenance, tuple(warnings))


def _describe(
    title: str, drafter: ForeignDrafter, config: Any, provenance: Mapping[str, Any]
) -> str:
    target, source, measured = (provenance[key] for key in ("target", "source", "self_test"))
    stored_as = drafter.options.stored_as
    rows = {"drafter": config.summary, "vocabulary": config.vocab_size, "weights": stored_as}
    if measured is not None:
        accepted = f"{measured['acceptance']:.1%} of {measured['positions']} (greedy)"
        rows["first drafts accepted"] = accepted
    purpose = f"for `{target}`" if target else "for the model it was trained with"
    summary = (
        f"{drafter.linked} {purpose}, converted from `{source}` for "
        f"{provenance['converter']}. It makes the target's text appear faster; the text stays the "
        "target's."
    )
    notes = "".join(f"- {note}\n" for note in provenance["notes"])
    licence = f"The licence is that of `{source}`; read it there before you pass them on.\n"
    return render_card(title, target, summary, rows, f"{notes}\n{licence}")
