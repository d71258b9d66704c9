"""Training a drafter for one target, on the machine that will use it.

`train_drafter` trains from files to a drafter folder. The pieces, for a loop of your own:

    encoder = Encoder(tokenizer, sequence_length, target.vocab_size)   # texts to token sequences
    generator = TextGenerator(model, stop_tokens, seed)                # self-generated texts
    cache = TeacherCache(folder, {"target": fingerprint_weights(model)})
    fill_cache(cache, "train", target, sequences, k, on_tokens)        # one pass of the target
    student = new_student(target, NetworkOptions())
    student.initialise(compute_head_matrix(target), seed)
    order = BatchOrder(cache, "train", BatchOptions("soft", 5, 1024, seed))
    loss = draft_loss(student.logits(student.network, batch), batch, counts, LossOptions())
    simulate(student, shards, DraftPlan.of())                          # tokens/step, no target run
"""

from mlx_redrafter.training.batches import BatchOptions, BatchOrder
from mlx_redrafter.training.data import Encoder, TokenSequence
from mlx_redrafter.training.fingerprinting import fingerprint_weights
from mlx_redrafter.training.initial import compute_head_matrix
from mlx_redrafter.training.loss import TrainingBatch, draft_loss
from mlx_redrafter.training.reporter import Reporter
from mlx_redrafter.training.run import TrainingResult, train_drafter
from mlx_redrafter.training.self_generated import TextGenerator
from mlx_redrafter.training.simulated_decoding import simulate
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.students.student_kinds import new_student
from mlx_redrafter.training.teacher import fill_cache
from mlx_redrafter.training.teacher_cache import TeacherCache
from mlx_redrafter.training.training_request import (
    DataOptions,
    LossOptions,
    NetworkOptions,
    TrainingOptions,
    TrainingRequest,
)

__all__ = [
    "BatchOptions",
    "BatchOrder",
    "DataOptions",
    "Encoder",
    "LossOptions",
    "NetworkOptions",
    "Reporter",
    "Student",
    "TeacherCache",
    "TextGenerator",
    "TokenSequence",
    "TrainingBatch",
    "TrainingOptions",
    "TrainingRequest",
    "TrainingResult",
    "compute_head_matrix",
    "draft_loss",
    "fill_cache",
    "fingerprint_weights",
    "new_student",
    "simulate",
    "train_drafter",
]
