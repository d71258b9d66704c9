"""Checkpoint folders and configs: what is written is read back; what does not fit is named."""

import errno
import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter import Drafter, checkpoint_files, generate, load_drafter, save_drafter
from mlx_redrafter.checkpoint_files import find_checkpoint, read_config, read_shapes, read_tensors
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import CheckpointError, ConfigError, NonFiniteError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from tests.helpers.calls import at_call
from tests.helpers.equality import assert_same_weights
from tests.helpers.models import change_tensors, random_drafter, tiny_llama, wrapped_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"a": mx.arange(6, dtype=mx.float32).reshape(2, 3), "b": mx.ones(4, mx.bfloat16)}
    checkpoint_files.write_checkpoint(tmp_path / "checkpoint", {"model_type": "x"}, tensors)
    return tmp_path / "checkpoint"


def test_round_trip(folder):
    assert find_checkpoint(folder) == folder
    assert read_config(folder) == {"model_type": "x"}
    assert read_shapes(folder) == {"a": (2, 3), "b": (4,)}
    tensors = read_tensors(folder)
    assert tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b"].dtype == mx.bfloat16
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert os.stat(folder / "model.safetensors").st_mode & 0o777 == 0o644, "others may read it"
    before = os.umask(0o077)
    checkpoint_files.write_text(folder / "chat.jsonl", "")
    os.umask(before)
    assert os.stat(folder / "chat.jsonl").st_mode & 0o777 == 0o600, "others may not"
    # Shards are read together.
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    mx.save_safetensors(str(folder / "model-00002-of-00002.safetensors"), {"c": mx.ones(2)})
    assert set(read_shapes(folder)) == set(read_tensors(folder)) == {"a", "b", "c"}


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch):
    """Otherwise a power cut may leave an empty file in place of both."""
    calls: list[tuple[str, int]] = []
    for name, word in ("fsync", "sync"), ("replace", "replace"):
        note = lambda file, *_, word=word: calls.append((word, os.stat(file).st_ino))  # noqa: E731
        at_call(monkeypatch, os, name, note)
    checkpoint_files.write_checkpoint(tmp_path, {"model_type": "x"}, {"a": mx.ones(2)})
    inodes = [(tmp_path / name).stat().st_ino for name in ("model.safetensors", "config.json")]
    own = tmp_path.stat().st_ino  # a move is on the disk once the folder is
    moves = [[("sync", one), ("replace", one), ("sync", own)] for one in inodes]
    assert calls == [call for move in moves for call in move]


@pytest.mark.parametrize("is_refused", [False, True])
def test_on_macos_the_drive_has_written_the_file(tmp_path, monkeypatch, is_refused):
    calls: list[object] = []

    def full_sync(file: Any, command: int) -> None:
        calls.append(command)
        if is_refused:
            raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr("fcntl.fcntl", full_sync)
    monkeypatch.setattr("os.fsync", lambda descriptor: calls.append("fsync"))
    checkpoint_files.write_text(tmp_path / "a.json", "{}")
    assert calls == 2 * [51, "fsync"][: 1 + is_refused], "the file and its folder"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_a_folder_is_rejected_and_not_read(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    message = rf"expected a regular file, found a pipe.*{name}; remove it"
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(folder)
    readers = {"config.json": read_config, "model.safetensors": read_shapes}
    if name in readers:
        with pytest.raises(CheckpointError, match=message):
            readers[name](folder)


def test_no_such_folder(folder):
    for name in ("no-such-folder", "./no/such", "/no/such/folder", "~/no/such/folder", "a/b/c"):
        with pytest.raises(CheckpointError, match=r"no such folder: .*; give a checkpoint folder"):
            find_checkpoint(name)
    unknown = r"'nobody/nothing' is neither a local folder nor a repository"
    with pytest.raises(CheckpointError, match=unknown) as caught:
        find_checkpoint("nobody/nothing")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"got '~no-such-user/model': nobody here has this name"):
        find_checkpoint("~no-such-user/model")
    with pytest.raises(CheckpointError, match="expected a checkpoint folder, found a file"):
        find_checkpoint(folder / "config.json")
    with pytest.raises(CheckpointError, match="cannot read the folder"):
        find_checkpoint("a\0b")


def test_missing_files(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json in .*found weights alone"):
        read_config(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\*\.safetensors in"):
        read_shapes(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "expected a JSON object in .*, found list"),
        (b"{", "cannot read .*config.json: "),
        (b"", "cannot read .*config.json: "),
        (b"[" * 100_000, "cannot read .*config.json: "),
        (
            b" " * (checkpoint_files.MAX_JSON_BYTES + 1),
            "expected at most 16777216 bytes, found 16777217",
        ),
        (b"\xff\xfe\x00\x80", "cannot read .*config.json: "),
    ],
    ids=["list", "torn", "empty", "deep", "long", "binary"],
)
def test_foreign_configs(folder, content, message):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_config(folder)


def _header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


# The last one claims tensors that no memory holds.
CLAIM = {"a": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}}
FOREIGN: dict[str, Callable[[bytes], bytes]] = {
    **{f"first {end}": lambda data, end=end: data[:end] for end in (0, 4, 8, 40, -1)},  # type: ignore[misc]
    "zip": lambda _: b"PK\x03\x04" + b"\x00" * 60,
    "pickle": lambda _: b"\x80\x04\x95hello" * 10,
    "huge header": lambda _: b"\xff" * 64,
    "no header": lambda _: _header(b'{"a": [1, 2, 3, 4]}x'),
    "claim": lambda _: _header(json.dumps(CLAIM).encode()),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_truncated_and_foreign_weights(folder, kind):
    path = folder / "model.safetensors"
    path.write_bytes(FOREIGN[kind](path.read_bytes()))
    for read in (read_shapes, read_tensors):
        with pytest.raises(CheckpointError, match="is truncated or not a safetensors file"):
            read(folder)


def test_failed_writing_leaves_the_old_file(folder):
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    before = (folder / "config.json").read_text()
    with pytest.raises(OSError, match="disk full"):
        checkpoint_files.write_atomically(folder / "config.json", fail)
    assert (folder / "config.json").read_text() == before
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


VOCAB_SIZE, HIDDEN_SIZE = 64, 32
TARGET = tiny_llama(seed=6, layers=1), wrapped_tokenizer(VOCAB_SIZE)
write = partial(generate, *TARGET, [3, 4], max_tokens=12)
PLAIN = write(drafter=None)


def _assert_same_drafter(found: Drafter, expected: Drafter) -> None:
    assert (found.config, found.dtype) == (expected.config, expected.dtype)
    assert_same_weights(found, expected)


@pytest.mark.parametrize(
    ("dtype", "rnn", "layers", "exit_dim", "bits"),
    [
        (mx.float32, True, 0, 64, None),
        (mx.float16, False, 0, 96, None),
        (mx.bfloat16, True, 2, 64, None),
        (mx.float32, False, 3, 96, None),
        (mx.float32, True, 1, 64, 4),
        (mx.float32, True, 1, 40, 8),
    ],
)
def test_what_is_written_is_read_back_and_leaves_a_text(
    dtype, rnn, layers, exit_dim, bits, tmp_path
):
    sizes = {"num_draft_layers": layers, "exit_dim": exit_dim}
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, rnn=rnn, dtype=dtype, **sizes)
    if bits is not None:
        quantize_drafter(drafter, bits, 32)
    save_drafter(drafter, tmp_path, {"made_by": "a test"})
    loaded = load_drafter(tmp_path)
    _assert_same_drafter(loaded, drafter)
    assert write(drafter=loaded) == PLAIN
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["made_by"] == "a test"
    assert config.get("quantization") == (bits and {"group_size": 32, "bits": bits})
    # A used drafter can be pickled.
    hidden, state = mx.random.normal((2, HIDDEN_SIZE), key=mx.random.key(1))
    found = drafter.log_probs(hidden, state[None], drafter.hidden_term(hidden))
    copy = pickle.loads(pickle.dumps(drafter))
    assert mx.array_equal(copy.log_probs(hidden, state[None], copy.hidden_term(hidden)), found)


def test_token_ids_that_would_break_a_tree_are_refused(tmp_path):
    """Equal siblings would both be accepted; ids out of range would read foreign memory."""
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, draft_vocab_size=3)
    for token_ids, message in (
        ([3, 3, 4], "token_ids .*twice"),
        ([3, 4, VOCAB_SIZE], "token_ids .*from 0 to 63"),
        ([3, 4, -1], "token_ids .*from 0 to 63"),
        ([3.0, 4.0, 5.0], "token_ids .*integers"),
    ):
        drafter.token_ids = mx.array(token_ids)
        save_drafter(drafter, tmp_path)
        with pytest.raises(CheckpointError, match=message):
            load_drafter(tmp_path)


def test_every_tensor_that_does_not_fit_is_named(tmp_path):
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        del tensors["rnn_u.bias"]
        tensors["lm_head.1.weight"] = mx.zeros((VOCAB_SIZE, 5))
        tensors["surprise"] = mx.zeros((1,))
        return tensors

    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    save_drafter(drafter, tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(tmp_path)
    message = str(caught.value)
    assert "rnn_u.bias is missing" in message
    assert "'surprise' of shape [1] is unexpected" in message
    assert "lm_head.1.weight' has shape [64, 5], expected [64, 64]" in message
    # A long list of them is cut, and a tensor that Apple's code does not use is none of them.
    save_drafter(drafter, tmp_path, {"num_draft_layers": 64})
    with pytest.raises(CheckpointError, match=r"lm_head\.\d+.* and \d+ more") as caught:
        load_drafter(tmp_path)
    assert len(str(caught.value)) < 1200
    save_drafter(drafter, tmp_path)
    change_tensors(tmp_path, lambda tensors: {**tensors, "emb_norm.weight": mx.ones((32,))})
    _assert_same_drafter(load_drafter(tmp_path), drafter)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("bits", [None, 4])
def test_weights_that_are_no_numbers_are_named(value, bits, tmp_path):
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    if bits:
        quantize_drafter(drafter, bits, 32)
    bias: Any = drafter.rnn_u.bias
    bias[3] = value
    save_drafter(drafter, tmp_path)
    with pytest.raises(NonFiniteError, match=r"NaN or infinite weights in rnn_u\.bias; convert"):
        load_drafter(tmp_path)


def test_impossible_quantisation(tmp_path):
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    for quantization, message in (
        ([4], 'expected "quantization" to be an object'),
        ({"group_size": 32, "bits": 5}, "bits must be one of"),
        ({"group_size": 16, "bits": 4}, "group_size must be one of"),
        ({}, "bits must be one of"),
    ):
        save_drafter(drafter, tmp_path, {"quantization": quantization})
        with pytest.raises(CheckpointError, match=message):
            load_drafter(tmp_path)
    with pytest.raises(ConfigError, match="group_size 128 wide"):
        quantize_drafter(drafter, 4, 128)


def test_a_claim_in_the_config_allocates_nothing(tmp_path):
    """The weights of a 16-million-row head would not fit into memory."""
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    save_drafter(drafter, tmp_path, {"vocab_size": 2**24, "exit_dim": 2**20})
    before = mx.get_peak_memory()
    with pytest.raises(CheckpointError, match=r"do not fit its config\.json"):
        load_drafter(tmp_path)
    assert mx.get_peak_memory() - before < 2**20


def test_weights_are_in_memory_after_loading(stories, tmp_path):
    """A file that is replaced or deleted later must not matter."""
    save_drafter(stories.drafter, tmp_path)
    loaded = load_drafter(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    _assert_same_drafter(loaded, stories.drafter)


DRAFTER: dict[str, Any] = {
    "model_type": "recurrent_drafting_drafter", "vocab_size": 100, "hidden_size": 16,
    "exit_dim": 32, "num_draft_layers": 2,
}  # fmt: skip


def test_sizes_of_a_shape():
    """2 <= N <= 1 + 4 W (L - 1); merged beams have at most 1 + W (L - 1) nodes."""
    for plan, nodes, max_nodes, level in (
        (DraftPlan.of(), 9, 65, 16),
        (DraftPlan.of(1, 5), 5, 5, 1),
        (DraftPlan.of(2, 2), 9, 9, 8),
        (DraftPlan.of(64, 16, 3841), 3841, 3841, 256),
        (DraftPlan.of(4, 5, select="beam"), None, 17, 16),
    ):
        assert plan.options["tree_nodes"] == nodes
        assert plan.num_nodes == (nodes or max_nodes)
        assert (plan.shape.max_nodes, plan.shape.level_nodes) == (max_nodes, level)
        assert plan.shape.levels == plan.shape.length - 1


# Values of a field that are refused, and what is said before ", got" and the value.
BAD: list[tuple[Any, str, tuple[Any, ...], str]] = [
    (DraftPlan.of, "width", (0, 65, True, 4.0), "beam_width must be an integer from 1 to 64"),
    (DraftPlan.of, "length", (1, 17), "from 2 to 16 (the root counts as one)"),
    (DraftPlan.of, "num_nodes", (1, 66), "from 2 to 65 for beam_width 4 and beam_length 5"),
    (DraftPlan.of, "select", ("topn",), "select must be one of top_n, beam"),
    (
        SamplingParams,
        "temp",
        (-1e-9, float("inf"), float("nan"), "1", True, 10**20),
        "temp must be a number from 0 to 1e+06",
    ),
    (SamplingParams, "top_p", (-0.1, 1.1, float("nan")), "top_p must be a number from 0 to 1 (0: "),
    (SamplingParams, "min_p", (1.5,), "min_p must be a number from 0 to 1 (0: off)"),
    (SamplingParams, "top_k", (1.5, -1), "top_k must be an integer at least 0 (0: off)"),
    (SamplingParams, "seed", (-1, 2**32, 1.0), "seed must be an integer from 0 to 4294967295"),
]


@pytest.mark.parametrize(("make", "field", "values", "message"), BAD, ids=str)
def test_impossible_shapes_and_sampling(make, field, values, message):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            make(**{field: value})
        assert message in str(caught.value)
        assert str(caught.value).endswith(f", got {value!r}")
    SamplingParams(temp=100, top_p=1, min_p=1, top_k=10**6, seed=2**32 - 1)


def test_drafter_configs_are_read_back_and_keys_of_other_programs_ignored():
    config = DrafterConfig(100, 16, 40, 0, rnn=True, draft_top_k=50, draft_vocab_size=60)
    assert DrafterConfig.from_dict(config.to_dict()) == config
    assert (config.has_input_proj, config.head_rows) == (True, 60)
    values = {**DRAFTER, "num_lookback_tokens": -1, "emb_norm": True, "rms_norm_eps": 1e-5}
    config = DrafterConfig.from_dict(values)
    assert config == DrafterConfig(100, 16, 32, 2, rnn=False)
    assert (config.has_input_proj, config.head_rows) == (False, 100)


def test_impossible_drafter_configs():
    for change, message in (
        ({"model_type": "llama"}, "expected a drafter with model_type .*, found 'llama'"),
        ({"vocab_size": None}, "out of range: drafter vocab_size must be an integer .*None"),
        ({"vocab_size": 2**24 + 1}, "drafter vocab_size must be an integer from 1 to 16777216"),
        ({"exit_dim": -4}, "drafter exit_dim must be an integer from 1 .*got -4"),
        ({"num_draft_layers": 65}, "drafter num_draft_layers must be an integer from 0 to 64"),
        ({"rnn": "yes"}, "drafter rnn must be true or false, got 'yes'"),
        ({"rnn_activation": "relu"}, "must be one of silu, identity, got 'relu'"),
        ({"draft_top_k": 101}, "drafter draft_top_k must be an integer from 1 to 100, got 101"),
        ({"draft_vocab_size": 0}, "drafter draft_vocab_size must be an integer from 1 to 100"),
    ):
        with pytest.raises(CheckpointError, match=message):
            DrafterConfig.from_dict({**DRAFTER, **change})
    values = {"model_type": DRAFTER["model_type"], "exit_dim": 32}
    with pytest.raises(CheckpointError, match=r"lacks vocab_size, hidden_size, num_draft_layers"):
        DrafterConfig.from_dict(values)
