"""The published equations of the recurrent drafter in torch, as an oracle.

Written from arXiv 2403.09919 and the description of Apple's ``modeling_drafter.py``:

    s_t = f(W e_t + U s_{t-1} + b), or s_t = e_t + s_{t-1};  s_0 = 0
    x = [h, s_t]; x = P x + p if widths differ; x = x + silu(L_i x + l_i); logits = V x

with f = silu. TensorRT-LLM: f = identity and s_1 = W e_1, without U's bias; no mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.nn.functional import linear, silu

MASK = -50000.0


class PublishedDrafter:
    """A drafter on a state dict with Apple's names.

    Args:
        state_dict: float32 tensors.
        config: Apple's ``config.json``.
        is_tensorrt: Use TensorRT-LLM's recurrence and no top-50 mask.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor],
        config: Mapping[str, int],
        is_tensorrt: bool = False,
    ):
        self.tensors = state_dict
        self.config = config
        self.is_tensorrt = is_tensorrt

    def advance(self, state: torch.Tensor | None, embedding: torch.Tensor) -> torch.Tensor:
        """The next state, shape (W, H); ``state`` is None at the first step."""
        previous = torch.zeros_like(embedding) if state is None else state
        if not self.config["rnn"]:
            return embedding + previous
        update = linear(embedding, self.tensors["rnn_w.weight"])
        if not (self.is_tensorrt and state is None):
            recurrent = self.tensors["rnn_u.weight"], self.tensors["rnn_u.bias"]
            update = update + linear(previous, *recurrent)
        return update if self.is_tensorrt else silu(update)

    def logits(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Shape (W, V)."""
        x = torch.cat([hidden.expand_as(state), state], dim=-1)
        if "input_proj.weight" in self.tensors:
            x = linear(x, self.tensors["input_proj.weight"], self.tensors["input_proj.bias"])
        for i in range(self.config["num_draft_layers"]):
            block = (self.tensors[f"lm_head.{i}.linear.{part}"] for part in ("weight", "bias"))
            x = x + silu(linear(x, *block))
        return linear(x, self.tensors[f"lm_head.{self.config['num_draft_layers']}.weight"])

    def log_probs(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Shape (W, V); Apple keeps the 50 largest logits."""
        logits = self.logits(hidden, state)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        if not self.is_tensorrt:
            kept = min(50, logits.shape[-1])
            least = torch.topk(logits, kept, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, MASK)
        return torch.log_softmax(logits, dim=-1)

    def beams(
        self, hidden: torch.Tensor, root: int, embedding: torch.Tensor, width: int, length: int
    ) -> dict[tuple[int, ...], float]:
        """The W best continuations of ``length - 1`` tokens and their log-probabilities.

        A plain beam search over Python lists: it shares nothing with the code under test.
        """
        beams: list[tuple[tuple[int, ...], float, torch.Tensor | None]] = [((root,), 0.0, None)]
        for _ in range(length - 1):
            grown = []
            for tokens, score, state in beams:
                state = self.advance(state, embedding[tokens[-1]][None])
                log_probs = self.log_probs(hidden[None], state)[0]
                best = torch.topk(log_probs, width)
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    grown.append(((*tokens, token), score + value, state))
            grown.sort(key=lambda beam: -beam[1])
            beams = grown[:width]
        assert all(math.isfinite(score) for _, score, _ in beams)
        return {tokens: score for tokens, score, _ in beams}
