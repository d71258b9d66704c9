"""Models in GGUF files, as folders that mlx-lm loads: llama with SmolLM2's tokenizer, Gemma 3.

The weights are dequantised to float16, the precision that GGUF keeps its scales in.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from mlx_redrafter.checkpoint_files import write_checkpoint
from mlx_redrafter.errors import CheckpointError

# Parts of a layer with the same name in both architectures.
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORM_NAMES = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# GGUF's types of tokens.
NORMAL, CONTROL = 1, 3


class GgufModel:
    """A model in a GGUF file, whose architecture and tokenizer must be known here."""

    def __init__(self, path: Path):
        self._reader = GGUFReader(str(path))
        self.architecture = self._field("general.architecture")
        if self.architecture not in NORM_NAMES:
            raise CheckpointError(f"expected llama or gemma3 in {path}, found {self.architecture}")
        self._heads = self._value("attention.head_count")
        self._kv_heads = self._value("attention.head_count_kv")

    def write(self, folder: Path) -> None:
        """Write weights, config and tokenizer to a folder."""
        weights = dict(self._weights())
        write_checkpoint(folder, self._config(weights), weights)
        is_llama = self.architecture == "llama"
        tokenizer, config = self._smollm_tokenizer() if is_llama else self._gemma_tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        values = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **config,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=1))

    def _field(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        return None if field is None else field.contents()

    def _value(self, name: str) -> Any:
        return self._field(f"{self.architecture}.{name}")

    def _weights(self) -> Iterator[tuple[str, mx.array]]:
        for tensor in self._reader.tensors:
            name, _, suffix = tensor.name.rpartition(".")
            if suffix != "weight":
                continue  # frequencies of rotary embeddings, which mlx-lm computes
            shape = [int(size) for size in tensor.shape][::-1]
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
            yield f"{self._name(name)}.weight", mx.array(self._restore(name, weight), mx.float16)

    def _name(self, name: str) -> str:
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
        if found is None:
            return OUTER_NAMES[name]
        parts = LAYER_NAMES | NORM_NAMES[self.architecture]
        return f"model.layers.{found[1]}.{parts[found[2]]}"

    def _restore(self, name: str, weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Undo what GGUF changes: llama's rotary halves are interleaved, Gemma's norms plus 1."""
        if self.architecture == "gemma3":
            return weight - 1 if "norm" in name else weight
        heads = {"attn_q": self._heads, "attn_k": self._kv_heads}.get(name.rpartition(".")[2])
        if heads is None:
            return weight
        pairs = weight.reshape(heads, len(weight) // heads // 2, 2, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)

    def _config(self, weights: dict[str, mx.array]) -> dict[str, Any]:
        hidden_size = self._value("embedding_length")
        head_dim = self._value("attention.key_length") or hidden_size // self._heads
        own: dict[str, Any] = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "attention_bias": False,
        }
        if self.architecture == "gemma3":
            own = {
                "model_type": "gemma3_text",
                "architectures": ["Gemma3ForCausalLM"],
                "sliding_window": self._value("attention.sliding_window"),
                # Two numbers of the published config that the file lacks.
                "sliding_window_pattern": 6,
                "rope_local_base_freq": 10000.0,
                "query_pre_attn_scalar": head_dim,
            }
        return own | {
            "vocab_size": len(weights["model.embed_tokens.weight"]),
            "hidden_size": hidden_size,
            "num_hidden_layers": self._value("block_count"),
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": head_dim,
            "intermediate_size": self._value("feed_forward_length"),
            "rms_norm_eps": self._value("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._value("rope.freq_base"),
            "max_position_embeddings": self._value("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in weights,
            "torch_dtype": "float16",
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
        }

    def _special(self) -> list[AddedToken]:
        tokens, kinds = (self._field(f"tokenizer.ggml.{one}") for one in ("tokens", "token_type"))
        return [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL
        ]

    def _smollm_tokenizer(self) -> tuple[Tokenizer, dict[str, Any]]:
        """Make SmolLM2's tokenizer: BPE on bytes, digits alone."""
        if (found := self._field("tokenizer.ggml.pre")) != "smollm":
            raise CheckpointError(f"expected the tokenizer smollm, found {found}")
        tokens = self._field("tokenizer.ggml.tokens")
        merges = [tuple(one.split(" ", 1)) for one in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(
            models.BPE(dict(zip(tokens, range(len(tokens)), strict=True)), merges)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(self._special())
        return tokenizer, {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "model_max_length": self._value("context_length"),
            "chat_template": self._field("tokenizer.chat_template"),
        }

    def _gemma_tokenizer(self) -> tuple[Tokenizer, dict[str, Any]]:
        """Make Gemma's tokenizer: BPE with byte fallback, its merges in the order of the pieces."""
        tokens, kinds = (self._field(f"tokenizer.ggml.{one}") for one in ("tokens", "token_type"))
        ids: dict[str, int] = {}
        for id, token in enumerate(tokens):
            ids[f"<duplicate_{id}>" if token in ids else token] = id
        merges = sorted(
            (id, ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
            for token, id in ids.items()
            if kinds[id] == NORMAL
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        )
        pairs = [(first, second) for *_, first, second in merges]
        tokenizer = Tokenizer(
            models.BPE(ids, pairs, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
        )
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        tokenizer.add_special_tokens(self._special())
        tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A",
            pair="<bos> $A $B",
            special_tokens=[("<bos>", self._field("tokenizer.ggml.bos_token_id"))],
        )
        names = {f"{one}_token": f"<{one}>" for one in ("bos", "eos", "unk", "pad")}
        return tokenizer, names
