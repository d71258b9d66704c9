"""The host's time of a step: what it counts."""

from mlx_redrafter.bench.lab.host_time import COMMON, measure_steps
from mlx_redrafter.draft_plan import DraftPlan


def test_a_compiled_pass_lets_the_device_go_on_without_a_read() -> None:
    config = {**COMMON, "model_type": "llama", "num_hidden_layers": 1}
    plan = DraftPlan.of(1, 5, 5)
    found = [measure_steps(config, plan, compiled, 12) for compiled in (False, True)]
    assert [one.reads for one in found] == [1, 1]
    assert found[0].waiting > found[1].waiting == 0
