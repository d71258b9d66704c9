"""A tiny pair with a checkpoint folder each, as the benchmarks load them."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_redrafter.checkpoint_files import write_checkpoint
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def pair():
    """A random target and a random drafter, in memory."""
    mx.random.seed(7)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    drafter = Drafter(DrafterConfig(320, 32, exit_dim=64, num_draft_layers=1, rnn=True))
    mx.eval(model.parameters(), drafter.parameters())
    return model, drafter


@pytest.fixture(scope="session")
def folders(pair, tmp_path_factory) -> tuple[Path, Path]:
    """The same pair as checkpoint folders, with a byte-level tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    model, drafter = pair
    base = tmp_path_factory.mktemp("pair")
    write_checkpoint(base / "target", CONFIG, dict(tree_flatten(model.parameters())))
    vocab = {"<unk>": 0, "</s>": 1}
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab |= {letter: i for i, letter in enumerate(alphabet, start=2)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(base / "target" / "tokenizer.json"))
    (base / "target" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}'
    )
    save_drafter(drafter, base / "drafter")
    return base / "target", base / "drafter"
