"""Model cards: facts from those of others, and the text of those that this package writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.repocard import metadata_load

from mlx_redrafter.checkpoint_files import MAX_JSON_BYTES

CARD_FILE = "README.md"


class Card(NamedTuple):
    """Facts from a model card: the models that it says this one is made from, or for.

    ``is_quantised`` is whether the card says that this is a quantised copy of its base model.
    """

    base_models: tuple[str, ...] = ()
    is_quantised: bool = False


def read_card(folder: Path) -> Card:
    """Read the card in a folder; a card that is missing or damaged states nothing."""
    path = folder / CARD_FILE
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return Card()
    try:
        values = metadata_load(path) or {}
    except Exception:  # YAML from others may raise anything
        return Card()
    bases = values.get("base_model")
    bases = bases if isinstance(bases, list) else [bases]
    named = tuple(base for base in bases if isinstance(base, str))
    return Card(named, values.get("base_model_relation") == "quantized")


def render_card(
    title: str, target: str | None, summary: str, rows: Mapping[str, object], rest: str
) -> str:
    """Render the card of a drafter in the hub's format, as Markdown.

    ``summary`` is the first paragraph, ``rows`` are the table of facts, and ``rest`` follows the
    table. ``target`` is None if it is unknown.
    """
    # Only a repository's name leads to another card.
    base_model = f"base_model: {target}\n" if target and target.count("/") == 1 else ""
    facts = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    command = f"redrafter-mlx generate --model {target or 'MODEL'} --drafter FOLDER --prompt"
    return (
        "---\nlibrary_name: mlx\ntags: [mlx, speculative-decoding, redrafter]\n"
        f'{base_model}---\n\n# {title}\n\n{summary}\n\n    {command} "..."\n\n'
        f"| | |\n|---|---|\n{facts}\n\n{rest}"
    )
