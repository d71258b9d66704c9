"""Training a drafter for one target, on the machine that will use it.

`train_drafter` is the whole way from files to a drafter folder. The pieces, for a loop of your own:

    encoder = Encoder(tokenizer, sequence_length, target.vocab_size)   # texts to token sequences
    generator = TextGenerator(model, stop_tokens, seed)                # texts by the target itself
    cache = TeacherCache(folder, {"target": fingerprint_weights(model)})
    fill_cache(cache, "train", target, sequences, k, on_tokens)        # one pass of the target
    order = BatchOrder(cache, "train", BatchOptions("soft", 5, 1024, seed))
    config = choose_drafter_config(target, NetworkOptions())
    drafter = initialise_drafter(config, compute_head_matrix(target), seed)
    student = RecurrentStudent(drafter, target.embed)                  # or new_student(...)
    loss = draft_loss(student.logits(drafter, batch), batch, counts, LossOptions())
    simulate(student, shards, DraftPlan.of())                          # tokens/step, no target run
"""

from mlx_redrafter.training.batches import BatchOptions, BatchOrder, HeadRows
from mlx_redrafter.training.corpus import Corpus, build_corpus, divide
from mlx_redrafter.training.curves import write_csv, write_picture
from mlx_redrafter.training.data import Encoder, TokenSequence, read_items
from mlx_redrafter.training.files import load_json, save_json
from mlx_redrafter.training.fingerprinting import fingerprint_weights
from mlx_redrafter.training.initial import (
    choose_drafter_config,
    compute_head_matrix,
    initialise_drafter,
    select_frequent_tokens,
)
from mlx_redrafter.training.loss import Batch, draft_loss
from mlx_redrafter.training.reporter import Reporter
from mlx_redrafter.training.request import TrainingRequest
from mlx_redrafter.training.resources import Estimate, check_resources, estimate
from mlx_redrafter.training.run import TrainingResult, train_drafter
from mlx_redrafter.training.self_generated import TextGenerator
from mlx_redrafter.training.simulation import simulate
from mlx_redrafter.training.students.recurrent_student import RecurrentStudent
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.students.student_kinds import new_student
from mlx_redrafter.training.teacher import fill_cache, fill_rollouts, fill_states
from mlx_redrafter.training.teacher_cache import Shard, TeacherCache
from mlx_redrafter.training.trainer import Optimiser, Trainer, TrainingTask
from mlx_redrafter.training.training_card import write_training_card
from mlx_redrafter.training.training_options import (
    DataOptions,
    LossOptions,
    NetworkOptions,
    TrainingOptions,
)

__all__ = [
    "Batch",
    "BatchOptions",
    "BatchOrder",
    "Corpus",
    "DataOptions",
    "Encoder",
    "Estimate",
    "HeadRows",
    "LossOptions",
    "NetworkOptions",
    "Optimiser",
    "RecurrentStudent",
    "Reporter",
    "Shard",
    "Student",
    "TeacherCache",
    "TextGenerator",
    "TokenSequence",
    "Trainer",
    "TrainingOptions",
    "TrainingRequest",
    "TrainingResult",
    "TrainingTask",
    "build_corpus",
    "check_resources",
    "choose_drafter_config",
    "compute_head_matrix",
    "divide",
    "draft_loss",
    "estimate",
    "fill_cache",
    "fill_rollouts",
    "fill_states",
    "fingerprint_weights",
    "initialise_drafter",
    "load_json",
    "new_student",
    "read_items",
    "save_json",
    "select_frequent_tokens",
    "simulate",
    "train_drafter",
    "write_csv",
    "write_picture",
    "write_training_card",
]
