"""What plots show is chosen from the results; that they are drawn is tested with their commands."""

from mlx_redrafter.bench.plots import _groups
from mlx_redrafter.bench.report import Row
from mlx_redrafter.bench.sweep import Point
from mlx_redrafter.bench.timing import estimate
from mlx_redrafter.draft_plan import DraftPlan


def point(width, length, nodes=None, select="top_n", speed=1.0, tokens=1.0, temp=0.0):
    row = Row("", estimate([speed]), None, None, tokens, [], None, 0, 0, 1)
    return Point(temp, DraftPlan.of(width, length, nodes, select), row)


def test_maps_have_all_shapes_of_one_number_of_nodes():
    points = [point(w, n, min(w * n, 9)) for w in (1, 2, 3) for n in (2, 3)]
    points += [point(2, 3, select="beam"), point(2, 3, 6, temp=0.5)]
    names = "best nodes, greedy", "merged beams, greedy", "best nodes, temperature 0.5"
    assert _sizes(points) == dict(zip(names, (6, 1, 1), strict=True))
    points = [point(4, 5, 8), point(4, 5, 16), point(4, 4, 8)]
    names = "best nodes, 8 nodes, greedy", "best nodes, 16 nodes, greedy"
    assert _sizes(points) == dict(zip(names, (2, 1), strict=True))


def _sizes(points):
    return {name: len(group) for name, group in _groups(points).items()}
