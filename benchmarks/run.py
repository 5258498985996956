"""The whole benchmark on this machine, and the pages written from it: what `make bench` does.

    python benchmarks/run.py                 # under half an hour on one CPU core
    python benchmarks/run.py --quick         # about ten minutes
    python benchmarks/run.py --parts bench   # only the side-by-side part

The model and the draft of the demo, or another pair; every way to decode on the same prompts (`dspark-hf bench`), a
free draft that is always right (what the loop alone costs), and how costs grow (`scaling.py`). The runs are stored in
`benchmarks/results/`, from which `report.py` writes the README's table and docs/measured.md. Leave the machine alone
meanwhile: other work shows in the figures, and the load is stored with them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import free_draft
import report
import scaling

from dspark_hf.cli import main as dspark_hf

ROOT = Path(__file__).resolve().parent.parent
DRAFT = ROOT / "checkpoints" / "smollm2-135m-instruct-dspark"
PROMPTS = ROOT / "benchmarks" / "prompts.jsonl"
PARTS = ("bench", "free_draft", "scaling")
# Prompts of each domain, new tokens: what fits into half an hour on one core with a model of 135 M parameters.
LIMIT, TOKENS = 4, 96
FREE_SOURCES = 3  # the free draft answers one prompt of so many sources: what it shows depends on no prompt


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", metavar="REPO|FOLDER", help="default: SmolLM2-135M-Instruct, fetched once")
    parser.add_argument("--draft", metavar="REPO|FOLDER", help=f"default: {DRAFT.relative_to(ROOT)}")
    parser.add_argument(
        "--prompts", type=Path, default=PROMPTS, metavar="FILE", help="default: benchmarks/prompts.jsonl"
    )
    parser.add_argument("--domains", nargs="+", metavar="NAME", help="as in dspark-hf bench")
    parser.add_argument("--dflash", metavar="REPO|FOLDER", help="rank-0 draft for Transformers' DFlash generator")
    parser.add_argument("--assistant", metavar="REPO|FOLDER", help="small model for Transformers' assisted generation")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--limit", type=int, metavar="N", help=f"prompts of each domain; default: {LIMIT}, quick 4")
    parser.add_argument("--rows", nargs="+", type=int, metavar="R", help="batch sizes; default: 1 4 8")
    parser.add_argument("--draft-lengths", nargs="+", type=int, metavar="N", help="constant; default: the block size")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help=f"default: {TOKENS}, quick 64")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads; default: 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="default: all")
    parser.add_argument("--results", type=Path, default=report.RESULTS, metavar="FOLDER", help="where runs are stored")
    parser.add_argument("--no-report", action="store_true", help="leave README and docs as they are")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    began = time.monotonic()
    if args.draft is None and not DRAFT.is_dir() and {"bench", "free_draft"} & set(args.parts):
        print(f"there is no draft in {DRAFT.relative_to(ROOT)}: name one with --draft", file=sys.stderr)
        return 1
    args.draft = args.draft or str(DRAFT)
    if args.target is None and args.parts != ["scaling"]:
        from dspark_hf.demo import smollm2_folder

        args.target = str(smollm2_folder())
    for part in args.parts:
        print(f"\n== {part}, {time.monotonic() - began:.0f} s from the start", flush=True)
        if status := {"bench": run_bench, "free_draft": run_free_draft, "scaling": run_scaling}[part](args):
            return status
    print(f"\nmeasured in {time.monotonic() - began:.0f} s")
    return 0 if args.no_report else report.main(["--results", str(args.results)])


def run_bench(args: argparse.Namespace) -> int:
    flags = ["bench", args.target, args.draft, "--prompts", str(args.prompts), "--dtype", args.dtype]
    flags += ["--threads", str(args.threads), "--seed", str(args.seed), "--repeats", str(args.repeats)]
    flags += ["--output", str(args.results / "bench.json")]
    flags += ["--quick"] if args.quick else []
    limits = {"limit": LIMIT, "max_new_tokens": TOKENS}
    for name in ("limit", "max_new_tokens", "rows", "domains", "draft_lengths", "dflash", "assistant"):
        value = getattr(args, name) or (None if args.quick else limits.get(name))
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return dspark_hf(flags)


def run_free_draft(args: argparse.Namespace) -> int:
    sources = dict.fromkeys(json.loads(line).get("source", "-") for line in args.prompts.open(encoding="utf-8"))
    flags = ["--target", args.target, "--draft", args.draft, "--prompts", str(args.prompts), "--limit", "1"]
    flags += ["--source", *list(sources)[:FREE_SOURCES]]
    flags += ["--dtype", args.dtype, "--threads", str(args.threads), "--repeats", str(1 if args.quick else 3)]
    free_draft.main([*flags, "--max-new-tokens", "64", "--output", str(args.results / "free_draft.json")])
    return 0


def run_scaling(args: argparse.Namespace) -> int:
    flags = ["--threads", str(args.threads), "--seed", str(args.seed), "--repeats", str(2 if args.quick else 3)]
    scaling.main([*flags, "--dtype", args.dtype, "--output", str(args.results / "scaling.json")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
