"""New students of every kind, in sizes that suit the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.specformer.config import SpecFormerConfig
from mlx_redrafter.proposers.specformer.network import SpecFormer
from mlx_redrafter.target.target import FINAL, Target
from mlx_redrafter.training.students.kv_students import (
    EagleStudent,
    MtpStudent,
    SpecFormerStudent,
)
from mlx_redrafter.training.students.medusa_student import MedusaStudent
from mlx_redrafter.training.students.recurrent_student import RecurrentStudent
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.training_request import Head, NetworkOptions

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
# Minimum number of attention heads.
LEAST_HEADS = 4
# Width of the MLP relative to the hidden size, as in Llama models.
MLP_RATIO = 8 / 3
# The width of the MLP is rounded up to a multiple of this number.
MLP_MULTIPLE = 64
# Minimum number of layers of a target whose third, middle and third last layer EAGLE-3 reads.
DEEP = 8


def new_student(target: Target, options: NetworkOptions) -> Student:
    """Create a student whose random weights are not computed."""
    student = KINDS[options.head](target, options)
    if student.layers:
        target.watch(student.layers)
    return student


def choose_drafter_config(
    hidden_size: int, vocab_size: int, options: NetworkOptions
) -> DrafterConfig:
    """Choose the shape of a new recurrent drafter for a target of these sizes."""
    return DrafterConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        exit_dim=options.exit_dim or min(EXIT_DIM, 2 * hidden_size),
        num_draft_layers=NUM_BLOCKS if options.num_layers is None else options.num_layers,
        rnn=True,
        draft_vocab_size=options.draft_vocab,
    )


def _new_recurrent(target: Target, options: NetworkOptions) -> Student:
    config = choose_drafter_config(target.hidden_size, target.vocab_size, options)
    return RecurrentStudent(Drafter(config), target.embed)


def _new_medusa(target: Target, options: NetworkOptions) -> Student:
    config = MedusaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_heads=options.beam_length - 1,
        num_layers=1 if options.num_layers is None else options.num_layers,
        draft_vocab_size=options.draft_vocab,
    )
    return MedusaStudent(Medusa(config))


def _new_eagle(target: Target, options: NetworkOptions) -> Student:
    """Create an EAGLE-3 head."""
    config = EagleConfig(
        version=3,
        captured_layers=_captured_layers(target),
        draft_vocab_size=options.draft_vocab,
        **_layer_sizes(target),
    )
    return EagleStudent(Eagle(config), target)


def _new_eagle_1(target: Target, options: NetworkOptions) -> Student:
    config = EagleConfig(version=1, fc_bias=True, **_layer_sizes(target))
    return EagleStudent(Eagle(config), target)


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
    return MtpStudent(Mtp(values), target, values)


def _new_specformer(target: Target, options: NetworkOptions) -> Student:
    config = SpecFormerConfig(
        captured_layers=(*_captured_layers(target), FINAL),
        num_slots=options.beam_length - 1,
        **_layer_sizes(target),
    )
    return SpecFormerStudent(SpecFormer(config), target)


def _captured_layers(target: Target) -> tuple[int, int, int]:
    """Choose a low, a middle and a high layer, as in EAGLE-3."""
    count = len(target.blocks)
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
    "eagle1": _new_eagle_1,
    "mtp": _new_mtp,
    "specformer": _new_specformer,
}
