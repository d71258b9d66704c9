"""When the host waits for the device: once a step, with work dispatched behind the read.

Steps that choose which drafts they verify wait for the draft as well.
"""

from __future__ import annotations

import ast
import io
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter import Engine, stream_generate
from mlx_redrafter.decoding import passes
from mlx_redrafter.decoding import step as decoding_step
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.device_read import to_ints
from tests.conftest import Trained
from tests.helpers.models import ROOT

READS = ["item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__"]
READS += ["__buffer__", "__dlpack__", "__iter__", "__contains__", "__repr__"]
WAITS = ["eval", "synchronize"]
STEPS = 50

# What runs between the first token and the last, or is called from there.
LOOP = [
    "decoding/delivery",
    "decoding/passes",
    "decoding/processors",
    "decoding/records",
    "decoding/sampling",
    "decoding/scheduler",
    "decoding/sequence",
    "decoding/step",
    "proposers/draft_model",
    "proposers/lookup/lookup",
    "proposers/redrafter/network",
    "proposers/search",
    "proposers/lookup/chances",
    "proposers/lookup/contexts",
    "proposers/lookup/draft_tree",
    "target/caches/tree_pass",
    "target/caches/places",
    "target/caches/full",
    "target/caches/draft_cache",
    "target/caches/tree_cache",
    "target/compiled_pass",
    "target/hooks",
    "target/modules",
    "target/target",
    "trees/tree",
]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host does with the device, in order: reads, waits and dispatches."""
    log: list[str] = []

    def record(owner: Any, name: str, event: str) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            log.append(event)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    for name in READS:
        record(mx.array, name, f"read by {name}")
    for name in WAITS:
        record(mx, name, f"wait by {name}")
    record(mx, "async_eval", "dispatch")
    return log


def test_the_recorder_sees_every_way_to_read(events: list[str]) -> None:
    """Otherwise the tests below could pass for want of eyes."""
    one = mx.array(1)
    one.item()
    one.reshape(1).tolist()
    int(one)
    float(one)
    bool(one)
    _ = [0, 1][one]
    list(mx.array([1]))
    mx.eval(one)
    mx.async_eval(one)
    mx.synchronize()
    assert [event.removeprefix("read by ") for event in events] == [
        "item",
        "tolist",
        "__int__",
        "__float__",
        "__bool__",
        "__index__",
        "__iter__",
        "wait by eval",
        "dispatch",
        "wait by synchronize",
    ]


def _run(stories: Trained, events: list[str], **options: Any) -> list[list[str]]:
    """The events of each of 50 steps, from one first token of a step to the next step's."""
    options = {"drafter": None, "max_tokens": 400, **options}
    responses = stream_generate(stories.model, stories.tokenizer, [1], **options)
    steps: list[list[str]] = []
    events.clear()
    for response in responses:
        if response.steps > len(steps):  # the first token of a step
            steps.append(list(events))
            events.clear()
        if len(steps) == STEPS + 1:
            break
    return steps[1:]  # the first holds the prompt


@pytest.mark.parametrize("options", [{}, {"temp": 0.9, "seed": 1, "top_p": 0.9}], ids=str)
def test_a_drafted_step_reads_once_while_the_next_draft_runs(
    stories: Trained, events: list[str], options: dict[str, Any]
) -> None:
    steps = _run(stories, events, drafter=stories.drafter, beam_width=4, **options)
    assert len(steps) == STEPS
    for step in steps:
        # The next draft goes behind the verify in flight, and only then is the verify's outcome
        # read; the next verify is dispatched before the tokens are handed out.
        assert step == ["dispatch", "read by tolist", "dispatch"]


def test_beam_selection_reads_the_node_count_as_well(stories: Trained, events: list[str]) -> None:
    steps = _run(stories, events, drafter=stories.drafter, select="beam")
    assert len(steps) == STEPS
    for step in steps:
        # The node count, the rest of the draft, the outcome, the next verify.
        assert step == ["read by tolist", "dispatch", "read by tolist", "dispatch"]


@pytest.mark.parametrize("options", [{}, {"temp": 0.9, "seed": 1}], ids=str)
def test_a_plain_step_waits_once_while_the_next_token_is_computed(
    stories: Trained, events: list[str], options: dict[str, Any]
) -> None:
    steps = _run(stories, events, **options)
    assert len(steps) == STEPS
    for step in steps:
        # The token, and what tells of NaN beside it, which is there as well.
        assert step == ["dispatch", "read by tolist", "read by tolist"]


def test_a_step_that_chooses_its_drafts_reads_what_is_known_of_them_as_well(
    stories: Trained, events: list[str]
) -> None:
    steps = _run(stories, events, drafter=stories.drafter)
    assert len(steps) == STEPS
    for step in steps:
        # At most: what is known of two drafts, and a plain step's two.
        assert sum(event.startswith("read") for event in step) <= 4
        assert not any(event.startswith("wait") for event in step)
    # The outcome is read while the next draft is in flight. What is known of a draft is read when
    # it is there or, where its plan does not depend on it, in the next step beside the verify.
    read = "read by tolist"
    kinds = [
        [*before, "dispatch", read, *after, "dispatch"]
        for before in ([], [read])
        for after in ([], [read])
    ]
    assert sum(steps.count(kind) for kind in kinds) > STEPS - 10


def test_what_is_dispatched_before_the_read_is_the_next_draft(
    stories: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft depends on the step that is read, so the device has work when the read returns."""
    log: list[str] = []
    owners = {"_propose": decoding_step._Step, "commit": SequenceDecoder, "push": SequenceDecoder}
    for name, owner in owners.items():
        original = getattr(owner, name)

        def wrapper(one: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            if name != "commit" or one.last is not one.committed:
                log.append(name)
            return original(one, *args)

        monkeypatch.setattr(owner, name, wrapper)
    list(
        stream_generate(
            stories.model,
            stories.tokenizer,
            [1],
            drafter=stories.drafter,
            beam_width=4,
            max_tokens=30,
        )
    )
    # The first token waits for nothing.
    assert log[:6] == ["push", "commit", "_propose", "push", "_propose", "commit"]
    rounds = "".join(f"{name};" for name in log).count("_propose;commit;push;")
    assert rounds >= 20


@pytest.mark.parametrize("options", [{}, {"temp": 0.9, "seed": 1}], ids=str)
@pytest.mark.parametrize("has_drafter", [False, True])
def test_a_batch_reads_what_is_dispatched_and_nothing_made_of_it(
    stories: Trained, monkeypatch: pytest.MonkeyPatch, has_drafter: bool, options: dict[str, Any]
) -> None:
    """MLX would compute a part of an array behind all that is dispatched meanwhile."""
    graphs: list[str] = []
    for name in ("to_ints", "to_floats", "to_rows"):
        read = getattr(passes, name)

        def watched(values: mx.array, read: Any = read) -> Any:
            graph = io.StringIO()
            mx.export_to_dot(graph, values)
            graphs.append(graph.getvalue())
            return read(values)

        monkeypatch.setattr(passes, name, watched)
    shape = {"beam_width": 2, "tree_nodes": 4} if has_drafter else {}
    drafter = stories.drafter if has_drafter else None
    engine = Engine(stories.model, stories.tokenizer, drafter)
    for _ in engine.stream_batch([[1], [1, 7, 9]], max_tokens=8, **shape, **options):
        pass
    assert len(graphs) > 4
    assert not any("rectangle" in graph for graph in graphs), "an operation is left"


# Once per chunk of a prompt, once per set of a drafter's weights, and in blank caches for timing.
ALLOWED = {
    "proposers/draft_model": [
        "bool(cached)",  # a list
        "mx.eval([layer.stock.state for layer in self.cache.layers])",
    ],
    "target/compiled_pass": [
        "mx.eval(matrix)",  # while a pass is traced
        "mx.array_equal(found, wanted, equal_nan=True).item()",  # once per model
    ],
    "target/hooks": ["int(layer.floor_scale)"],  # a number of the config
    "target/modules": [
        "mx.array_equal(module(given), outputs[-1]).item()",  # before a text, to find a layer
    ],
    "proposers/redrafter/network": [  # before the first text
        "mx.eval(rows)",
        "mx.eval(views)",
        "mx.eval(self.quantized)",
        "mx.eval(self.weight)",
    ],
    "target/caches/tree_pass": ["bool(path)"],  # a list
}


@pytest.mark.parametrize("module", LOOP)
def test_the_loop_reads_through_to_ints_only(module: str) -> None:
    """Patches see what ran; the source says that nothing else is there."""
    source = (ROOT / "mlx_redrafter" / f"{module}.py").read_text(encoding="utf-8")
    found = [
        f"{module}.py:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and _waits(node)
    ]
    assert [call.partition(" ")[2] for call in found] == ALLOWED.get(module, [])


def _waits(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if isinstance(call.func, ast.Name):
        name = call.func.id
    return name in {"item", "tolist", "eval", "synchronize", "int", "float", "bool", "asarray"}


def test_to_ints_reads_an_array() -> None:
    values = to_ints(mx.array([3, -1, 2**31 - 1], dtype=mx.int32))
    assert values == [3, -1, 2**31 - 1]
    assert all(type(value) is int for value in values)
