"""Conversion of a foreign checkpoint to an MLX drafter in a new folder."""

from __future__ import annotations

from pathlib import Path

from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.output import Conversion, finish, write_conversion
from mlx_redrafter.convert.publication import check_output
from mlx_redrafter.convert.recognition import recognise
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.quantization import check_quantization
from mlx_redrafter.target.target import Target


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
    network = drafter.build(target, tokenizer)
    finish(network, drafter)
    if target is not None and tokenizer is not None:
        network.check_fit(target, tokenizer)
        tested = drafter.test(network, target, tokenizer)
        network = tested.network
    return write_conversion(destination, network, drafter, tested)
