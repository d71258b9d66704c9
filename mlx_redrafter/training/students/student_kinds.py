"""Students of every kind: new ones, in sizes that suit the target, and earlier drafters."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from mlx_redrafter.checkpoints.bundled import expand_name
from mlx_redrafter.checkpoints.recognition import recognise
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers import block, redrafter
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.kind import UNKNOWN
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.quantization import quantization_of
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.specformer import SpecFormer, SpecFormerConfig
from mlx_redrafter.target.hooks import FINAL
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.students.kv_students import (
    BlockStudent,
    EagleStudent,
    MtpStudent,
    SpecFormerStudent,
)
from mlx_redrafter.training.students.state_students import MedusaStudent, RecurrentStudent
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training_options import Head, NetworkOptions

LEAST_HEADS = 4
# Default width of a recurrent drafter's head, unless twice the hidden size is less.
EXIT_DIM = 1024
# Default number of a recurrent drafter's residual blocks.
NUM_BLOCKS = 2
# Hidden size from which on attention heads have `WIDE_HEAD_DIM` elements, as in published models.
WIDE = 2048
# Width of an attention head for hidden sizes below `WIDE`.
HEAD_DIM = 64
# Width of an attention head for hidden sizes from `WIDE` on.
WIDE_HEAD_DIM = 128
# Width of the MLP relative to the hidden size, as in Llama models.
MLP_RATIO = 8 / 3
# The width of the MLP is rounded up to a multiple of this number.
MLP_MULTIPLE = 64
# Minimum number of layers of a target whose third, middle and third last layer EAGLE-3 reads.
DEEP = 8
# Number of layers of a block drafter for a target of at least `DEEP` layers, as published.
BLOCK_LAYERS = 5
# Maximum rank of a block drafter's link, as published for 2560 wide states.
LINK_RANK = 256
# The rank of a link is a multiple of this number, so that it can be quantised.
LINK_MULTIPLE = 64
# Number of candidates of DFlash 2's selector, as published.
NUM_CANDIDATES = 16
# Heads by their links, which recurrent drafters lack; those with other links are DSpark's.
LINKED: Mapping[str | None, Head] = {None: "redrafter", "none": "dflash", "selector": "dflash2"}
# Length of DFlash 2's convolutions, in entries.
CONV_TAPS = 4


def new_student(target: Target, options: NetworkOptions) -> Student:
    """Create a student whose random weights are not computed."""
    return KINDS[options.head](target, options)


def load_student(path_or_repo: str, head: Head, target: Target, tokenizer: Any) -> Student:
    """Load a drafter to continue training for a target, in float32.

    Its own embedding and head stay as they are: they are copies of the target's.
    """
    path_or_repo = expand_name(path_or_repo)
    kind, _ = recognise(path_or_repo)
    if kind not in (redrafter, block):
        raise ConfigError(
            f"expected a recurrent or block drafter to start from, found {kind.NAME}: "
            f"{path_or_repo}; leave --start-from out"
        )
    network: Any = kind.load(path_or_repo, UNKNOWN)
    found = LINKED.get(getattr(network.config, "link", None), "dspark")
    if found != head:
        raise ConfigError(
            f"expected a drafter for --head {head}, found one for --head {found}; give that head, "
            "or another --start-from"
        )
    if quantization_of(network) is not None:
        raise ConfigError(
            f"expected floating-point weights to train, found the drafter {path_or_repo}, which is "
            "quantised; start from the drafter it was made from"
        )
    network.check_fit(target, tokenizer)
    if network.config.vocab_size != target.vocab_size:  # the loss reads the rows of all token ids
        raise ConfigError(
            f"expected a drafter of {target.vocab_size} token ids to train for this model, found "
            f"one of {network.config.vocab_size} in {path_or_repo}; train a new one"
        )
    network.set_dtype(mx.float32)
    mx.eval(network.parameters())
    if isinstance(network, Drafter):
        return RecurrentStudent(network, target.modules.embed)
    for name in {"embed_tokens", "lm_head"} & network.keys():
        network[name].freeze()
    return BlockStudent(network, target)


def choose_drafter_config(
    hidden_size: int, vocab_size: int, options: NetworkOptions
) -> DrafterConfig:
    """Choose the shape of a new recurrent drafter for a target of these sizes."""
    return DrafterConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        exit_dim=options.exit_dim or min(EXIT_DIM, 2 * hidden_size),
        num_draft_layers=NUM_BLOCKS if options.layers is None else options.layers,
        rnn=True,
        draft_vocab_size=options.draft_vocab,
    )


def _new_recurrent(target: Target, options: NetworkOptions) -> Student:
    config = choose_drafter_config(target.hidden_size, target.vocab_size, options)
    return RecurrentStudent(Drafter(config), target.modules.embed)


def _new_medusa(target: Target, options: NetworkOptions) -> Student:
    config = MedusaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_heads=options.length - 1,
        num_layers=1 if options.layers is None else options.layers,
        draft_vocab_size=options.draft_vocab,
    )
    return MedusaStudent(Medusa(config))


def _new_eagle(target: Target, options: NetworkOptions) -> Student:
    own: dict[str, Any] = {"version": 1, "fc_bias": True}
    if options.head == "eagle":
        layers = _captured_layers(target)
        own = {"version": 3, "captured_layers": layers, "draft_vocab_size": options.draft_vocab}
    return EagleStudent(Eagle(EagleConfig(**own, **_layer_sizes(target))), target)


def _new_mtp(target: Target, options: NetworkOptions) -> Student:
    """Create an MTP module in MiMo's format, with a dense layer, which fits any target."""
    values = {
        "model_type": "mimo",
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": EagleConfig.rms_norm_eps,
        "rope_theta": EagleConfig.rope_theta,
        "tie_word_embeddings": True,
        **_layer_sizes(target),
    }
    return MtpStudent(Mtp(values), target)


def _new_specformer(target: Target, options: NetworkOptions) -> Student:
    layers, slots = (*_captured_layers(target), FINAL), options.length - 1
    config = SpecFormerConfig(captured_layers=layers, num_slots=slots, **_layer_sizes(target))
    return SpecFormerStudent(SpecFormer(config), target)


def _new_block(target: Target, options: NetworkOptions) -> Student:
    """Create a block drafter, whose first draft's place in the block is the published one."""
    is_dspark, hidden = options.head == "dspark", target.hidden_size
    num_layers = options.layers or (BLOCK_LAYERS if len(target.modules.layers) >= DEEP else 2)
    sizes: dict[str, Any] = {}
    if options.head != "dflash":
        rank = min(LINK_RANK, max(LINK_MULTIPLE, hidden // 2 // LINK_MULTIPLE * LINK_MULTIPLE))
        sizes = {"link": "vanilla" if is_dspark else "selector", "rank": rank}
    if is_dspark:
        sizes |= {"has_confidence": True, "confidence_reads_token": True}
    elif sizes:
        sizes |= {"conv_taps": CONV_TAPS, "conv_groups": sizes["rank"] // LINK_MULTIPLE}
        if target.vocab_size > NUM_CANDIDATES:
            sizes["num_candidates"] = NUM_CANDIDATES
    config = BlockConfig(
        num_hidden_layers=num_layers,
        captured_layers=_spread_layers(len(target.modules.layers), num_layers),
        num_target_layers=len(target.modules.layers),
        block_size=options.length - is_dspark,
        first_slot=int(not is_dspark),
        # The last token is a rare one, or only pads the vocabulary.
        mask_token_id=target.vocab_size - 1,
        **sizes,
        **_layer_sizes(target),
    )
    return BlockStudent(BlockNetwork(config), target)


def _spread_layers(count: int, number: int) -> tuple[int, ...]:
    """Choose layers of a target of ``count`` layers, as published block drafters do.

    They read outputs from layer 1 to the third last one, evenly spread; of few layers all do, the
    last one included.
    """
    if count < DEEP:
        return (min(1, count), max(1, count // 2), count)
    return tuple(2 + round(i * (count - 4) / max(1, number - 1)) for i in range(number))


def _captured_layers(target: Target) -> tuple[int, int, int]:
    """Choose a low, a middle and a high layer, as in EAGLE-3."""
    count = len(target.modules.layers)
    first, last = (2, count - 3) if count >= DEEP else (min(1, count - 1), count - 1)
    return first, count // 2, last


def _layer_sizes(target: Target) -> dict[str, Any]:
    """Choose the sizes of a decoder layer as wide as the target, by names of `EagleConfig`."""
    hidden = target.hidden_size
    heads = max(LEAST_HEADS, hidden // (HEAD_DIM if hidden < WIDE else WIDE_HEAD_DIM))
    while heads > 1 and hidden % (2 * heads):  # rotary embeddings rotate pairs
        heads -= 1
    return {
        "hidden_size": hidden,
        "intermediate_size": -(-int(MLP_RATIO * hidden) // MLP_MULTIPLE) * MLP_MULTIPLE,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.context_length or EagleConfig.max_position_embeddings,
    }


KINDS: Mapping[Head, Callable[[Target, NetworkOptions], Student]] = {
    "redrafter": _new_recurrent,
    "medusa": _new_medusa,
    "eagle": _new_eagle,
    "eagle1": _new_eagle,
    "mtp": _new_mtp,
    "specformer": _new_specformer,
    "dflash": _new_block,
    "dflash2": _new_block,
    "dspark": _new_block,
}
