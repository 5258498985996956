"""Training a draft for a target: data, objective, trainer.

    from dspark_hf.training import DraftOptions, DSparkTrainer, DSparkTrainingArguments, ResponseRows, new_draft

`dspark-hf prepare` and `dspark-hf train` are made of these. Nothing here is needed to use a draft.
"""

from .data import ResponseRows
from .features import TargetFeatures, TargetHead
from .initialise import DraftOptions, choose_mask_token, default_taps, new_draft, set_vocabulary
from .objective import LossSettings
from .step import TrainingStep
from .trainer import DSparkTrainer, DSparkTrainingArguments, TimeLimit, export_draft
from .vocabulary import choose_vocabulary, coverage, soft_counts

__all__ = [
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "DraftOptions",
    "LossSettings",
    "ResponseRows",
    "TargetFeatures",
    "TargetHead",
    "TimeLimit",
    "TrainingStep",
    "choose_mask_token",
    "choose_vocabulary",
    "coverage",
    "default_taps",
    "export_draft",
    "new_draft",
    "set_vocabulary",
    "soft_counts",
]
