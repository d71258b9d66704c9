"""Prompt files in every form."""

import json

import pytest

from mlx_redrafter.bench.prompts import Prompt, read_prompts, select_prompts
from mlx_redrafter.errors import ConfigError
from tests.helpers.models import shared_path


def test_mt_bench_keeps_its_categories(tmp_path):
    path = tmp_path / "p.jsonl"
    line = {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]}
    path.write_text(json.dumps(line) + "\n\n")
    assert read_prompts(path) == [Prompt("81", "writing", "First.")]


def test_spec_bench_has_six_categories(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [
        {"question_id": 1, "category": name, "turns": ["x"]}
        for name in ("writing", "math", "translation", "rag")
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    categories = [prompt.category for prompt in read_prompts(path)]
    assert categories == ["multi_turn", "multi_turn", "translation", "rag"]


@pytest.mark.parametrize(("name", "count", "categories"), [("mt", 80, 8), ("spec", 480, 6)])
def test_published_files(name, count, categories):
    prompts = read_prompts(shared_path(f"prompts/{name}_bench.jsonl"))
    assert len(prompts) == count
    assert len({prompt.category for prompt in prompts}) == categories


def test_plain_lines_and_text(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "id": "x"}\n{"text": "b"}\n"c"\n')
    assert [(p.name, p.text) for p in read_prompts(path)] == [("x", "a"), ("2", "b"), ("3", "c")]
    path = tmp_path / "p.txt"
    path.write_text("one\nstill one\n\n\n\ntwo\n")
    assert [prompt.text for prompt in read_prompts(path)] == ["one\nstill one", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is not valid JSON"),
        ('{"a": 1}', "line 1: expected a text"),
        ("[1]", "expected an object or a string, got list"),
        ("", "no prompts"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts(tmp_path / "none.txt")


def test_choice_goes_through_the_categories():
    prompts = [Prompt(str(i), "ab"[i > 3], "") for i in range(6)]
    assert [prompt.name for prompt in select_prompts(prompts, 3)] == ["0", "4", "1"]
    assert select_prompts(prompts, None) == prompts
    assert len(select_prompts(prompts, 99)) == 6
