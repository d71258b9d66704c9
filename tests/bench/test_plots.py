"""What plots show is chosen from the results; that they are drawn is tested with their commands."""

from mlx_redrafter.bench.plots import _groups
from mlx_redrafter.bench.report import Row
from mlx_redrafter.bench.sweep import Point
from mlx_redrafter.bench.timing import estimate
from mlx_redrafter.draft_plan import DraftPlan


def point(width, length, nodes=None, select="top_n", speed=1.0, tokens=1.0, temp=0.0):
    row = Row("", estimate([speed]), None, None, tokens, [], None, 0, 0, 1)
    return Point(temp, DraftPlan.of(width, length, nodes, select), row)


def test_one_map_has_all_widths_and_lengths():
    points = [point(w, n, min(w * n, 9)) for w in (1, 2, 3) for n in (2, 3)]
    points += [point(2, 3, select="beam"), point(2, 3, 6, temp=0.5)]
    assert {name: len(group) for name, group in _groups(points).items()} == {
        "best nodes, greedy": 6,
        "merged beams, greedy": 1,
        "best nodes, temperature 0.5": 1,
    }


def test_numbers_of_nodes_have_maps_of_their_own():
    points = [point(4, 5, 8), point(4, 5, 16), point(4, 4, 8)]
    assert {name: len(group) for name, group in _groups(points).items()} == {
        "best nodes, 8 nodes, greedy": 2,
        "best nodes, 16 nodes, greedy": 1,
    }
