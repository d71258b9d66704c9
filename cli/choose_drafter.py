"""Choice of the drafter for ``--drafter auto``, and for a model without ``--drafter``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mlx_redrafter.cli.names import confirm
from mlx_redrafter.cli.progress import note
from mlx_redrafter.errors import RedrafterError

if TYPE_CHECKING:
    from mlx_redrafter.checkpoints.drafter_search import DrafterSearch, FoundDrafter
    from mlx_redrafter.hub import Repository

# Word for the drafter that this module chooses.
AUTO = "auto"
# Word for prompt lookup, which needs no files.
LOOKUP = "lookup"


def choose_drafter(model: str, drafter: str | None, yes: bool) -> str:
    """Choose a drafter for a model, print the choice to stderr, and return its name or folder.

    Without ``--drafter`` it must be on this machine and made for the model. ``auto`` also offers a
    published one, which ``yes`` downloads without a question, and a smaller model with the same
    tokens. Last comes a copy of the model in fewer bits, if that is predicted to pay.
    """
    from mlx_redrafter.checkpoints.drafter_search import DrafterSearch, is_auto

    is_auto(drafter)
    search = DrafterSearch.of(model)
    found = search.stored()
    if found is None and drafter == AUTO:
        found = _offer(search, yes) or search.draft_model() or _copy(search)
    if found is not None:
        note(f"drafter: {found.name} ({found.method}; {found.reason})")
        return found.option
    hint = "" if drafter == AUTO else "; --drafter auto also looks for published ones"
    note(f"drafter: prompt lookup; none on this machine is made for {model}{hint}")
    return LOOKUP


def _offer(search: DrafterSearch, yes: bool) -> FoundDrafter | None:
    """Offer a published drafter, and download it if the user agrees."""
    from mlx_redrafter.hub import download
    from mlx_redrafter.proposers.checkpoint import PATTERNS

    try:
        offer = search.published()
        for reason in search.reasons:
            note(f"not used: {reason}")
        if offer is None or not _agrees(*offer, yes):
            return None
        found, repository = offer
        download(repository, PATTERNS)
        return found
    except RedrafterError as error:
        note(f"not used: {error}")
        return None


def _copy(search: DrafterSearch) -> FoundDrafter | None:
    from mlx_redrafter.bench.machine import this_chip
    from mlx_redrafter.bench.smaller_copy import find_copy

    chip = this_chip()
    return None if chip is None else find_copy(search, chip)


def _agrees(found: FoundDrafter, repository: Repository, yes: bool) -> bool:
    from mlx_redrafter.checkpoints.drafter_search import describe_offer

    text = describe_offer(found, repository)
    if yes:
        note(f"downloading {text}")
        return True
    if sys.stdin.isatty() and sys.stderr.isatty():
        return confirm(f"Download {text}?")
    note(f"--yes would download {text}")
    return False
