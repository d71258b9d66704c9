"""Texts and counts of every fixed shape with the bundled pair, as recorded beside this file.

`python -m tests.golden.record_fixed_shapes` writes the file anew. Recorded on 2026-11-22 by the
version before proposers were separated from decoding (5b03b25), on a Linux CPU.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from mlx_redrafter import load, stream_generate

FILE = Path(__file__).with_name("fixed_shapes.json")
PROMPTS = ("The old man opened the door and", '"I do not know," said the captain, "whether')
# Width, length, nodes of the tree, and how nodes are selected.
SHAPES: tuple[tuple[int, int, int | str, str], ...] = (
    (1, 2, 2, "top_n"), (1, 5, 5, "top_n"), (1, 8, 4, "top_n"), (2, 4, 7, "top_n"),
    (2, 8, 16, "top_n"), (3, 6, 16, "top_n"), (4, 5, 9, "top_n"), (8, 3, 17, "top_n"),
    (1, 4, "auto", "beam"), (3, 4, "auto", "beam"), (4, 5, "auto", "beam"),
    (4, 6, "auto", "beam"),
)  # fmt: skip
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temp": 0.8, "seed": 3},
    {"temp": 1.0, "seed": 4, "top_p": 0.9},
)
MAX_TOKENS = 64


load_once = cache(load)


def record(
    prompt: str, shape: tuple[int, int, int | str, str], sampling: dict[str, Any]
) -> list[Any]:
    """Return a digest of a text's tokens, and the counts of its steps."""
    model, tokenizer, drafter = load_once()
    width, length, nodes, select = shape
    plan = {"beam_width": width, "beam_length": length, "tree_nodes": nodes, "select": select}
    options = {"drafter": drafter, "max_tokens": MAX_TOKENS, **plan, **sampling}
    responses = list(stream_generate(model, tokenizer, prompt, **options))
    stats = responses[-1].stats
    tokens = json.dumps([response.token for response in responses])
    digest = hashlib.sha256(tokens.encode()).hexdigest()[:16]
    return [digest, stats.accepted_counts, stats.num_verified]


def main() -> None:
    rows = [
        {
            "shape": list(shape),
            "sampling": sampling,
            "found": [record(prompt, shape, sampling) for prompt in PROMPTS],
        }
        for shape in SHAPES
        for sampling in SAMPLINGS
    ]
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
