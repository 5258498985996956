"""`dspark-hf calibrate`: make a draft's confidences mean what they say, on prompts like those it will see."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from ..calibration_run import calibrate, describe, is_native, record_confidence, save_calibration
from . import arguments
from .profile import add_positional_pair, load_positional_pair


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "calibrate",
        help="fit the confidences of a draft to what its target accepts",
        description="Decode prompts with every drafted token verified, compare the draft's confidences with what was "
        "accepted, fit a temperature (and a shift, where it helps) per slot, and save them with the draft.",
    )
    add_positional_pair(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="JSONL with `prompt` (text), `messages` (a chat) or `prompt_ids` in each row, or .txt with one a line",
    )
    group.add_argument("--limit", type=int, metavar="N", help="use the first N prompts")
    group.add_argument("--no-chat", action="store_true", help="do not apply the tokenizer's chat template")
    group.add_argument("--held-out", type=float, default=0.5, metavar="SHARE", help="prompts to judge on; default: 0.5")
    group = parser.add_argument_group("decoding (greedy unless a sampling flag is given; as the draft will be used)")
    group.add_argument("--batch-size", type=int, default=8, metavar="R", help="prompts at once; default: 8")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    group.add_argument("--sample", action="store_true", help="draw from the target's distribution")
    group.add_argument("--temperature", type=float, metavar="T")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--seed", type=int, default=0, help="of sampling and of the split; default: 0")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to save the calibrated draft; default: in its own folder, if that is this package's layout",
    )
    group.add_argument("--no-save", action="store_true", help="only report")
    group.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="write calibration.json and reliability.png (needs matplotlib) there; default: where the draft is saved",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    if args.batch_size < 1 or not 0.0 < args.held_out < 1.0:
        raise ValueError("--batch-size must be at least 1 and --held-out lie between 0 and 1.")
    folder = None if args.no_save else (args.output or Path(args.draft))
    if folder is not None and args.output is None and not is_native(folder):
        raise ValueError(
            f"{args.draft} is not a folder in this package's layout, so the calibration cannot be saved there: "
            "name a folder with --output, or use --no-save."
        )
    pair = load_positional_pair(args)
    prompts = read_prompts(args, pair)
    torch.manual_seed(args.seed)
    with tqdm(total=len(prompts), unit="prompt", file=sys.stderr, disable=None) as bar:
        record = record_confidence(
            pair.model,
            pair.draft,
            batches(prompts, args.batch_size, pair),
            progress=bar.update,
            **arguments.generation_settings(args),
        )
    slots = pair.draft.config.num_draft_tokens
    result = calibrate(record, slots, held_out=args.held_out, seed=args.seed)
    print(describe(result))
    if folder is not None:
        save_calibration(pair.draft, result, folder)
        print(f"calibration saved with the draft in {folder}")
    report = args.report or folder
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
        content = {"setting": setting(args, pair, len(prompts)), **result.to_dict()}
        (report / "calibration.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"report: {', '.join(['calibration.json', *draw(result, report / 'reliability.png')])} in {report}")
    return 0


def read_prompts(args: argparse.Namespace, pair: arguments.Pair) -> list[list[int]]:
    """Token ids of every prompt."""
    from ..training.prepare import read_prompts as read_rows
    from ..training.prepare import tokenize_prompts

    if Path(args.prompts).suffix == ".txt":
        text = Path(args.prompts).read_text(encoding="utf-8")
        rows: Any = [{"prompt": line} for line in text.split("\n") if line.strip()]
    else:
        rows = read_rows(args.prompts)
    found = tokenize_prompts(rows, pair.tokenizer, chat=not args.no_chat, limit=args.limit)
    return [prompt.ids for prompt in found]


def batches(prompts: list[list[int]], rows: int, pair: arguments.Pair) -> Iterator[dict[str, torch.Tensor]]:
    """Left-padded batches of `rows` prompts, those of similar length together."""
    pad = pair.model.generation_config.pad_token_id
    pad = pad if isinstance(pad, int) else getattr(pair.tokenizer, "pad_token_id", None) or 0
    by_length = sorted(prompts, key=len)
    for start in range(0, len(by_length), rows):
        chosen = by_length[start : start + rows]
        width = max(map(len, chosen))
        ids = [[pad] * (width - len(prompt)) + prompt for prompt in chosen]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in chosen]
        yield {
            "input_ids": torch.tensor(ids, device=pair.model.device),
            "attention_mask": torch.tensor(mask, device=pair.model.device),
        }


def setting(args: argparse.Namespace, pair: arguments.Pair, prompts: int) -> dict[str, Any]:
    """How the numbers were made."""
    return {
        "target": Path(args.model).name,
        "draft": Path(args.draft).name,
        "prompts": f"{prompts} of {Path(args.prompts).name}",
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "device": pair.model.device.type,
        "seed": args.seed,
        **arguments.generation_settings(args),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def draw(result, path: Path) -> list[str]:
    """The reliability diagram's file name in a list, which is empty where matplotlib is missing."""
    from ..plots import plot_reliability

    try:
        return [plot_reliability(result, path).name]
    except ImportError as error:
        print(f"no reliability diagram: {error}", file=sys.stderr)
        return []


__all__ = ["add_parser", "run"]
