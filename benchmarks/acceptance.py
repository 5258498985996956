"""How much of a draft's blocks is accepted, for each source of prompts, greedy and sampled.

    python benchmarks/acceptance.py --target TARGET --draft DRAFT --prompts prompts.jsonl --output acceptance.json

Whole blocks are verified ("tau" is tokens a row and round, bonus included). Nothing here depends on the clock. Further
drafts for the same target are measured beside the first with `--beside`, for instance one without a Markov head that
was trained in the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from load import add_pair_arguments, new_report
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel
from dspark_hf.benchmarking.machine import model_name, print_table, save_json
from dspark_hf.benchmarking.prompts import make_batches, read_prompts
from dspark_hf.benchmarking.runner import Measurement, Runner, Setting, total_stats


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_pair_arguments(parser)
    parser.set_defaults(max_new_tokens=128)
    parser.add_argument("--beside", nargs="*", default=[], metavar="REPO|FOLDER", help="other drafts for the target")
    parser.add_argument("--sources", nargs="+", default=[], metavar="NAME", help="default: all that the file has")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="prompts of each source; default: 10")
    parser.add_argument("--rows", type=int, default=10, metavar="R", help="prompts of a batch; default: 10")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], metavar="T", help="0: greedy")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(args.device).eval()
    prompts = read_prompts(
        args.prompts, lambda: AutoTokenizer.from_pretrained(args.target), sources=args.sources, limit=args.limit
    )
    pad = target.generation_config.pad_token_id or 0
    parts = [
        (source, ids[start : start + args.rows])
        for source, ids in prompts.items()
        for start in range(0, len(ids), args.rows)
    ]
    batches = [batch for source, ids in parts for batch in make_batches({source: ids}, len(ids), pad)]
    report = new_report("acceptance", args)
    del report["arguments"]["beside"]  # places
    report["results"] = []
    for place in (args.draft, *args.beside):
        draft = DSparkDraftModel.from_pretrained(place, dtype=target.dtype).to(args.device).eval()
        for temperature in args.temperatures:
            found = measure(args, target, draft, batches, temperature)
            report["results"] += [{"draft": model_name(place), "temperature": temperature, **row} for row in found]
    print_results(report["results"])
    if args.output is not None:
        save_json(args.output, report)


def measure(args, target, draft: DSparkDraftModel, batches: list, temperature: float) -> list[dict[str, Any]]:
    """Tau and acceptance by position of every source, and of all rounds together."""
    sampling = {"temperature": temperature or None, "top_k": None, "top_p": None}
    runner = Runner(argparse.Namespace(**{**vars(args), **sampling}), target, draft)
    setting = Setting("constant", draft.config.num_draft_tokens)
    measured: dict[str, list[Measurement]] = {}
    for batch in batches:
        measured.setdefault(batch.source, []).append(Measurement(batch.source))
        runner.run(setting, batch.to(target.device), measured[batch.source][-1])
    results = [summary(source, found) for source, found in measured.items()]
    mean = sum(result["tau"] for result in results) / len(results)
    whole = summary("all", [run for found in measured.values() for run in found])
    return [*results, whole | {"mean_of_sources": mean}]


def summary(source: str, found: list[Measurement]) -> dict[str, Any]:
    stats = total_stats(found)
    return {
        "source": source,
        "prompts": sum(len(run.answers) for run in found),
        "new_tokens": sum(len(answer) for run in found for answer in run.answers),
        "rounds": stats.rounds,
        "tau": stats.tau,
        "acceptance_by_position": stats.acceptance_by_position,
    }


def print_results(results: list[dict[str, Any]]) -> None:
    rows = [
        [result["draft"], f"{result['temperature']:g}", result["source"], str(result["new_tokens"])]
        + [f"{result['tau']:.2f}", " ".join(f"{share:.2f}" for share in result["acceptance_by_position"])]
        + [f"{result['mean_of_sources']:.2f}" if "mean_of_sources" in result else ""]
        for result in results
    ]
    print_table(("draft", "T", "source", "tokens", "tau", "accepted up to slot", "mean of sources"), rows)


if __name__ == "__main__":
    main()
