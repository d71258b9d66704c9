"""Servers that several tests share. They need mlx-redrafter[server], which [test] includes."""

import logging
from collections.abc import Iterator

import pytest

from tests.helpers.calling import calling_engine
from tests.server.serving import UNLIMITED, Served, make_engine, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(make_engine()) as one:
        yield one


@pytest.fixture(scope="session")
def calling() -> Iterator[Served]:
    """A server whose model calls tools."""
    with serving(calling_engine(), defaults=UNLIMITED) as one:
        yield one


@pytest.fixture(autouse=True)
def _as_a_library() -> None:
    """Log as before the command line, which other tests run in this process, chose how to."""
    logger = logging.getLogger("mlx_redrafter")
    logger.setLevel(logging.NOTSET)
    logger.handlers = []
