"""The recurrent drafter of ReDrafter, which proposes from the target's last states alone.

Axes: R roots, W beams, n states, H hidden size of the target, D exit_dim, V rows of the head.

Source: arXiv 2403.09919 and Apple's ml-recurrent-drafter (``modeling_drafter.py``), whose parameter
names are kept. The state starts from zero as in that code; the paper starts it from the embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.checks import check_instance
from mlx_redrafter.decoding.passes import hidden_states_of, roots_of
from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.draft_network import DraftNetwork, NetworkDrafting, ResBlock, dtype_of
from mlx_redrafter.proposers.fit import Prediction, ReadSequence, fit_depths, parts
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.search import Expansion, NoiseRank, search_all
from mlx_redrafter.target.target import Target

# Function from token ids to a row of H numbers for each.
Embed = Callable[[mx.array], mx.array]

# Logit that Apple's `warp_logits` gives to masked tokens.
MASKED_LOGIT = -50000.0
# Largest table, in bytes. One matrix of the drafter is small next to a target with a larger one.
MAX_BYTES = 64 * 2**20


class Drafter(DraftNetwork):
    """A small RNN that proposes the target's next tokens from its last hidden state."""

    config: DrafterConfig

    def __init__(self, config: DrafterConfig):
        check_instance("config", config, DrafterConfig, "a DrafterConfig")
        super().__init__(config)
        hidden, width = config.hidden_size, config.exit_dim
        if config.has_input_proj:
            self.input_proj = nn.Linear(2 * hidden, width)
        if config.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)
        blocks: list[nn.Module] = [ResBlock(width) for _ in range(config.num_draft_layers)]
        self.lm_head = [*blocks, nn.Linear(width, config.head_rows, bias=False)]
        # Made by `input_lookup`: places and views of weights, and what tokens add to the state, as
        # rows, (V, H). No array here or below is a parameter, as the names have underscores.
        self._input_table: tuple[list[int], list[mx.array], mx.array] | None = None
        # A weight, and the two layers made of it.
        self._split_weights: tuple[mx.array, nn.Module, nn.Module] | None = None

    @property
    def dtype(self) -> mx.Dtype:
        return dtype_of(self.lm_head[-1])

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> RecurrentDrafting:
        return RecurrentDrafting(self, input_lookup(self, target), couple_noise)

    def expand(self, group: Group, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        flights = [flight for _, flight in group]
        hidden, roots = hidden_states_of(flights), roots_of(flights)
        lookup = group[0][0].project_input
        levels = RecurrentLevels(self, lookup, hidden, roots, rank is not None)
        return search_all(levels, shape, rank)

    def project_input(self, embedding: mx.array) -> mx.array:
        """Compute the term that a token adds to the state: ``rnn_w e``, or ``e`` without an RNN.

        ``e``, of shape (..., H), has rows of the target's input embedding.
        """
        embedding = embedding.astype(self.dtype)
        return self.rnn_w(embedding) if self.config.rnn else embedding

    def start(self, projected: mx.array) -> mx.array:
        """Compute the state after the root from its input term, shape (1, H) to (1, H)."""
        if self.config.rnn and self.config.rnn_first_step_bias:
            projected = projected + self.rnn_u.bias
        return self._activate(projected)

    def advance(self, state: mx.array, projected: mx.array) -> mx.array:
        """Advance the recurrent state of every beam by one token.

        With ``s`` the state, shape (W, H), or (1, H) for all beams, and ``e`` the embedding of the
        newest token, whose term is ``projected``:

            s_t = f(rnn_w e_t + rnn_u s_{t-1} + b)    if ``config.rnn``, f = silu or the identity
            s_t = e_t + s_{t-1}                       otherwise
        """
        return self._activate(projected + (self.rnn_u(state) if self.config.rnn else state))

    def logits(
        self, hidden: mx.array, state: mx.array, hidden_term: mx.array | None = None
    ) -> mx.array:
        """Compute logits of the token that follows each beam, in the drafter's dtype, shape (W, V).

            x = [h, s_t];  x = input_proj(x) if D != 2H;  x = x + silu(linear_i(x));  y = lm_head(x)

        ``hidden`` is the target's last hidden state after its final norm, shape (H,) or (W, H), and
        ``state`` that of the beams, (W, H). `hidden_term` may have been computed before.
        """
        x = mx.concatenate([mx.broadcast_to(hidden, state.shape), state], axis=-1)
        y = self._first(x) if hidden_term is None else hidden_term + self._split()[1](state)
        layers = self.lm_head
        if "input_proj" not in self:
            # The first block reads the pair itself; without blocks the head does.
            layers = layers[1:]
            y = x + nn.silu(y) if self.config.num_draft_layers else y
        for layer in layers:
            y = layer(y)
        return y

    def hidden_term(self, hidden: mx.array) -> mx.array | None:
        """Compute the term of ``hidden``, shape (n, H), in the first layer, shape (n, D).

        None if a group of quantised weights belongs to both halves of the layer's input.
        """
        if self.config.hidden_size % getattr(self._first, "group_size", 1):
            return None
        return self._split()[0](hidden)

    @property
    def _first(self) -> nn.Linear | nn.QuantizedLinear:
        """The layer that reads ``[h, s_t]``."""
        layer: Any = self.input_proj if "input_proj" in self else self.lm_head[0]
        return layer.linear if isinstance(layer, ResBlock) else layer

    def _split(self) -> tuple[nn.Module, nn.Module]:
        """Split `_first` into a sum of two layers, of ``h`` and, with the bias, of ``s_t``."""
        first, halves = self._first, self._split_weights
        if halves is None or halves[0] is not first.weight:
            left, right = _columns(first, 0), _columns(first, 1)
            left.pop("bias", None)
            self._split_weights = halves = (first.weight, left, right)
        return halves[1:]

    def log_probs(
        self,
        hidden: mx.array,
        state: mx.array,
        hidden_term: mx.array | None = None,
        scale: float = 1.0,
    ) -> mx.array:
        """Compute natural log-probabilities of `logits` times ``scale``, float32, shape (W, V).

        With ``config.draft_top_k`` only the largest k logits count, as Apple's ``warp_logits``
        does; the others get the logit -50000.
        """
        logits = self.logits(hidden, state, hidden_term).astype(mx.float32)
        if scale != 1:
            logits = logits * scale
        top_k = self.config.draft_top_k
        if top_k is not None and top_k < logits.shape[-1]:
            logits = logits - mx.max(logits, axis=-1, keepdims=True)
            kth = mx.sort(logits, axis=-1)[..., -top_k, None]
            logits = mx.where(logits < kth, MASKED_LOGIT, logits)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def _activate(self, x: mx.array) -> mx.array:
        is_curved = self.config.rnn and self.config.rnn_activation == "silu"
        return nn.silu(x) if is_curved else x


def _columns(linear: nn.Module, half: int) -> nn.Module:
    """Copy the part of a linear layer, quantised or not, that reads a half of its inputs, 0 or 1.

    The weights are copied at once: MLX would copy a matrix whose rows do not follow each other in
    memory at every use, and threads must not share pending arrays.
    """
    part = copy.copy(linear)
    for name in {"weight", "scales", "biases"} & linear.keys():
        part[name] = mx.contiguous(mx.split(linear[name], 2, axis=1)[half])
    mx.eval(part.parameters())
    return part


def input_lookup(drafter: Drafter, target: Target) -> Embed:
    """Return `Drafter.project_input` by token id, from a table if that is small.

    The drafter keeps the table for the next sequence, as long as the weights behind it stay in the
    same memory. Making the table waits for the device.
    """

    def compute(ids: mx.array) -> mx.array:
        return drafter.project_input(target.modules.embed(ids))

    num_bytes = target.vocab_size * target.hidden_size * drafter.dtype.size
    if not drafter.config.rnn or num_bytes > MAX_BYTES:
        return compute
    modules = drafter.rnn_w, target.modules.embedding
    sources = [array for module in modules for array in named_parameters(module).values()]
    table, places = drafter._input_table, _places(sources)
    if table is None or table[0] != places:
        # Computed at once: threads must not share what is not.
        rows = compute(mx.arange(target.vocab_size))
        mx.eval(rows)
        # Second views of the same memory: MLX gives an array that is changed in place another one.
        views = [array[:] for array in sources]
        mx.eval(views)
        drafter._input_table = table = places, views, rows
    rows = table[-1]
    return lambda ids: rows[ids]


def _places(arrays: list[mx.array]) -> list[int]:
    """Return the addresses of the arrays' numbers in memory."""
    return [np.array(array.view(mx.uint8), copy=False).ctypes.data for array in arrays]


class RecurrentDrafting(NetworkDrafting):
    """Drafts of one sequence, with the `input_lookup` of its target."""

    def __init__(self, network: Drafter, project_input: Embed, couple_noise: bool):
        super().__init__(network, couple_noise)
        self.project_input = project_input


class RecurrentLevels:
    """A recurrent drafter after R roots, mostly one; a `LevelScorer`.

    ``project_input`` comes from `input_lookup`. The target's last hidden states that predicted the
    roots have shape (R, H). Noise replaces the inverse temperature: it makes the target's choices
    as uncertain as the probabilities say.
    """

    def __init__(
        self,
        drafter: Drafter,
        project_input: Embed,
        hidden_state: mx.array,
        root: mx.array,
        with_noise: bool = False,
    ):
        self.drafter = drafter
        self.project_input = project_input
        self.hidden_state = hidden_state.astype(drafter.dtype)
        self.hidden_term = drafter.hidden_term(self.hidden_state)
        self.root = root
        self.scale = 1.0 if with_noise else drafter.config.inverse_temperature
        self.to_token_ids = drafter.to_token_ids

    def first(self) -> mx.array:
        self.state = self.drafter.start(self.project_input(self.root))  # (R, H)
        return self.log_probs()

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """Advance the beams; those of the first level share the root's state."""
        state = self.state if beams is None else self.state[beams]
        self.state = self.drafter.advance(state, self.project_input(tokens))  # (W, H)
        return self.log_probs()

    def log_probs(self) -> mx.array:
        """Return natural log-probabilities after the newest tokens, float32, one row for each."""
        hidden, term = self.hidden_state, self.hidden_term
        num_roots, count = hidden.shape[0], self.state.shape[0]
        if num_roots not in (1, count):
            hidden = mx.repeat(hidden, count // num_roots, axis=0)
            term = None if term is None else mx.repeat(term, count // num_roots, axis=0)
        return self.drafter.log_probs(hidden, self.state, term, self.scale)


def predict(drafter: Drafter, embed: Embed, text: ReadSequence) -> tuple[Prediction, Prediction]:
    """Predict first and second drafts with each generated token, of at least three, as root."""
    first = text.num_prompt
    entered = drafter.project_input(embed(text.tokens[first:]))
    hidden_states = text.states[first - 1 :].astype(drafter.dtype)
    ids, log_probs = text.top_ids, text.top_log_probs
    state = drafter.start(entered[:-1])
    firsts = Prediction(drafter.logits(hidden_states[:-1], state), ids[1:], log_probs[1:])
    state = drafter.advance(state[:-1], entered[1:-1])
    seconds = Prediction(drafter.logits(hidden_states[:-2], state), ids[2:], log_probs[2:])
    return firsts, seconds


def calibrate(drafter: Drafter, embed: Embed, texts: Iterable[ReadSequence]) -> DrafterConfig:
    """Return the config with scalars fitted to sequences; waits for the device."""
    found = (predict(drafter, embed, part) for text in texts for part in parts(text))
    return fit_depths(drafter, found)[0]
