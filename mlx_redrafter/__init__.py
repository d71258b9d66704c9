"""Lossless speculative decoding with Recurrent Drafter for MLX language models.

from mlx_redrafter import load, generate, stream_generate

model, tokenizer, drafter = load()  # the bundled pair, or a model and a drafter by name
print(generate(model, tokenizer, "Once upon a time", drafter=drafter))

Rooms by floor: a module imports from its own room and from the floors below it, never in a circle.

    10  cli
    9  bench
    8  convert  server  training
    7  engine
    6  checkpoints  policy
    5  machines  proposers
    4  decoding  kernels
    3  target
    2  trees

Floor 1 consists of single files, which count as one room, the ground.

    1  backend  checkpoint_files  checks  destinations  device_read  draft_plan  errors
    1  generation_options  grammar  hub  interrupts  measured  memory_sizes  model_store
    1  thread_streams  training_options  version
"""

import os
import sys

if os.path.basename(sys.argv[0]) == "redrafter-mlx" or (
    sys.argv[0] == "-m" and "mlx_redrafter" in sys.orig_argv
):
    # Until the program handles Ctrl-C itself.
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from importlib import import_module
from typing import TYPE_CHECKING

from mlx_redrafter.backend import prepare
from mlx_redrafter.version import __version__

prepare()
# In a checkout some rooms are folders beside this one, as `setup.py` says.
if not os.path.isdir(os.path.join(__path__[0], "cli")):
    __path__.append(os.path.dirname(__path__[0]))

if TYPE_CHECKING:
    from mlx_redrafter.checkpoints.loading import load, load_drafter
    from mlx_redrafter.engine.conversation import Conversation
    from mlx_redrafter.engine.engine import Engine
    from mlx_redrafter.engine.generation import generate, generate_batch, stream_generate
    from mlx_redrafter.engine.responses import GenerationResponse
    from mlx_redrafter.errors import RedrafterError
    from mlx_redrafter.grammar import Grammar
    from mlx_redrafter.proposers.checkpoint import save_drafter
    from mlx_redrafter.proposers.draft_model import DraftModel
    from mlx_redrafter.proposers.lookup import Lookup
    from mlx_redrafter.proposers.redrafter.config import DrafterConfig
    from mlx_redrafter.proposers.redrafter.network import Drafter
    from mlx_redrafter.proposers.speculate_ahead import SpeculateAhead

# Modules of the public names, imported on first use: mlx-lm takes seconds to import, which would
# delay `redrafter-mlx --help`.
_HOMES = {
    "Conversation": "engine.conversation",
    "DraftModel": "proposers.draft_model",
    "Drafter": "proposers.redrafter.network",
    "DrafterConfig": "proposers.redrafter.config",
    "Engine": "engine.engine",
    "GenerationResponse": "engine.responses",
    "Grammar": "grammar",
    "Lookup": "proposers.lookup",
    "RedrafterError": "errors",
    "SpeculateAhead": "proposers.speculate_ahead",
    "generate": "engine.generation",
    "generate_batch": "engine.generation",
    "load": "checkpoints.loading",
    "load_drafter": "checkpoints.loading",
    "save_drafter": "proposers.checkpoint",
    "stream_generate": "engine.generation",
}

__all__ = [
    "Conversation",
    "DraftModel",
    "Drafter",
    "DrafterConfig",
    "Engine",
    "GenerationResponse",
    "Grammar",
    "Lookup",
    "RedrafterError",
    "SpeculateAhead",
    "__version__",
    "generate",
    "generate_batch",
    "load",
    "load_drafter",
    "save_drafter",
    "stream_generate",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
