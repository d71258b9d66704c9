"""Prompt files in every form."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.bench.prompts import (
    PLACEHOLDER,
    Prompt,
    fit_prompts,
    read_prompts,
    select_prompts,
)
from mlx_redrafter.errors import CheckpointError, ConfigError
from tests.helpers.models import ByteTokenizer, shared_path


def test_mt_bench_and_spec_bench_have_their_categories(tmp_path):
    path = tmp_path / "p.jsonl"
    line = {"question_id": 81, "category": "roleplay", "turns": ["First.", "Second."]}
    path.write_text(json.dumps(line) + "\n\n")
    assert read_prompts(path) == [Prompt("81", "roleplay", "First.")]
    names = ("writing", "math", "translation", "rag")
    lines = [{"question_id": 1, "category": name, "turns": ["x"]} for name in names]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    categories = [prompt.category for prompt in read_prompts(path)]
    assert categories == ["multi_turn", "multi_turn", "translation", "rag"]


def test_every_prompt_has_a_name_of_its_own(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"id": {one}, "text": "x"}}\n' for one in ("null", "null", 1)))
    assert [prompt.name for prompt in read_prompts(path)] == ["1", "2", "3"]


@pytest.mark.parametrize(("name", "count", "categories"), [("mt", 80, 8), ("spec", 480, 6)])
def test_published_files(name, count, categories):
    prompts = read_prompts(shared_path(f"prompts/{name}_bench.jsonl"))
    assert len(prompts) == count
    assert len({prompt.category for prompt in prompts}) == categories


def test_plain_lines_and_text(tmp_path):
    path = tmp_path / "p.JSONL"
    path.write_text('{"prompt": "a", "id": "x"}\n{"text": "b"}\n"c"\n', encoding="utf-8-sig")
    assert [(p.name, p.text) for p in read_prompts(path)] == [("x", "a"), ("2", "b"), ("3", "c")]
    path.write_text('{"text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == ["a\u2028b\x85c"]
    path = tmp_path / "p.txt"
    path.write_text("one\nstill one\n\n\n\ntwo\n")
    assert [prompt.text for prompt in read_prompts(path)] == ["one\nstill one", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is not valid JSON"),
        (r'"a \ud800"', "line 1 is not valid JSON: .* surrogates not allowed"),
        ('{"a": 1}', "prompt 1: expected a text"),
        ("[1]", "expected an object or a string, got list"),
        ("", "no prompts"),
        (f'"Hello"\n"{PLACEHOLDER} FROM THE SOURCE"', r"1 of the 2 prompts .* prepare_data\.py"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)
    with pytest.raises(ConfigError, match=r"none\.txt: No such file"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match=r"expected a file with prompts, .* /dev/zero; give a"):
        read_prompts(Path("/dev/zero"))
    with pytest.raises(ConfigError, match=r"expected a text, .* file, found p\.json"):
        read_prompts(Path("p.json"))


def test_prompts_of_the_same_length():
    """Longer ones are cut at their end; others of the file come before shorter ones."""
    tokenizer = TokenizerWrapper(ByteTokenizer(256))
    prompts = [Prompt("a", "x", "one"), Prompt("b", "x", "two and three")]
    fitted = fit_prompts(tokenizer, prompts, prompts, 8)
    assert [one.text for one in fitted] == ["ree  one", "two and "]
    with pytest.raises(ConfigError, match="more or longer prompts"):
        fit_prompts(tokenizer, prompts, prompts, 99)


def test_no_prompt_is_shorter_than_its_chat_template(monkeypatch):
    def templated(tokenizer, text):
        return [0] * 10 + tokenizer.encode(text)

    monkeypatch.setattr("mlx_redrafter.bench.prompts.encode_question", templated)
    tokenizer, long = TokenizerWrapper(ByteTokenizer(256)), [Prompt("a", "x", "y" * 100)]
    assert [one.text for one in fit_prompts(tokenizer, long, long, 12)] == ["yy"]
    with pytest.raises(ConfigError, match="more tokens than a chat has, got 8"):
        fit_prompts(tokenizer, long, long, 8)


def test_a_dataset_of_the_hub(tmp_path, monkeypatch):
    """Its Parquet files are downloaded once, by the hub's own client."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="reads Parquet files")
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "data" / "qualitative"
    folder.mkdir(parents=True)
    rows = [{"question_id": "a", "category": "coding", "turns": ["One", "Two"]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "test-00000-of-00001.parquet")
    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr("mlx_redrafter.bench.prompts.snapshot_download", download)
    name = Path("nvidia/SPEED-Bench:qualitative")
    assert read_prompts(name) == [Prompt("a", "coding", "One")]
    (call,) = download.call_args_list
    assert (call.args, call.kwargs["repo_type"]) == (("nvidia/SPEED-Bench",), "dataset")
    assert call.kwargs["allow_patterns"] == ["*qualitative/*.parquet"]
    (folder / "damaged.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(ConfigError, match="cannot read the prompts"):
        read_prompts(folder / "damaged.parquet")
    with pytest.raises(CheckpointError, match="no configuration 'other'"):
        read_prompts(Path("nvidia/SPEED-Bench:other"))


def test_choice_goes_through_the_categories():
    prompts = [Prompt(str(i), "ab"[i > 3], "") for i in range(6)]
    assert [prompt.name for prompt in select_prompts(prompts, 3)] == ["0", "4", "1"]
    assert select_prompts(prompts, None) == prompts
    assert len(select_prompts(prompts, 99)) == 6
