"""The texts by which the converter measures drafters, written once by the target of the tests."""

from collections.abc import Sequence
from typing import Any

import pytest

from mlx_redrafter.convert import selftest
from mlx_redrafter.proposers.fit import ReadSequence
from mlx_redrafter.target.target import Target

_TEXTS: dict[tuple[int, ...], list[ReadSequence]] = {}


@pytest.fixture
def texts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose targets are all stories260k: two seconds less for each conversion."""
    decode_all = selftest.decode_all

    def decode(target: Target, tokenizer: Any, layers: Sequence[int]) -> list[ReadSequence]:
        if (key := tuple(layers)) not in _TEXTS:
            _TEXTS[key] = decode_all(target, tokenizer, layers)
        return _TEXTS[key]

    monkeypatch.setattr(selftest, "decode_all", decode)
