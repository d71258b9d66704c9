"""The shape of a block drafter, as stored in the ``config.json`` next to its weights."""

from dataclasses import dataclass
from typing import ClassVar

from mlx_redrafter.checks import check_choice, check_int, check_multiple, check_positive, is_number
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.layer_sizes import LayerSizes, check_captured_layers
from mlx_redrafter.proposers.search import COUPLING_WEIGHT
from mlx_redrafter.proposers.stored_config import MAX_COUNT, MAX_DIMENSION, MAX_SCORE_SCALE

MODEL_TYPE = "redrafter_block"
# Links between a draft and the draft before it.
LINKS = ("none", "selector", "vanilla", "gated", "recurrent")
# Rotary embeddings that can be computed at positions which only the device knows.
ROPES = ("default", "linear", "llama3", "yarn", "proportional")
# Kinds of decoder layers: those of Qwen 3, and those of Gemma 4 with norms on both sides.
LAYER_TYPES = ("qwen3", "gemma4")
# Inverse temperature of a block drafter that was not calibrated. Factors fitted to three heads are
# 1.3 to 2. A factor that is too small makes trees worse than chains, a large one does not.
INVERSE_TEMPERATURE = 2.0


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerSizes):
    """The shape of a DFlash, DFlash 2 or DSpark drafter.

    Attributes:
        captured_layers: Layers of the target whose inputs it reads. The number of the target's
            layers stands for the output of the last one, before the final norm.
        num_target_layers: Number of the target's layers; None if the checkpoint does not say.
        block_size: Entries of a block: the newest token and the masks, B.
        first_slot: Entry of the block that predicts the first draft, 0 or 1.
        mask_token_id: Token id whose embedding stands for tokens to draft.
        windows: For each layer, the number of entries that an entry attends to, itself included;
            None for all. No list at all means None for each layer.
        windows_from_root: Whether all entries of a block attend to the tokens in the root's window,
            as in speculators, and not each to those in its own.
        causal: For each layer, whether entries of a block attend to earlier ones only. No list at
            all means False for each layer.
        link: One of `LINKS`.
        rank: Width of the link's tables, r; 0 without a link.
        num_candidates: Number of tokens per depth that the link scores; None for all.
        conv_taps: Length of the convolutions along the block, in entries; 0 without them.
        draft_vocab_size: Number of tokens in its own head; None if they are the target's.
        confidence_reads_token: Whether DSpark's confidence head also reads the link's embedding.
        layer_type: One of `LAYER_TYPES`.
        has_values: Whether values have a projection; else values are the keys before their norm.
        rope_dims: Rotated numbers of a head; None for all.
        rope_traditional: Whether neighbours are rotated, rather than both halves.
        skips_embedding_norm: Whether it reads the target's embeddings without their norm.
        output_multiplier, softcap: Factor and limit of the logits before the link.
        depth_scales: For each depth, a factor on the logits with greedy decoding; None for
            ``inverse_temperature`` at all depths.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    num_hidden_layers: int
    captured_layers: tuple[int, ...]
    block_size: int
    first_slot: int
    mask_token_id: int
    num_target_layers: int | None = None
    windows: tuple[int | None, ...] = ()
    windows_from_root: bool = False
    causal: tuple[bool, ...] = ()
    link: str = "none"
    rank: int = 0
    num_candidates: int | None = None
    conv_taps: int = 0
    conv_groups: int = 0
    draft_vocab_size: int | None = None
    has_embedding: bool = False
    has_head: bool = False
    has_confidence: bool = False
    confidence_reads_token: bool = False
    layer_type: str = "qwen3"
    attention_bias: bool = False
    is_gated: bool = False
    has_values: bool = True
    has_sinks: bool = False
    value_scale: float = 1.0
    rope_dims: int | None = None
    rope_traditional: bool = False
    embed_scale: float = 1.0
    skips_embedding_norm: bool = False
    output_multiplier: float = 1.0
    softcap: float | None = None
    depth_scales: tuple[float, ...] | None = None
    inverse_temperature: float = INVERSE_TEMPERATURE
    coupling_weight: float = COUPLING_WEIGHT

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("num_hidden_layers", self.num_hidden_layers, 1, MAX_COUNT)
        check_captured_layers(self.captured_layers)
        check_int("first_slot", self.first_slot, 0, 1)
        check_int("block_size", self.block_size, 1 + self.first_slot, MAX_COUNT)
        check_int("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)
        if self.num_target_layers is not None:
            check_int("num_target_layers", self.num_target_layers, 1, MAX_DIMENSION)
            most = max(self.captured_layers)
            check_int("each of captured_layers", most, 0, self.num_target_layers)
        self._check_layers()
        self._check_link()
        self._check_numbers()

    def _check_layers(self) -> None:
        count = self.num_hidden_layers
        for name, default in (("windows", None), ("causal", False)):
            given = getattr(self, name)
            values = (default,) * count if given == () else given
            if not isinstance(values, tuple) or len(values) != count:
                raise ConfigError(f"{name} must be a list of {count} values, got {given!r}")
            object.__setattr__(self, name, values)
        for window in self.windows:
            if window is not None:
                check_int("each of windows", window, self.block_size, MAX_DIMENSION)
        if not all(isinstance(one, bool) for one in self.causal):
            raise ConfigError(f"causal must be a list of true and false, got {self.causal!r}")
        check_choice("layer_type", self.layer_type, LAYER_TYPES)
        scaling = self.rope_scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        check_choice("rope scaling", kind, ROPES)
        if self.rope_dims is not None:
            check_int("rope_dims", self.rope_dims, 2, self.head_size)
            if self.rope_dims % 2:
                raise ConfigError(f"rope_dims must be even, got {self.rope_dims}")
        if self.conv_taps or self.conv_groups:
            check_int("conv_taps", self.conv_taps, 1, MAX_COUNT)
            check_int("conv_groups", self.conv_groups, 1, self.hidden_size)
            check_multiple("hidden_size", self.hidden_size, "conv_groups", self.conv_groups)

    def _check_link(self) -> None:
        check_choice("link", self.link, LINKS)
        if self.link == "recurrent" and self.first_slot:
            # Its state would begin at the first entry, whose output the drafts do not read.
            raise ConfigError("a recurrent link needs first_slot 0, got 1")
        check_int("rank", self.rank, int(self.link != "none"), MAX_DIMENSION)
        if self.draft_vocab_size is not None and not self.has_head:
            raise ConfigError("draft_vocab_size needs has_head, got a drafter without a head")
        if self.num_candidates is not None:
            check_int("num_candidates", self.num_candidates, 1, self.head_rows)
        if self.confidence_reads_token and self.link in ("none", "selector"):
            raise ConfigError(
                f"confidence_reads_token needs a Markov head, got the link {self.link!r}"
            )

    def _check_numbers(self) -> None:
        for name in ("value_scale", "embed_scale", "output_multiplier", "softcap"):
            if name != "softcap" or self.softcap is not None:
                check_positive(name, getattr(self, name), MAX_DIMENSION)
        scales = self.depth_scales
        if scales is not None:
            is_list = isinstance(scales, tuple) and len(scales) == self.num_drafts
            if not is_list or not all(is_number(x) and 0 < x <= MAX_SCORE_SCALE for x in scales):
                raise ConfigError(
                    f"depth_scales must be {self.num_drafts} numbers above 0 and at most "
                    f"{MAX_SCORE_SCALE}, got {scales!r}"
                )

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of a block."""
        return min(self.block_size - self.first_slot, MAX_BEAM_LENGTH - 1)

    @property
    def name(self) -> str:
        names = {"none": "DFlash", "selector": "DFlash 2"}
        return names.get(self.link, f"DSpark ({self.link})")

    @property
    def summary(self) -> str:
        return (
            f"{self.name} of {self.num_drafts} drafts, {self.num_hidden_layers} layers, "
            f"hidden_size {self.hidden_size}, intermediate_size {self.intermediate_size}, reads "
            f"{len(self.captured_layers)} layers"
        )
