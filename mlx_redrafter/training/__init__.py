"""Training a drafter for one target, on the machine that will use it.

`train_drafter` trains from files to a drafter folder. A loop of your own needs an `Encoder`, a
`TeacherCache` with the target's outputs on texts that a `Teacher` reads or a `TextGenerator`
generates, a student (`new_student`), batches (`BatchOrder`) and `draft_loss`; `simulate` measures
tokens per step.
"""

from mlx_redrafter.training.batches import BatchOptions, BatchOrder
from mlx_redrafter.training.data import Encoder, TokenSequence
from mlx_redrafter.training.files import fingerprint_weights
from mlx_redrafter.training.initial import compute_head_matrix
from mlx_redrafter.training.loss import TrainingBatch, draft_loss
from mlx_redrafter.training.run import TrainingResult, train_drafter
from mlx_redrafter.training.self_generated import TextGenerator
from mlx_redrafter.training.students.student import Student, simulate
from mlx_redrafter.training.students.student_kinds import new_student
from mlx_redrafter.training.teacher import Teacher
from mlx_redrafter.training.teacher_cache import TeacherCache
from mlx_redrafter.training.training_request import Reporter, TrainingRequest
from mlx_redrafter.training_options import DataOptions, NetworkOptions, TrainingOptions

__all__ = [
    "BatchOptions",
    "BatchOrder",
    "DataOptions",
    "Encoder",
    "NetworkOptions",
    "Reporter",
    "Student",
    "Teacher",
    "TeacherCache",
    "TextGenerator",
    "TokenSequence",
    "TrainingBatch",
    "TrainingOptions",
    "TrainingRequest",
    "TrainingResult",
    "compute_head_matrix",
    "draft_loss",
    "fingerprint_weights",
    "new_student",
    "simulate",
    "train_drafter",
]
