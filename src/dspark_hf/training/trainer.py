"""`DSparkTrainer`: Transformers' `Trainer` for a draft beside its frozen target.

The `Trainer` brings what a training run needs (schedules, accumulation, mixed precision, several processes, trackers,
progress bars, resume), and little of it minds that the loss comes from two models. What is different here:

- the model it trains and wraps is `TrainingStep`, and what it saves is the draft, so that every checkpoint loads with
  `DSparkDraftModel.from_pretrained` and can be tried out while training goes on;
- the target is not part of that model: it is neither trained, wrapped, nor saved, and runs without gradients;
- anchors come from (seed, step, row) rather than from a running generator, so a resumed run or another number of
  processes sees the same blocks;
- checkpoints appear whole or not at all (`checkpointing.py`).
"""

import copy
import os
import shutil
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..modeling_dspark import DSparkDraftModel
from . import checkpointing
from .data import ResponseRows, collate, row_uniforms
from .feature_cache import FeatureCache
from .features import TargetFeatures
from .muon import MuonAdamW
from .objective import LossSettings, metrics_from_sums
from .step import TrainingStep

_EVALUATION_STEP = 2**31  # evaluation draws the same anchors every time, and not those of a training step


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """`TrainingArguments` with what the objective needs.

    Args:
        num_anchors (`int`): blocks per row and step.
        ce_weight, l1_weight, confidence_weight (`float`): weights of the loss terms.
        loss_decay (`float`): slots over which a slot's weight falls by e; 0 weighs all alike.
        loss_chunk_size (`int`, *optional*): slots whose logits exist at once; chosen by memory if unset.
        muon (`bool`): Muon for the draft's matrices and AdamW for the rest (`muon.py`), in place of `optim`.
        feature_cache_bytes (`int`): memory for target features of rows seen before (`feature_cache.py`).
    """

    num_anchors: int = field(default=512, metadata={"help": "Blocks per row and step."})
    ce_weight: float = field(default=0.1, metadata={"help": "Weight of the cross entropy."})
    l1_weight: float = field(default=0.9, metadata={"help": "Weight of the L1 distance to the target."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence head's loss."})
    loss_decay: float = field(default=4.0, metadata={"help": "Slots over which a slot's weight falls by e."})
    loss_chunk_size: int | None = field(default=None, metadata={"help": "Slots whose logits exist at once."})
    muon: bool = field(default=False, metadata={"help": "Muon for the draft's matrices, AdamW for the rest."})
    feature_cache_bytes: int = field(default=0, metadata={"help": "Memory for target features of rows seen before."})

    def __post_init__(self):
        # Rows carry more than the step's own arguments, and every trained parameter takes part in every step.
        self.remove_unused_columns = False
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False
        super().__post_init__()

    @property
    def loss_settings(self) -> LossSettings:
        """The objective's weights."""
        return LossSettings(self.ce_weight, self.l1_weight, self.confidence_weight, self.loss_decay)


class DSparkTrainer(Trainer):
    """Trains a draft on rows of its target's own text.

    Args:
        draft (`DSparkDraftModel`): in float32; mixed precision is a matter of `args.bf16`.
        target (`PreTrainedModel`): on the device it shall run on; frozen here.
        args (`DSparkTrainingArguments`): as for `Trainer`.
        train_dataset, eval_dataset (`ResponseRows`): rows.
        callbacks (`list[TrainerCallback]`, *optional*): as for `Trainer`.

    Raises:
        ValueError: when draft, target and data do not fit together.
    """

    def __init__(
        self,
        draft: DSparkDraftModel,
        target: nn.Module,
        args: DSparkTrainingArguments,
        train_dataset: ResponseRows | None = None,
        eval_dataset: ResponseRows | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ):
        if draft.dtype != torch.float32:
            raise ValueError(f"The draft must be trained in float32, not {draft.dtype}: load it with dtype=float32.")
        draft.validate_target(target)
        if args.n_gpu > 1:
            # One process would split each batch over all GPUs in threads; the target is on one of them.
            args._n_gpu = 1
        features = TargetFeatures(target, draft.config.target_layer_ids, args.device)
        if any(rows is not None and rows.packing for rows in (train_dataset, eval_dataset)):
            features.check_packing()
        if args.feature_cache_bytes < 0:
            raise ValueError(f"`feature_cache_bytes` must not be negative, got {args.feature_cache_bytes}.")
        cache_bytes, vocabulary = args.feature_cache_bytes, draft.draft_to_target
        columns = features.head.columns(vocabulary) if cache_bytes and vocabulary is not None else None
        draft.train()
        step = TrainingStep(
            draft.to(args.device),
            draft.shared_weights(target),
            features.head,
            args.loss_settings,
            num_anchors=args.num_anchors,
            chunk_size=args.loss_chunk_size,
            target_columns=columns,
        )
        self.draft, self.features = draft, features
        self.cache = FeatureCache(features, cache_bytes, columns is not None) if cache_bytes else None
        self._sums: dict[str, dict[str, torch.Tensor]] = {"train": {}, "eval": {}}
        self._saving = False
        super().__init__(
            model=step,
            args=args,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
        )

    def create_optimizer(self, model=None):
        """As in `Trainer`, or `MuonAdamW`."""
        if not self.args.muon or self.optimizer is not None:
            return super().create_optimizer()
        args = self.args
        self.optimizer = MuonAdamW(
            self.draft, lr=args.learning_rate, beta2=args.adam_beta2, weight_decay=args.weight_decay
        )
        return self.optimizer

    # Loss -----------------------------------------------------------------------------------------------------------

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Features of the target without gradients, then the wrapped step."""
        inputs = dict(inputs)
        rows, length = inputs.pop("rows"), inputs["input_ids"].shape[1]
        number = self.state.global_step if model.training else _EVALUATION_STEP
        uniforms = row_uniforms(rows, length - 1, seed=self.args.seed, step=number)
        lengths, position_ids = inputs.pop("lengths").tolist(), inputs.get("position_ids")
        if self.cache is None:
            features = self.features(inputs["input_ids"], position_ids)
        else:
            keys = [(model.training, row) for row in rows.tolist()]
            features = self.cache(keys, inputs["input_ids"], inputs["loss_mask"], lengths, position_ids)
        names = ("context_hidden", "target_hidden", "normalisers")
        outputs = model(uniforms=uniforms.to(features[0].device), **dict(zip(names, features)), **inputs)
        loss = outputs.pop("loss")
        sums = self._sums["train" if model.training else "eval"]
        for name, value in outputs.items():
            sums[name] = sums[name] + value if name in sums else value
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Loss only; acceptance and confidence are summed on the side."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        """As in `Trainer`, with the draft's metrics added."""
        self._sums["eval"] = {}
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in self._drain("eval").items()})
        return output

    def log(self, logs, start_time=None):
        """As in `Trainer`, with the draft's metrics since the last log."""
        if "loss" in logs:
            logs |= self._drain("train")
        super().log(logs, start_time)

    def _drain(self, kind: str) -> dict[str, float]:
        """Metrics summed since the last call, over all processes."""
        sums, self._sums[kind] = self._sums[kind], {}
        if not sums:
            return {}
        names = sorted(sums)
        flat = torch.cat([sums[name].flatten() for name in names])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flat)
        parts = flat.cpu().split([sums[name].numel() for name in names])
        return metrics_from_sums({name: part.view(sums[name].shape) for name, part in zip(names, parts)})

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial):
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, checkpointing.INCOMPLETE) if self._saving else folder

    def _save_checkpoint(self, model, trial):
        folder, step = Path(self.args.output_dir), self.state.global_step
        name = f"checkpoint-{step}"
        written = folder / checkpointing.INCOMPLETE / name
        if self.args.should_save:
            shutil.rmtree(written.parent, ignore_errors=True)  # left by a run that was killed
        self.accelerator.wait_for_everyone()
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._finish_checkpoint(written, folder / name)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise checkpointing.write_failure(folder, step, error) from error
        finally:
            self._saving = False
        self.accelerator.wait_for_everyone()

    def _finish_checkpoint(self, written: Path, final: Path) -> None:
        if self.state.best_model_checkpoint == str(written):
            self.state.best_model_checkpoint = str(final)
            self.state.save_to_json(str(written / "trainer_state.json"))
        checkpointing.seal(written)
        checkpointing.publish(written, final)
        checkpointing.rotate(final.parent, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _save(self, output_dir=None, state_dict=None):
        if self.args.should_save:
            self.draft.save_pretrained(output_dir if output_dir is not None else self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        checkpointing.check(Path(resume_from_checkpoint))
        self._load_weights(resume_from_checkpoint)

    def _load_best_model(self):
        self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, folder) -> None:
        self.draft.load_state_dict(load_file(os.path.join(folder, "model.safetensors")), strict=True)


class TimeLimit(TrainerCallback):
    """Saves a checkpoint and stops once `minutes` have passed, for training in pieces."""

    def __init__(self, minutes: float):
        self.seconds, self.start, self.reached = 60.0 * minutes, None, False

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        late = torch.tensor(float(time.monotonic() - self.start > self.seconds), device=args.device)
        if dist.is_available() and dist.is_initialized():  # all processes must stop after the same step
            dist.all_reduce(late, dist.ReduceOp.MAX)
        if late.item() and state.global_step < state.max_steps:
            self.reached = control.should_save = control.should_training_stop = True


def export_draft(
    draft: DSparkDraftModel,
    folder: str | os.PathLike,
    *,
    dtype: torch.dtype,
    target: nn.Module,
    standalone: bool = False,
) -> None:
    """Writes a trained draft for use. Head rows of a reduced vocabulary that are the target's are left to the target.

    Args:
        draft (`DSparkDraftModel`): the draft; left as it is.
        folder (`str` or `os.PathLike`): where to.
        dtype (`torch.dtype`): of the weights.
        target (`PreTrainedModel`): what it was trained for.
        standalone (`bool`): store copies of the target's embedding and head, as engines that load a draft without its
            target expect. The folder then holds up to 2·V·H more numbers.

    Raises:
        OSError: when it cannot be written.
    """
    exported = copy.deepcopy(draft).to("cpu", dtype).eval()
    config = exported.config
    if not standalone and config.has_reduced_vocabulary and exported.lm_head is not None:
        rows = target.get_output_embeddings().weight.detach().to("cpu", dtype)[exported.draft_to_target]
        if torch.equal(rows, exported.lm_head.weight):
            exported.lm_head, config.stores_head = None, False
    if standalone:
        modules = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
        for name, module in modules.items():
            if getattr(exported, name) is None:
                weight = module.weight[: config.vocab_size].detach().to("cpu", dtype)
                kind = nn.Embedding if name == "embed_tokens" else partial(nn.Linear, bias=False)
                own = kind(1, 1)
                own.weight = nn.Parameter(weight)
                setattr(exported, name, own)
        config.stores_embedding = config.stores_head = True
    try:
        exported.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(f"the draft could not be written to {folder} ({error}).") from error


__all__ = ["DSparkTrainer", "DSparkTrainingArguments", "TimeLimit", "export_draft"]
