"""Models for the command line."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import Trained
from tests.helpers.hostile import build_yard
from tests.helpers.models import change_config

TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' + (tone or '') }}{% endif %}"
)


@pytest.fixture(scope="session")
def chat_folder(stories: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260k with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(stories.folder, folder)
    change_config(folder, "tokenizer_config.json", chat_template=TEMPLATE)
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
