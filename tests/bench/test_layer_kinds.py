"""A hybrid made of a widened model computes what that model does."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from mlx_redrafter.bench.lab.layer_kinds import hybrid_weights, with_states, with_windows
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.target.model_loading import make_model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "widened_from": {"num_hidden_layers": 2},
}
ADDED = ("layers.2.", "layers.3.", "layers.4.")


def test_a_hybrid_computes_what_the_widened_model_does() -> None:
    mx.random.seed(3)
    model = make_model("a model", CONFIG)
    tensors = named_parameters(model)
    for name in tensors:
        if any(one in name for one in ADDED) and name.endswith(
            ("o_proj.weight", "down_proj.weight")
        ):
            tensors[name] = mx.zeros_like(tensors[name])
    model.load_weights(list(tensors.items()))
    config, copied = with_states(CONFIG)
    assert copied == [None, 0, None, None, 1]
    hybrid = make_model("a hybrid", config)
    hybrid.load_weights(list(hybrid_weights(config, copied, tensors).items()))
    caches = [type(one) for one in hybrid.make_cache()]
    assert (caches.count(ArraysCache), caches.count(KVCache)) == (3, 2)
    tokens = mx.array([[5, 9, 7, 60, 3]])
    assert mx.allclose(hybrid(tokens), model(tokens), atol=1e-5)


def test_two_of_three_layers_get_windows() -> None:
    kinds = with_windows(CONFIG)["layer_types"]
    assert [kind.startswith("full") for kind in kinds] == [False, False, True, False, False]
