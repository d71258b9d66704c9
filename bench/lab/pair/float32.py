"""A float32 copy of an exported target, which is what `mlx_redrafter.load()` computes with.

python float32.py target target-float32
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx


def main() -> None:
    source, copy = map(Path, sys.argv[1:])
    shutil.copytree(source, copy, dirs_exist_ok=True)
    weights = mx.load(str(source / "model.safetensors"))
    weights = {name: tensor.astype(mx.float32) for name, tensor in weights.items()}
    mx.save_safetensors(str(copy / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = "float32"
    (copy / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
