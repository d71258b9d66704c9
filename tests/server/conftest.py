"""A server that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.cli import cli  # noqa: F401  (a fixture)
from tests.server.serving import Served, make_engine, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(make_engine()) as one:
        yield one
