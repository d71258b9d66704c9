"""Models for the command line."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Trained
from tests.helpers.cli import cli  # noqa: F401  (a fixture)
from tests.helpers.hostile import build_yard

TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' + (tone or '') }}{% endif %}"
)


@pytest.fixture(scope="session")
def chat_folder(stories: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260k with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(stories.folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the bundled model's tokenizer, a drafter of it, and texts."""
    folder = tmp_path_factory.mktemp("untouched")
    build_yard(folder)
    return folder


@pytest.fixture
def yard(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage, the current folder."""
    shutil.copytree(untouched, tmp_path / "yard")
    monkeypatch.chdir(tmp_path / "yard")
    return tmp_path / "yard"
