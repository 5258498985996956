"""`dspark-hf train`: train a draft for a target on the target's own responses.

A recipe file is this command's arguments, a line or several, with `#` comments: `dspark-hf train @recipe.args`.
Arguments after it override what it says. On several GPUs:

    accelerate launch --num_processes 8 -m dspark_hf.cli train @recipe.args
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from pathlib import Path

from .arguments import load_tokenizer
from .target import add_target_arguments, load_target

VOCABULARY_FILE = "draft_vocabulary.json"
RECORD_FILE = "training.json"


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "train",
        help="train a draft for a target",
        description="Train a draft for a target on the target's own responses (see `dspark-hf prepare`).",
        epilog="`@FILE` reads arguments from a recipe file.",
        fromfile_prefix_chars="@",
    )
    parser.convert_arg_line_to_args = lambda line: line.split("#")[0].split()
    add_target_arguments(parser)
    group = parser.add_argument_group("data and output")
    group.add_argument("--data", nargs="+", required=True, metavar="FILE", help="JSONL from `dspark-hf prepare`")
    group.add_argument("--eval-data", nargs="+", metavar="FILE", help="held-out JSONL to evaluate on")
    group.add_argument("--max-length", type=int, default=2048, metavar="N", help="tokens per row; default: 2048")
    group.add_argument("--packing", action="store_true", help="put several sequences into a row")
    group.add_argument("--output", required=True, metavar="FOLDER", help="for checkpoints and the finished draft")
    group.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output, if any")
    _add_draft_arguments(parser)
    _add_training_arguments(parser)
    parser.set_defaults(run=run)


def _add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("draft")
    group.add_argument("--draft", metavar="REPO|FOLDER", help="train this draft on, instead of making a new one")
    group.add_argument("--layers", type=int, default=5, metavar="N", help="draft layers; default: 5")
    group.add_argument("--taps", metavar="IDS", help="target layers to read, e.g. 1,9,17; default: five, spread evenly")
    group.add_argument("--block-size", type=int, default=7, metavar="N", help="tokens drafted per round; default: 7")
    group.add_argument(
        "--head", default="vanilla", choices=("vanilla", "gated", "rnn", "none"), help="Markov head; none: DFlash"
    )
    group.add_argument("--rank", type=int, default=256, metavar="R", help="of the Markov head; default: 256")
    group.add_argument("--no-confidence", action="store_true", help="without the confidence head")
    group.add_argument("--draft-vocab", type=int, metavar="N", help="reduced draft vocabulary; default: the target's")
    group.add_argument(
        "--draft-vocab-by",
        default="probability",
        choices=("probability", "count"),
        help="choose it by the target's summed probabilities (default) or by counting tokens",
    )
    group.add_argument(
        "--draft-vocab-tokens", type=int, default=100_000, metavar="N", help="response tokens to sum; default: 100000"
    )
    group.add_argument("--mask-token-id", type=int, metavar="ID", help="default: a token that is in no text")
    group.add_argument("--init", default="warm", choices=("warm", "random"), help="warm: from the target's own layers")
    group.add_argument("--source-layers", metavar="IDS", help="target layers to start from; default: the last ones")
    group.add_argument("--qk-norm", action="store_true", help="query/key norms, though the target has none")
    group.add_argument(
        "--standalone", action="store_true", help="store copies of embedding and head, for engines that need them"
    )
    group.add_argument("--save-dtype", choices=("float32", "bfloat16", "float16"), help="default: the target's")


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=float, default=6.0, metavar="N", help="default: 6")
    group.add_argument("--max-steps", type=int, default=-1, metavar="N", help="instead of --epochs")
    group.add_argument("--batch-size", type=int, default=4, metavar="N", help="rows per process and step; default: 4")
    group.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches per optimizer step; default: 1")
    group.add_argument("--anchors", type=int, default=512, metavar="N", help="blocks per row; default: 512")
    group.add_argument(
        "--optimizer", default="adamw", choices=("adamw", "muon"), help="muon: for the matrices; fewer steps needed"
    )
    group.add_argument("--lr", type=float, default=6e-4, help="default: 6e-4; small drafts like 2e-3")
    group.add_argument("--min-lr-ratio", type=float, default=0.0, metavar="X", help="where the cosine ends; default: 0")
    group.add_argument("--warmup", type=float, default=0.04, metavar="X", help="steps, or share of them; default: 0.04")
    group.add_argument("--weight-decay", type=float, default=0.0, metavar="X")
    group.add_argument("--beta2", type=float, default=0.95, metavar="X", help="of AdamW; default: 0.95")
    group.add_argument("--clip", type=float, default=1.0, metavar="X", help="largest gradient norm; default: 1")
    group.add_argument(
        "--precision", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: bf16 where the target is"
    )
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--workers", type=int, default=0, metavar="N", help="processes that make batches; default: 0")
    group.add_argument(
        "--feature-cache", type=float, default=0.0, metavar="GB", help="memory for the target's features; default: 0"
    )
    group.add_argument("--time-limit", type=float, metavar="MIN", help="save and stop after so many minutes")
    group = parser.add_argument_group("loss (defaults: the official recipe)")
    group.add_argument("--ce-weight", type=float, default=0.1, metavar="X")
    group.add_argument("--l1-weight", type=float, default=0.9, metavar="X")
    group.add_argument("--confidence-weight", type=float, default=1.0, metavar="X")
    group.add_argument("--loss-decay", type=float, default=4.0, metavar="SLOTS", help="0: all slots weigh the same")
    group.add_argument("--loss-chunk", type=int, metavar="N", help="slots whose logits exist at once")
    group = parser.add_argument_group("logs and checkpoints")
    group.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="default: 10")
    group.add_argument("--save-every", type=int, default=500, metavar="STEPS", help="default: 500")
    group.add_argument("--eval-every", type=int, metavar="STEPS", help="default: as --save-every")
    group.add_argument("--keep", type=int, default=2, metavar="N", help="checkpoints to keep; default: 2")
    group.add_argument("--report-to", nargs="*", default=[], metavar="TRACKER", help="e.g. tensorboard wandb trackio")


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from transformers import set_seed

    from ..training import DSparkTrainer, ResponseRows, TimeLimit, export_draft
    from ..training.checkpointing import checkpoint_to_resume, list_checkpoints

    started, output = time.time(), Path(args.output)
    if list_checkpoints(output) and not args.resume:
        raise ValueError(f"{output} holds checkpoints: add --resume to go on from them, or choose another --output")
    checkpoint = checkpoint_to_resume(output)
    target = load_target(args, "cpu")
    training = _training_arguments(args, target)
    target.to(training.device)
    set_seed(args.seed)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    options = {"vocab_size": vocab_size, "max_length": args.max_length, "seed": args.seed}
    rows = ResponseRows(args.data, packing=args.packing, **options)
    eval_rows = None if args.eval_data is None else ResponseRows(args.eval_data, **options)
    draft = _make_draft(args, target, rows, training, checkpoint)
    limit = None if args.time_limit is None else TimeLimit(args.time_limit)
    trainer = DSparkTrainer(draft, target, training, rows, eval_rows, callbacks=[limit] if limit else None)
    if training.should_save:
        print(_describe(draft, rows))
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if limit is not None and limit.reached:
        if training.should_save:
            print(f"Stopped by --time-limit after step {trainer.state.global_step}; go on with --resume.")
        return 0
    metrics = {} if eval_rows is None else trainer.evaluate()
    if training.should_save:
        dtype = _dtype(args.save_dtype or str(target.dtype).removeprefix("torch."))
        export_draft(draft, output, dtype=dtype, target=target, standalone=args.standalone)
        _write_record(output, args, trainer, metrics, started)
        print(f"The draft is in {output}.")
    return 0


def _training_arguments(args: argparse.Namespace, target):
    import torch

    from ..training import DSparkTrainingArguments

    bf16 = args.precision == "bfloat16" or (args.precision == "auto" and _short(target.dtype) == "bfloat16")
    eval_every = args.eval_every or args.save_every
    cosine = {"lr_scheduler_type": "cosine"}
    if args.min_lr_ratio:
        cosine = {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": args.min_lr_ratio},
        }
    return DSparkTrainingArguments(
        output_dir=args.output,
        num_train_epochs=args.epochs,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        num_anchors=args.anchors,
        learning_rate=args.lr,
        muon=args.optimizer == "muon",
        feature_cache_bytes=int(args.feature_cache * 1e9),
        warmup_steps=args.warmup,
        weight_decay=args.weight_decay,
        adam_beta2=args.beta2,
        max_grad_norm=args.clip,
        bf16=bf16,
        seed=args.seed,
        use_cpu=args.device == "cpu" or (args.device is None and not torch.accelerator.is_available()),
        dataloader_num_workers=args.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        ce_weight=args.ce_weight,
        l1_weight=args.l1_weight,
        confidence_weight=args.confidence_weight,
        loss_decay=args.loss_decay,
        loss_chunk_size=args.loss_chunk,
        logging_steps=args.log_every,
        save_steps=args.save_every,
        eval_strategy="no" if args.eval_data is None else "steps",
        eval_steps=None if args.eval_data is None else eval_every,
        save_total_limit=args.keep,
        report_to=args.report_to,
        disable_tqdm=not sys.stderr.isatty(),
        **cosine,
    )


def _make_draft(args: argparse.Namespace, target, rows, training, checkpoint: Path | None):
    """The draft to train, in float32: from a checkpoint, from another draft, or new."""
    import torch

    from .. import DSparkDraftModel
    from ..training import DraftOptions, choose_mask_token, new_draft, set_vocabulary

    if checkpoint is not None:
        draft = DSparkDraftModel.from_pretrained(checkpoint, dtype=torch.float32)
        if args.draft is None:
            _check_same_draft(args, draft.config, checkpoint)
        return draft
    if args.draft is not None:
        return DSparkDraftModel.from_pretrained(args.draft, dtype=torch.float32)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    mask_token_id = args.mask_token_id
    if mask_token_id is None:
        mask_token_id = choose_mask_token(vocab_size, load_tokenizer(args.model), rows.token_counts(vocab_size))
    options = DraftOptions(
        num_layers=args.layers,
        taps=_ids("--taps", args.taps),
        block_size=args.block_size,
        markov_rank=0 if args.head == "none" else args.rank,
        markov_head_type="vanilla" if args.head == "none" else args.head,
        confidence=not args.no_confidence,
        mask_token_id=mask_token_id,
        draft_vocab_size=args.draft_vocab,
        qk_norm=True if args.qk_norm else None,
        warm_start=args.init == "warm",
        source_layers=_ids("--source-layers", args.source_layers),
    )
    draft, notes = new_draft(target, options)
    if training.should_save:
        for note in notes:
            print(f"not taken over from the target: {note}")
    if draft.config.has_reduced_vocabulary:
        set_vocabulary(draft, target, _choose_vocabulary(args, draft, target, rows, training))
    return draft


def _check_same_draft(args: argparse.Namespace, config, checkpoint: Path) -> None:
    rank = 0 if args.head == "none" else args.rank
    wanted = {
        "--layers": (args.layers, config.num_hidden_layers),
        "--taps": (_ids("--taps", args.taps) or config.target_layer_ids, config.target_layer_ids),
        "--block-size": (args.block_size, config.block_size),
        "--head": (args.head, config.markov_head_type if config.markov_rank else "none"),
        "--rank": (rank, config.markov_rank),
        "--no-confidence": (not args.no_confidence, config.enable_confidence_head),
        "--draft-vocab": (args.draft_vocab or config.vocab_size, config.draft_vocab_size),
    }
    changed = [name for name, (now, before) in wanted.items() if now != before]
    if changed:
        raise ValueError(f"{checkpoint} holds a draft made with other {', '.join(changed)}; resume with the same ones")


def _choose_vocabulary(args: argparse.Namespace, draft, target, rows, training):
    """Target ids of the reduced vocabulary: chosen by the main process, read by the others."""
    import torch

    from ..training import TargetFeatures, choose_vocabulary, coverage, soft_counts

    path = Path(args.output) / VOCABULARY_FILE
    with training.main_process_first(desc="choosing the draft vocabulary"):
        if training.process_index == 0:
            if args.draft_vocab_by == "count":
                counts = rows.token_counts(draft.config.vocab_size)
            else:
                features = TargetFeatures(target, draft.config.target_layer_ids, training.device)
                counts = soft_counts(
                    rows,
                    features,
                    max_tokens=args.draft_vocab_tokens,
                    batch_size=args.batch_size,
                    progress=sys.stderr.isatty(),
                )
            stop = draft.config.eos_token_id
            stop = stop if isinstance(stop, list) else [stop] if stop is not None else []
            token_ids = choose_vocabulary(counts, draft.config.draft_vocab_size, stop)
            share = coverage(counts, token_ids)
            print(f"{len(token_ids)} draft tokens hold {100 * share:.1f} % of the target's text.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"by": args.draft_vocab_by, "share": share, "token_ids": token_ids.tolist()}))
    return torch.tensor(json.loads(path.read_text())["token_ids"])


def _describe(draft, rows) -> str:
    config, parameters = draft.config, sum(p.numel() for p in draft.parameters() if p.requires_grad)
    head = "no Markov head"
    if config.markov_rank:
        head = f"{config.markov_head_type} Markov head of rank {config.markov_rank}"
    return (
        f"Draft: {config.num_hidden_layers} layers on taps {config.target_layer_ids}, blocks of {config.block_size}, "
        f"{head}, {'a' if config.enable_confidence_head else 'no'} confidence head, {config.draft_vocab_size} of "
        f"{config.vocab_size} tokens, mask token {config.mask_token_id}; {parameters / 1e6:.2f} M trained parameters.\n"
        f"Data: {rows.num_sequences} sequences in {len(rows)} rows, {rows.num_tokens} tokens, "
        f"{rows.num_response_tokens} of them responses; {rows.dropped} sequences too long or without a response."
    )


def _write_record(output: Path, args: argparse.Namespace, trainer, metrics: dict, started: float) -> None:
    """What the draft was made with, beside it: for model cards and for doing it again."""
    import torch
    import transformers

    data = {str(file): hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in args.data}
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    record = {
        "arguments": {name: value for name, value in vars(args).items() if name not in ("run", "command")},
        "data_sha256": data,
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "processes": trainer.args.world_size,
        "device": torch.cuda.get_device_name() if trainer.args.device.type == "cuda" else platform.processor() or "cpu",
        "seconds_of_last_run": round(time.time() - started, 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "last_log": losses[-1] if losses else {},
        "evaluation": metrics,
    }
    earlier = None if args.draft is None else Path(args.draft) / RECORD_FILE
    if earlier is not None and earlier.is_file():
        record["continues"] = json.loads(earlier.read_text(encoding="utf-8"))
    (output / RECORD_FILE).write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")


def _ids(name: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: expected numbers between commas, got {text!r}") from None


def _dtype(name: str):
    import torch

    return getattr(torch, name)


def _short(dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["add_parser", "run"]
