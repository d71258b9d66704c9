"""A Llama in torch, its parameters under their Hugging Face names, and the Muon optimiser."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MOMENTUM, DECAY = 0.95, 0.02


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of config.json that a model is built from, under their Hugging Face names."""

    hidden_size: int = 320
    intermediate_size: int = 864
    num_hidden_layers: int = 5
    num_attention_heads: int = 5
    num_key_value_heads: int = 5
    vocab_size: int = 4096
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Norm(nn.Module):
    """RMS norm, computed in float32."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.eps = shape.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(
            x.dtype
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, first half of a head paired with its second half."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention; several query heads may share a key and value head."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.groups = shape.num_attention_heads // shape.num_key_value_heads
        key_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(shape), Attention(shape)
        self.post_attention_layernorm, self.mlp = Norm(shape), MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape)


class Llama(nn.Module):
    """A Llama with tied embeddings; projections back into the residual stream start at zero."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.model = Backbone(shape)
        inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), inverse).repeat(
            1, 2
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else shape.hidden_size**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, (batch, length, vocabulary)."""
        x = self.model.embed_tokens(tokens)
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        length = tokens.shape[1]
        x, cos, sin = x.to(dtype), self.cos[:length].to(dtype), self.sin[:length].to(dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of every token but the first of each row, in nats."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def matrices(self) -> list[nn.Parameter]:
        """List the parameters that Muon trains."""
        return [p for name, p in self.named_parameters() if p.ndim == 2 and "embed" not in name]

    def vectors(self) -> list[nn.Parameter]:
        """List the other parameters: norms and the embedding."""
        return [p for name, p in self.named_parameters() if p.ndim == 1 or "embed" in name]


def orthogonalise(g: Tensor) -> Tensor:
    """About U V^T of the singular value decomposition of each matrix of a stack (Newton-Schulz)."""
    a, b, c = NEWTON_SCHULZ
    x = g.to(torch.bfloat16)
    if transposed := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if transposed else x).to(g.dtype)


class Muon:
    """Nesterov momentum, orthogonalised, with decoupled weight decay.

    Matrices of one size are handled as one stack.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        sizes: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            sizes.setdefault(parameter.shape, []).append(parameter)
        self.groups = list(sizes.values())
        self.momenta = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, buffer in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])
            buffer.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalise(gradient.lerp_(buffer, MOMENTUM))
            rows, columns = group[0].shape
            scale = max(1.0, rows / columns) ** 0.5
            for parameter, direction in zip(group, update, strict=True):
                parameter.mul_(1 - rate * DECAY).add_(direction, alpha=-rate * scale)
