"""Costs of steps by their parts, timed on this machine, once, and stored."""

import logging
from collections.abc import Sequence

import mlx.nn as nn

from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.engine.profiling import (
    Kind,
    Seconds,
    Setting,
    builds_kernels,
    by_parts,
    is_doubtful,
    kinds_of,
    time_steps,
    warm_up,
)
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.kernels.layers import choices
from mlx_redrafter.measured import doubt, fastest, load_or_time
from mlx_redrafter.policy.plans import StepCosts
from mlx_redrafter.target.target import Target

logger = logging.getLogger(__name__)

# Tokens in the cache while timing.
CONTEXT = 128
# The same for the second timing, of sequences that begin with a long prompt.
LONG_CONTEXT = 2048
# Minimum length of such a prompt, in tokens; costs that grow later show while decoding.
MIN_LONG = 512

# Costs by whether a network drafts, context in tokens, and quantisation of the K/V entries.
Known = dict[tuple[bool, int, Quantisation | None], Seconds]


def step_costs(
    target: Target,
    proposer: Proposer | None,
    length: int = CONTEXT,
    known: Known | None = None,
    quantisation: Quantisation | None = None,
) -> StepCosts:
    """Return the costs of steps by their parts; time them unless they are stored.

    Timing needs some seconds. The user's cache folder stores the costs per model, dtype, kernels,
    proposer, device and MLX version. The cost of attention is proportional to the context, so one
    long context is timed and scaled. ``proposer`` is a network that drafts, None for prompt lookup.
    ``length`` is the number of tokens that the sequence begins with. ``known`` has the costs
    measured or read so far, for this model and network.
    """
    known = {} if known is None else known
    keys = [(proposer is not None, context, quantisation) for context in contexts(target, length)]
    for key in keys:
        if key not in known:
            setting = Setting(target, proposer, *key[1:])
            if builds_kernels():
                warm_up(setting)
            known[key] = _load_or_time(setting)
    short, *long = [known[key] for key in keys]
    seconds = short
    if long:
        share = (length - CONTEXT) / (LONG_CONTEXT - CONTEXT)
        seconds = {
            kind: timed + share * max(0.0, long[0][kind] - timed) for kind, timed in short.items()
        }
    return by_parts(seconds, short, proposer)


def contexts(target: Target, length: int) -> list[int]:
    """Return the contexts to time for a sequence that begins with ``length`` tokens."""
    # A model with little more than the long one need not know the positions that timing uses.
    knows_long = target.context_length is None or target.context_length >= 2 * LONG_CONTEXT
    return [CONTEXT, LONG_CONTEXT] if length >= MIN_LONG and knows_long else [CONTEXT]


def doubt_times(target: Target, proposer: Proposer | None, known: Known) -> None:
    """Have the next run time steps again, as they cost less than ``known``; see `step_costs`."""
    for is_network, context, quantisation in list(known):
        if is_network == (proposer is not None):
            doubt(*_description(Setting(target, proposer, context, quantisation)))


def _load_or_time(setting: Setting) -> Seconds:
    def time_rounds() -> Sequence[Seconds]:
        logger.info(
            "timing steps on this machine after %d tokens, for this and later runs of this model "
            "with %s",
            setting.context,
            "prompt lookup" if setting.proposer is None else "drafter",
        )
        return time_steps(setting)

    return fastest(load_or_time(*_description(setting), is_doubtful, time_rounds))


def _description(setting: Setting) -> tuple[object, tuple[nn.Module, ...], Sequence[Kind]]:
    """Return a description of the steps to time, the networks that they use, and their kinds."""
    target, proposer, context, quantisation = setting
    kinds = kinds_of(proposer)
    modules = () if proposer is None else proposer.networks
    passes = ("compiled",) if target.compiled.are_used else ()
    described = kinds, context, quantisation, *choices(target.model), *target.devices, *passes
    return described, (target.model, *modules), kinds
