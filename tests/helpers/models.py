"""Small models: trained ones from ../shared, and random ones built in memory.

Axes: V vocabulary, H hidden size, D exit_dim.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models import llama, qwen3
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import MODEL_REMAPPING
from transformers import PreTrainedTokenizerBase

from mlx_redrafter.bench.lab.real_models import RealModel, find_model
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter, RecurrentLevels
from mlx_redrafter.proposers.search import Expansion, NoiseRank, search_all
from mlx_redrafter.target.architectures import SUPPORTED
from mlx_redrafter.target.target import Target

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
# Why tests are skipped that need a trained model or a text; the name follows.
ABSENT = "not beside the repository:"


def supported_names() -> list[str]:
    """List the supported values of ``model_type`` in a ``config.json``, aliases included."""
    aliases = [alias for alias, name in MODEL_REMAPPING.items() if name in SUPPORTED]
    return sorted({*SUPPORTED, *aliases}, key=str.lower)


def shared_path(name: str) -> Path:
    """A file or folder in ``../shared``; skips the test where there is none."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{ABSENT} {name}")
    return path


@cache
def _find(model: RealModel) -> Path | RedrafterError:
    """Return a folder, or why there is none; a failed download is not tried again."""
    try:
        return find_model(model, "float32")
    except RedrafterError as error:
        return error


def real_folder(model: RealModel) -> Path:
    """Return the folder of a published model in float32; skips the test if it cannot be had."""
    folder = _find(model)
    if isinstance(folder, RedrafterError):
        pytest.skip(str(folder))
    return folder


def change_config(folder: Path, name: str = "config.json", /, **values: Any) -> None:
    """Change values of a JSON file."""
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(
    folder: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]
) -> None:
    """Change the tensors of a checkpoint."""
    path = str(folder / "model.safetensors")
    tensors: Any = mx.load(path)
    changed = change(tensors)
    mx.eval(changed)  # before the file is written anew
    mx.save_safetensors(path, changed, {"format": "mlx"})


def tiny_sizes(name: str, vocab_size: int, context: int = 512) -> dict[str, Any]:
    """Config of a tiny model of the kind of Llama."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, **heads}
    more = {"model_type": name, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return {**sizes, **more, "vocab_size": vocab_size, "max_position_embeddings": context}


def tiny_llama(
    seed: int = 0,
    vocab_size: int = 64,
    context: int = 512,
    layers: int = 3,
    spread: float = 6.0,
    head_size: int = 8,
) -> nn.Module:
    """A random float32 llama with grouped queries, hidden size 32."""
    own = {"num_hidden_layers": layers, "head_dim": head_size}
    sizes = tiny_sizes("llama", vocab_size, context) | own
    return randomised(llama.Model(llama.ModelArgs(**sizes)), seed, spread)


def tiny_qwen3(seed: int = 0, vocab_size: int = 64, spread: float = 6.0) -> nn.Module:
    """A random float32 qwen3 with normalised queries, hidden size 32."""
    sizes = tiny_sizes("qwen3", vocab_size) | {"rope_theta": 10000.0}
    return randomised(qwen3.Model(qwen3.ModelArgs(**sizes)), seed, spread)


def randomised(model: nn.Module, seed: int, spread: float) -> nn.Module:
    """Give matrices normal weights of unit gain, and the LM head ``spread`` times that.

    Fresh mlx-lm models predict nearly uniformly, which hides wrong tokens and makes greedy ties.
    """
    keys = iter(mx.random.split(mx.random.key(seed), len(named_parameters(model))))

    def draw(weight: mx.array) -> mx.array:
        key = next(keys)
        if weight.ndim < 2:
            return weight
        return mx.random.normal(weight.shape, scale=weight.shape[-1] ** -0.5, key=key)

    model.update(tree_map(draw, model.parameters()))
    if "lm_head" in model:
        head: Any = model["lm_head"]
        head.weight = head.weight * spread
    mx.eval(model.parameters())
    model.eval()
    return model


def quantize_wide(model: nn.Module, size: int = 32, bits: int = 4, mode: str = "affine") -> None:
    """Quantise as ``mlx_lm.convert`` does: layers whose width does not divide are left alone."""

    def fits(_: str, layer: Any) -> bool:
        return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % size == 0

    nn.quantize(model, size, bits, mode=mode, class_predicate=fits)


def random_drafter(
    vocab_size: int,
    hidden_size: int,
    *,
    seed: int = 0,
    exit_dim: int | None = None,
    num_draft_layers: int = 1,
    rnn: bool = True,
    dtype: mx.Dtype = mx.float32,
    **config: Any,
) -> Drafter:
    """An untrained drafter; ``exit_dim`` is twice ``hidden_size`` by default."""
    values = DrafterConfig(
        vocab_size, hidden_size, exit_dim or 2 * hidden_size, num_draft_layers, rnn, **config
    )
    return draw_weights(Drafter(values), seed, dtype)


def draw_weights(network: nn.Module, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Any:
    """Give all parameters of a drafter but token ids normal values, around 1 for norms."""
    keys = mx.random.split(mx.random.key(seed), 64)
    weights = named_parameters(network)
    assert len(weights) <= len(keys)
    for (name, leaf), key in zip(weights.items(), keys, strict=False):
        if name != "token_ids":
            drawn = mx.random.normal(leaf.shape, scale=2 * leaf.shape[-1] ** -0.5, key=key)
            weights[name] = (drawn + ("norm" in name)).astype(dtype)
    network.load_weights(list(weights.items()))
    mx.eval(network.parameters())
    return network.eval()


def expand(
    drafter: Drafter,
    embed: Callable[[mx.array], mx.array],
    hidden: mx.array,
    root: mx.array,
    shape: DraftShape,
    rank: NoiseRank | None = None,
) -> Expansion:
    """Search after one root, given its hidden state, shape (H,), and the target's embedding."""

    def project_input(ids: mx.array) -> mx.array:
        return drafter.project_input(embed(ids))

    levels = RecurrentLevels(drafter, project_input, hidden[None], root, rank is not None)
    return search_all(levels, shape, rank).alone


class ByteTokenizer:
    """A tokenizer of single characters: id 0 is the end, id i the character 31 + i."""

    eos_token_id = 0
    bos_token: str | None = None
    chat_template = None
    clean_up_tokenization_spaces = False
    # Says to mlx-lm that there is no renderer of its own.
    apply_chat_template = PreTrainedTokenizerBase.apply_chat_template

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [min(max(ord(character) - 31, 1), self.vocab_size - 1) for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token + 31) for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {chr(token + 31): token for token in range(self.vocab_size)}


def layer_inputs(target: Target, tokens: mx.array, layers: Sequence[int]) -> mx.array:
    """Capture the inputs of layers at all tokens of a new sequence, shape (n,) to (n, S)."""
    return target.compute(tokens[None], None, layers).alone.states


def wrapped_tokenizer(vocab_size: int, eos_token_ids: set[int] | None = None) -> TokenizerWrapper:
    """A `ByteTokenizer` as mlx-lm hands tokenizers out, which ends at ``eos_token_ids`` only."""
    wrapper = TokenizerWrapper(ByteTokenizer(vocab_size))
    wrapper._eos_token_ids = set(eos_token_ids or ())
    return wrapper


class ChatTokenizer(ByteTokenizer):
    """A tokenizer with a chat template, which shows tools and the beginning of an answer.

    It shortens all messages but the last one to ``kept`` characters.
    """

    chat_template: Any = "in Python"
    kept: int | None = None

    def apply_chat_template(self, messages: Any, **options: Any) -> str:  # type: ignore[override]
        *earlier, last = [f"[{one['role'][0].upper()}]{one['content']}" for one in messages]
        tools = [tool["function"]["name"] for tool in options.get("tools") or ()]
        texts = [text[: self.kept] for text in earlier]
        return "".join([*tools, *texts, last, "[A]", options.get("tone", "")])


def chat_tokenizer(kept: int | None = None, **wrapping: Any) -> TokenizerWrapper:
    """A `ChatTokenizer` of 64 tokens, none an end, in mlx-lm's wrapper with these arguments."""
    tokenizer = ChatTokenizer(64)
    tokenizer.kept = kept
    wrapper = TokenizerWrapper(tokenizer, **wrapping)
    wrapper._eos_token_ids = set()
    return wrapper


def fast_tokenizer() -> TokenizerWrapper:
    """A byte-level tokenizer of 264 tokens; some are several signs of JSON, 0 is the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("{", '"'), ('"', ":"), (",", '"'), ('"', "}"), ('"', ","), ("[", '"'), ('"', "]")]
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["</s>", *signs, *("".join(merge) for merge in merges)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=CHAT)
    )


CHAT = "{% for one in messages %}{{ one.content }}{% endfor %}:"
