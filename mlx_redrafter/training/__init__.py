"""Training a drafter for one target, on the machine that will use it.

`train_drafter` is the whole way from files to a drafter folder. The pieces, for a loop of your own:

    encoder = Encoder(tokenizer, sequence_length, target.vocab_size)   # texts to token sequences
    writer = Writer(model, tokenizer, seed)                            # texts by the target itself
    cache = TeacherCache(folder, {"target": fingerprint(model)})
    fill_cache(cache, "train", target, sequences, k, on_tokens)        # one pass of the target
    order = BatchOrder(cache, "train", BatchOptions("soft", 5, 1024, seed))
    drafter = initial_drafter(config, head_matrix(target), seed)
    loss = unrolled_loss(drafter, target.embed, batch, counts, LossOptions())
    simulate(drafter, target.embed, shards, TreeShape())               # tokens/step without target
"""

from mlx_redrafter.training.batches import BatchOptions, BatchOrder, HeadRows
from mlx_redrafter.training.card import write_card
from mlx_redrafter.training.corpus import Corpus, build_corpus, divide
from mlx_redrafter.training.curves import write_csv, write_picture
from mlx_redrafter.training.data import Encoder, TokenSequence, read_items
from mlx_redrafter.training.files import load_json, save_json
from mlx_redrafter.training.fingerprinting import fingerprint
from mlx_redrafter.training.initial import (
    drafter_config,
    frequent_tokens,
    head_matrix,
    initial_drafter,
)
from mlx_redrafter.training.loss import Batch, unrolled_loss
from mlx_redrafter.training.options import (
    DataOptions,
    LossOptions,
    NetworkOptions,
    TrainingOptions,
)
from mlx_redrafter.training.resources import Estimate, check_resources, estimate
from mlx_redrafter.training.run import Reporter, Request, Result, train_drafter
from mlx_redrafter.training.self_generated import Writer
from mlx_redrafter.training.simulation import simulate
from mlx_redrafter.training.teacher import fill_cache, fill_rollouts
from mlx_redrafter.training.teacher_cache import Shard, TeacherCache
from mlx_redrafter.training.trainer import Lesson, Optimiser, Trainer

__all__ = [
    "Batch",
    "BatchOptions",
    "BatchOrder",
    "Corpus",
    "DataOptions",
    "Encoder",
    "Estimate",
    "HeadRows",
    "Lesson",
    "LossOptions",
    "NetworkOptions",
    "Optimiser",
    "Reporter",
    "Request",
    "Result",
    "Shard",
    "TeacherCache",
    "TokenSequence",
    "Trainer",
    "TrainingOptions",
    "Writer",
    "build_corpus",
    "check_resources",
    "divide",
    "drafter_config",
    "estimate",
    "fill_cache",
    "fill_rollouts",
    "fingerprint",
    "frequent_tokens",
    "head_matrix",
    "initial_drafter",
    "load_json",
    "read_items",
    "save_json",
    "simulate",
    "train_drafter",
    "unrolled_loss",
    "write_card",
    "write_csv",
    "write_picture",
]
