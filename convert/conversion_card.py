"""The model card of a converted drafter, ``README.md`` in the format of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.mtp.network import MtpConfig
from mlx_redrafter.proposers.redrafter.config import DrafterConfig

_TEMPLATE = """---
library_name: mlx
tags:
- mlx
- redrafter
- speculative-decoding
{base_model}---

# {title}

{kind} {purpose}, converted from `{source}` for \
mlx_redrafter {version}. It makes the target's text appear faster; the text stays the target's.

    redrafter-mlx generate --model {target} --drafter PATH-OF-THIS-FOLDER --prompt "..."

| | |
|---|---|
{rows}

{notes}
The licence is that of `{source}`; read it there before you pass these weights on.
"""

Config = DrafterConfig | EagleConfig | MedusaConfig | MtpConfig
_KINDS: Mapping[type, str] = {
    DrafterConfig: "A [Recurrent Drafter](https://arxiv.org/abs/2403.09919)",
    EagleConfig: "An [EAGLE](https://arxiv.org/abs/2503.01840) head",
    MedusaConfig: "[Medusa](https://arxiv.org/abs/2401.10774) heads",
    MtpConfig: "An MTP module",
}


def render_conversion_card(
    title: str,
    config: Config,
    quantization: str,
    provenance: Mapping[str, Any],
) -> str:
    """Render the card as Markdown.

    Args:
        title: Name of the folder or the repository.
        config: The drafter's config.
        quantization: Format of the weights, such as "float16" or "4 bits, groups of 64".
        provenance: Provenance, as in ``config.json``.
    """
    target = provenance["target"]
    rows = {
        "hidden size of the target": config.hidden_size,
        "vocabulary": _describe_vocabulary(config),
        **_describe_network(config),
        "weights": quantization,
    }
    self_test = provenance["self_test"]
    if self_test is not None:
        rows["first drafts accepted"] = (
            f"{self_test['acceptance']:.1%} of {self_test['positions']} (greedy)"
        )
    return _TEMPLATE.format(
        base_model=f"base_model: {target}\n" if target and target.count("/") == 1 else "",
        title=title,
        kind=_KINDS[type(config)],
        purpose=f"for `{target}`" if target else "for the model it was trained with",
        source=provenance["source"],
        version=provenance["converter"].split()[-1],
        target=target or "MODEL",
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        notes="".join(f"- {note}\n" for note in provenance["notes"]),
    )


def _describe_network(config: Config) -> dict[str, str]:
    if isinstance(config, MedusaConfig):
        return {
            "heads, and residual blocks of each": f"{config.num_heads}, {config.num_layers}",
            "tree": config.tree,
        }
    if isinstance(config, EagleConfig):
        return {
            "kind": config.name,
            "width of the MLP, heads": f"{config.intermediate_size}, {config.num_attention_heads}",
        }
    if isinstance(config, MtpConfig):
        return {"type of the target": config.model_type}
    return {
        "width and residual blocks of the head": f"{config.exit_dim}, {config.num_draft_layers}",
        "state": f"RNN, {config.rnn_activation}" if config.rnn else "sum of embeddings",
    }


def _describe_vocabulary(config: Config) -> str:
    if config.draft_vocab_size is None:
        return str(config.vocab_size)
    return f"{config.draft_vocab_size} of {config.vocab_size} tokens"
