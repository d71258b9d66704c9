"""Help and completion: every command, as it is called."""

from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from mlx_redrafter.cli.main import main
from mlx_redrafter.errors import ConfigError
from tests.helpers.cli import PROGRAM, commands, python
from tests.helpers.models import ROOT

COMMANDS = {name: one for name, one in commands().items() if not one.hidden}


def test_the_table_of_commands_is_that_of_the_help():
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    table, *_ = page.partition("| command | does |\n|---|---|\n")[2].partition("\n\n")
    rows = (row.strip("| ").split(" | ") for row in table.splitlines())
    first = {name: one.help.partition("\n\n")[0] for name, one in COMMANDS.items() if name}
    summaries = {name: " ".join(text.split()) for name, text in first.items()}
    assert {name.strip("`"): summary for name, summary in rows} == summaries


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_how_a_command_is_called(cli, command):
    shown = cli(*command.split(), "--help").done()
    assert f"Usage: {' '.join(('redrafter-mlx', *command.split()))} " in shown.out
    assert "<bool>" not in shown.out
    assert "--help" in shown.out


@pytest.mark.parametrize(("columns", "name"), [("40", "generate"), ("80", "serve")])
def test_names_of_options_are_whole(cli, monkeypatch, columns, name):
    monkeypatch.setenv("COLUMNS", columns)
    shown = cli(name, "--help").out
    for option in COMMANDS[name].params:
        assert all(one in shown for one in option.opts if one.startswith("--")), option


def test_names_of_other_programs(cli):
    assert cli("ls", "--json").out == cli("list", "--json").out
    assert cli("genrate").err.endswith("Did you mean 'generate'?\n")
    unknown = cli("ps")
    assert (unknown.code, unknown.err.count("\n")) == (2, 1)
    assert unknown.err.endswith("No such command 'ps'. redrafter-mlx --help lists all.\n")


@pytest.mark.parametrize("words", [["a-model"], ["--model", "a-model"]])
def test_a_served_model_has_two_forms(cli, monkeypatch, words):
    found = Mock(side_effect=ConfigError("stop"))
    monkeypatch.setattr("mlx_redrafter.cli.serve._models_in", found)
    assert cli("serve", *words).code == 2
    assert found.call_args.args == ("a-model",)


COMPLETED = {
    "ge": "generate",
    "launch co": "codex",
    "generate --te": "--temp",
    "generate --model or": "org/Tiny-4bit org/small",
    "generate --model Ti": "Tiny-4bit",
    "generate --model other/": "",
    "run org/T": "org/Tiny-4bit",
    "bench speed --drafter sm": "small",
    "convert sm": "small",
}


def test_the_shell_completes(tmp_path, monkeypatch, capsys):
    for name in ("org--Tiny-4bit", "org--small"):
        snapshot = tmp_path / f"hub/models--{name}/snapshots/0123"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub/models--org--empty/snapshots").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("_REDRAFTER_MLX_COMPLETE", "complete_bash")
    for typed, expected in COMPLETED.items():
        monkeypatch.setenv("COMP_WORDS", f"redrafter-mlx {typed}")
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
        with pytest.raises(SystemExit):
            main([])
        assert capsys.readouterr().out.split() == expected.split(), typed
    completed = python("-X", "importtime", *PROGRAM)
    assert completed.stdout.split() == ["small"]
    assert "huggingface_hub.hf_api" not in completed.stderr  # takes 0.2 s


def test_the_shell_completes_every_name_of_a_model():
    for name, command in COMMANDS.items():
        for one in command.params:
            if {"--model", "--drafter"} & {*one.opts} or one.metavar == "MODEL":
                assert one._custom_shell_complete is not None, (name, one.name)
