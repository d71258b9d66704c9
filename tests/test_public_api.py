"""The names that users rely on."""

import inspect
from dataclasses import fields

import mlx_lm
import pytest
from mlx_lm.generate import GenerationResponse as StockResponse

import mlx_redrafter
from mlx_redrafter.engine.generation import GenerationKeywords
from mlx_redrafter.generation_options import GenerationOptions
from tests.helpers.cli import python

EXPORTS = [
    "Conversation", "DraftModel", "Drafter", "DrafterConfig", "Engine", "GenerationResponse",
    "Grammar", "Lookup", "RedrafterError", "SpeculateAhead", "__version__", "generate",
    "generate_batch", "load", "load_drafter", "save_drafter", "stream_generate",
]  # fmt: skip


DEFAULTS = {
    "max_tokens": 256, "temp": None, "top_p": None, "top_k": None, "min_p": None, "seed": None,
    "beam_width": "auto", "beam_length": "auto", "tree_nodes": "auto", "select": "top_n",
    "couple": True, "prefill_step_size": 2048, "kv_bits": None, "kv_group_size": 64,
    "quantized_kv_start": 5000,
}  # fmt: skip


def test_exported_names_exist_and_no_others():
    assert mlx_redrafter.__all__ == EXPORTS
    assert all(getattr(mlx_redrafter, name) is not None for name in EXPORTS)
    with pytest.raises(AttributeError, match="has no attribute 'speculate'"):
        _ = mlx_redrafter.speculate


def test_options_of_stream_generate():
    parameters = inspect.signature(mlx_redrafter.stream_generate).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert positional == ["model", "tokenizer", "prompt"]
    assert keywords == {"drafter": "lookup"}
    assert GenerationKeywords.__optional_keys__ == {
        *DEFAULTS, "sampler", "logits_processors", "grammar", "prompt_cache", "history",
        "prompt_progress_callback",
    }  # fmt: skip
    assert {one.name: one.default for one in fields(GenerationOptions)} == DEFAULTS


def test_responses_have_mlx_lms_fields_and_three_more():
    stock = list(StockResponse.__dataclass_fields__)
    ours = list(mlx_redrafter.GenerationResponse.__dataclass_fields__)
    assert ours == [*stock, "steps", "tokens_per_step", "stats"]
    assert issubclass(mlx_redrafter.GenerationResponse, StockResponse)


def test_load_takes_what_mlx_lms_load_takes():
    parameters = inspect.signature(mlx_redrafter.load).parameters
    stock = inspect.signature(mlx_lm.load).parameters
    shared = {"path_or_repo", "tokenizer_config", "adapter_path", "trust_remote_code"}
    assert set(parameters) == shared | {"drafter", "group", "kernels", "tune"}
    assert {"tokenizer_config", "adapter_path", "trust_remote_code"} <= set(stock)


@pytest.mark.parametrize("words", ["--help", "convert --help"])
def test_help_does_not_import_mlx_lm(words):
    """It should not take seconds."""
    code = (
        "import sys; from mlx_redrafter.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(sum(name in sys.modules for name in ('mlx_lm', 'transformers', 'torch')))"
    )
    shown = python("-c", code, *words.split(), check=True).stdout
    assert ("convert SRC` describes a checkpoint" in " ".join(shown.split())) == (
        "convert" in words
    )
