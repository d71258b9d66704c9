"""The recurrent drafter network of ReDrafter, and nothing about search.

Axes: W beams, H hidden size of the target, D exit_dim, V rows of the head.

Source: arXiv 2403.09919 and Apple's ml-recurrent-drafter (``modeling_drafter.py``), whose parameter
names are kept. The state starts from zero as in that code; the paper starts it from the embedding.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.config import DrafterConfig

# What a logit that Apple's `warp_logits` masks is set to.
MASKED_LOGIT = -50000.0


class ResBlock(nn.Module):
    """``x + silu(linear(x))``, shape (W, D) to (W, D)."""

    def __init__(self, dims: int):
        super().__init__()
        self.linear = nn.Linear(dims, dims)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the block to ``x``, shape (..., D)."""
        return x + nn.silu(self.linear(x))


class Drafter(nn.Module):
    """A small RNN that proposes the target's next tokens from its last hidden state.

    ``token_ids``, int32 of shape (V,), maps rows of the head to token ids of the target when the
    head covers only part of the vocabulary (``config.draft_vocab_size``); otherwise it is absent.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.exit_dim
        if config.has_input_proj:
            self.input_proj = nn.Linear(2 * hidden, width)
        if config.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)
        blocks: list[nn.Module] = [ResBlock(width) for _ in range(config.num_draft_layers)]
        self.lm_head = [*blocks, nn.Linear(width, config.head_rows, bias=False)]
        if config.draft_vocab_size is not None:
            self.token_ids = mx.arange(config.draft_vocab_size, dtype=mx.int32)

    @property
    def is_partial(self) -> bool:
        """Whether the head covers only part of the vocabulary."""
        return self.config.draft_vocab_size is not None

    @property
    def dtype(self) -> mx.Dtype:
        """The floating-point dtype the network computes in."""
        head = self.lm_head[-1]
        return head.scales.dtype if "scales" in head else head.weight.dtype

    def start(self, embedding: mx.array) -> mx.array:
        """The state after the root token: `advance` from the zero state.

        Args:
            embedding: The root's row of the target's input embedding, shape (1, H).

        Returns:
            ``s_1``, shape (1, H).
        """
        if not self.config.rnn:
            return embedding
        update = self.rnn_w(embedding)
        if self.config.rnn_first_step_bias:
            update = update + self.rnn_u.bias
        return self._activate(update)

    def advance(self, state: mx.array, embedding: mx.array) -> mx.array:
        """Advance the recurrent state of every beam by one token.

        With ``s`` the state and ``e`` the embedding of the newest token:

            s_t = f(rnn_w e_t + rnn_u s_{t-1} + b)    if ``config.rnn``, f = silu or the identity
            s_t = e_t + s_{t-1}                       otherwise

        Args:
            state: ``s_{t-1}``, shape (W, H).
            embedding: ``e_t``, shape (W, H), rows of the target's input embedding.

        Returns:
            ``s_t``, shape (W, H).
        """
        if not self.config.rnn:
            return state + embedding
        return self._activate(self.rnn_w(embedding) + self.rnn_u(state))

    def logits(self, hidden: mx.array, state: mx.array) -> mx.array:
        """Logits of the token that follows each beam.

            x = [h, s_t];  x = input_proj(x) if D != 2H;  x = x + silu(linear_i(x));  y = lm_head(x)

        Args:
            hidden: The target's last hidden state after its final norm, shape (H,) or (W, H).
            state: The beams' states, shape (W, H).

        Returns:
            Logits in the drafter's dtype, shape (W, V); not log-probabilities.
        """
        x = mx.concatenate([mx.broadcast_to(hidden, state.shape), state], axis=-1)
        if self.config.has_input_proj:
            x = self.input_proj(x)
        for layer in self.lm_head:
            x = layer(x)
        return x

    def log_probs(self, hidden: mx.array, state: mx.array) -> mx.array:
        """Natural log-probabilities of the next token of each beam.

        Args:
            hidden: As in `logits`.
            state: As in `logits`.

        Returns:
            float32, shape (W, V). With ``config.draft_top_k`` only the largest k logits count,
            as Apple's ``warp_logits`` does; the others get the logit -50000.
        """
        logits = self.logits(hidden, state).astype(mx.float32)
        top_k = self.config.draft_top_k
        if top_k is not None and top_k < logits.shape[-1]:
            logits = logits - mx.max(logits, axis=-1, keepdims=True)
            kth = mx.sort(logits, axis=-1)[..., -top_k, None]
            logits = mx.where(logits < kth, MASKED_LOGIT, logits)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """Token ids, int32, of rows of the head; any shape."""
        if not self.is_partial:
            return rows.astype(mx.int32)
        return self.token_ids[rows].astype(mx.int32)

    def _activate(self, x: mx.array) -> mx.array:
        return nn.silu(x) if self.config.rnn_activation == "silu" else x
