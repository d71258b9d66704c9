"""When the host waits for the device: once a step, with work dispatched behind the read.

Steps that choose which drafts they verify wait for the draft as well.
"""

import io
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter import Engine
from mlx_redrafter.decoding import passes
from tests.conftest import Trained
from tests.helpers.calls import at_call

READS = ["item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__"]
READS += ["__buffer__", "__dlpack__", "__iter__", "__contains__", "__repr__"]
WAITS = ["eval", "synchronize"]
STEPS = 50


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host does with the device, in order: reads, waits and dispatches."""
    log: list[str] = []

    def record(owner: Any, name: str, event: str) -> None:
        if hasattr(owner, name):
            at_call(monkeypatch, owner, name, lambda *_, **options: log.append(event))

    for name in READS:
        record(mx.array, name, f"read by {name}")
    for name in WAITS:
        record(mx, name, f"wait by {name}")
    record(mx, "async_eval", "dispatch")
    return log


def _run(stories: Trained, events: list[str], **options: Any) -> list[list[str]]:
    """The events of each of 50 steps, from one first token of a step to the next step's."""
    # An engine of its own: what other tests have learned would change how often it drafts.
    engine = Engine(stories.model, stories.tokenizer, options.pop("drafter"))
    responses = engine.stream([1], max_tokens=400, **options)
    steps: list[list[str]] = []
    events.clear()
    for response in responses:
        if response.steps > len(steps):  # the first token of a step
            steps.append(list(events))
            events.clear()
        if len(steps) == STEPS + 1:
            break
    return steps[1:]  # the first holds the prompt


SAMPLING: dict[str, Any] = {"temp": 0.9, "seed": 1, "top_p": 0.9}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The next draft goes behind the verify in flight, and only then is the verify's outcome
        # read; the next verify is dispatched before the tokens are handed out.
        ({"beam_width": 4}, ["dispatch", "read by tolist", "dispatch"]),
        ({"beam_width": 4, **SAMPLING}, ["dispatch", "read by tolist", "dispatch"]),
        # The node count, the rest of the draft, the outcome, the next verify.
        ({"select": "beam"}, ["read by tolist", "dispatch", "read by tolist", "dispatch"]),
        # The token, and what tells of NaN beside it, which is there as well.
        ({"drafter": None}, ["dispatch", "read by tolist", "read by tolist"]),
        ({"drafter": None, **SAMPLING}, ["dispatch", "read by tolist", "read by tolist"]),
    ],
    ids=str,
)
def test_a_step_reads_its_outcome_while_the_device_has_work(stories, events, options, expected):
    steps = _run(stories, events, **{"drafter": stories.drafter, **options})
    assert steps == [expected] * STEPS


def test_a_step_that_chooses_its_drafts_reads_what_is_known_of_them_as_well(stories, events):
    steps = _run(stories, events, drafter=stories.drafter)
    assert len(steps) == STEPS
    for step in steps:
        # At most: what is known of two drafts, and a plain step's two.
        assert sum(event.startswith("read") for event in step) <= 4
        assert not any(event.startswith("wait") for event in step)
    # The outcome is read while the next draft is in flight. What is known of a draft is read when
    # it is there or, where its plan does not depend on it, in the next step beside the verify.
    read: list[list[str]] = [[], ["read by tolist"]]
    middle = ["dispatch", "read by tolist"]
    kinds = [[*one, *middle, *other, "dispatch"] for one in read for other in read]
    assert sum(steps.count(kind) for kind in kinds) > STEPS - 10


@pytest.mark.parametrize("options", [{}, {"temp": 0.9, "seed": 1}], ids=str)
@pytest.mark.parametrize("has_drafter", [False, True])
def test_a_batch_reads_what_is_dispatched_and_nothing_made_of_it(
    stories, monkeypatch, has_drafter, options
):
    """MLX would compute a part of an array behind all that is dispatched meanwhile."""
    graphs: list[str] = []

    def draw(values: mx.array) -> None:
        graph = io.StringIO()
        mx.export_to_dot(graph, values)
        graphs.append(graph.getvalue())

    for name in ("to_ints", "to_floats", "to_rows"):
        at_call(monkeypatch, passes, name, draw)
    shape = {"beam_width": 2, "tree_nodes": 4} if has_drafter else {}
    drafter = stories.drafter if has_drafter else None
    engine = Engine(stories.model, stories.tokenizer, drafter)
    for _ in engine.stream_batch([[1], [1, 7, 9]], max_tokens=8, **shape, **options):
        pass
    assert len(graphs) > 4
    assert not any("rectangle" in graph for graph in graphs), "an operation is left"
