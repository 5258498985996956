"""Does the scheduler follow the load? Speed and verify length by batch size, beside plain decoding and fixed rules.

    python benchmarks/load.py --target TARGET --draft DRAFT --prompts prompts.jsonl --output load.json

Every batch is answered by plain `generate()` and with the draft under three rules, all slots verified ("7 drafted"),
the confidence threshold, and Algorithm 1 on the measured cost table ("throughput", with and without copies from the
text), taking turns in an order that rotates. What must hold, and is judged at the end: throughput is the best rule or
close to it at every number of rows, never much slower than plain decoding, and verifies less as rows are added.

The cost table is measured first, at all numbers of rows, and saved where `generate()` looks for it: what `dspark-hf
profile` does. Measured at first use, a few seconds at each number of rows, verify lengths would differ by the minute in
which that was.

All answers run to the full length, whatever end-of-sequence token they hold. In half precision near-ties between tokens
flip with the shape of a batch, and a rule whose answers happen to be easy to draft would look better than it is, or
verify more in a larger batch. So greedy rules answer, at every number of rows, what plain `generate()` answered once in
the largest batch: before a round's acceptance the scores of its tokens are raised above all others.

Never slower also means: with a draft that is no good. A copy of the draft with random weights and high confidences
answers beside plain decoding over a fixed number of tokens ("useless draft"), without copies, which would make up for
it.

Machines change speed from minute to minute, by more than the differences at stake. So the same runs are reckoned by a
second cost table too, measured at the end like the first, all points taking turns: what their rounds, and plain
decoding's steps, would have taken on a steady machine ("by table", without prompts and the loop's own overhead).

The same prompts are answered at every number of rows that they suffice for, since verify lengths differ from prompt to
prompt by more than from load to load.

*Scheduling* is the time spent deciding, as a share of the rounds. `--limit`, `--rows`, `--domains` and
`--max-new-tokens` make it shorter, `--repeats` and `--limit` steadier.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dspark_hf import DSparkDraftModel
from dspark_hf.benchmarking.machine import environment, model_name, print_table, save_json
from dspark_hf.benchmarking.prompts import DOMAINS, Batch, make_batches, read_prompts, take_turns
from dspark_hf.benchmarking.runner import Measurement, Runner, Setting, speed
from dspark_hf.benchmarking.runner import total_stats as total
from dspark_hf.generation.loop import DecodingLoop
from dspark_hf.generation.policy import ThroughputPolicy
from dspark_hf.generation.profiling import measure_profile, save_profile
from dspark_hf.throughput import ThroughputProfile

PLAIN, THROUGHPUT = Setting(), "throughput"
# What the scheduler is held to: share of the best rule's speed, of plain decoding's, and extra time of a bad draft.
CLOSE_TO_BEST, NEVER_SLOWER, USELESS_COST, SCHEDULING = 0.97, 0.98, 0.03, 0.01


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_common_arguments(parser)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16], metavar="R", help="batch sizes")
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="prompts of each domain, at least a batch")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each batch by each rule")
    parser.add_argument(
        "--least-runs", type=int, default=3, metavar="N", help="of each rule on a domain: large batches are few"
    )
    parser.add_argument("--threshold", type=float, default=0.5, help="of the confidence rule; default: 0.5")
    parser.add_argument("--table-seconds", type=float, default=40.0, metavar="S", help="to measure a cost table, twice")
    parser.add_argument("--useless-rows", nargs="*", type=int, default=[1], metavar="R", help="none: leave it out")
    parser.add_argument("--useless-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--useless-repeats", type=int, default=2, metavar="N")
    return parser.parse_args(argv)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark and the one of thresholds share."""
    add_pair_arguments(parser)
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=(*DOMAINS, "all"))
    parser.add_argument("--temperature", type=float, metavar="T", help="sample; default: greedy")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, prompts and machine; acceptance takes them too."""
    parser.add_argument("--target", required=True, metavar="REPO|FOLDER")
    parser.add_argument("--draft", required=True, metavar="REPO|FOLDER")
    parser.add_argument("--prompts", required=True, type=Path, metavar="JSONL", help="prompt_ids or prompt, and source")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: PyTorch's choice")
    parser.add_argument("--output", type=Path, metavar="JSON")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    target, draft, prompts = load(args)
    target.generation_config.eos_token_id = None
    report = new_report("load", args)
    report["results"], report["useless"], runs = [], [], []
    save_profile(cost_table(args, target, draft, prompts))
    answers = plain_answers(args, target, draft, prompts) if args.temperature is None else {}
    for rows in args.rows:
        runs += measure(args, target, draft, prompts, rows, answers)
        print_results([result for result, _ in runs[-len(prompts) * 5 :]])
    for rows in args.useless_rows:
        report["useless"].append(measure_useless(args, target, draft, prompts, rows))
    table = cost_table(args, target, draft, prompts)
    report["table"] = asdict(table)
    report["results"] = [result | reckon(table, result, found) for result, found in runs]
    report["verdicts"] = verdicts(report)
    print()
    print_results(report["results"])
    for text, holds in report["verdicts"].items():
        print(f"{'holds' if holds else 'FAILS'}: {text}")
    if args.output is not None:
        save_json(args.output, report)


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, DSparkDraftModel, dict[str, list[list[int]]]]:
    """Target, draft, and prompts by domain, the sources of a domain taking turns."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(args.device).eval()
    draft = DSparkDraftModel.from_pretrained(args.draft, dtype=target.dtype).to(args.device).eval()
    by_source = read_prompts(args.prompts, lambda: AutoTokenizer.from_pretrained(args.target))
    if args.domains == ["all"]:
        return target, draft, {"all": take_turns(list(by_source.values()))}
    chosen = {name: [by_source[source] for source in DOMAINS[name] if source in by_source] for name in args.domains}
    if missing := [name for name, sources in chosen.items() if not sources]:
        raise SystemExit(f"{args.prompts.name} holds no prompts of {', '.join(missing)}; try --domains all")
    return target, draft, {name: take_turns(sources) for name, sources in chosen.items()}


def new_report(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What every report says of its making."""
    places = ("target", "draft", "prompts", "output")
    return {
        "benchmark": name,
        "environment": environment(),
        "target": model_name(args.target),
        "draft": model_name(args.draft),
        "prompts": args.prompts.name,
        "arguments": {key: value for key, value in vars(args).items() if key not in places},
    }


def batches_of(args: argparse.Namespace, target: PreTrainedModel, prompts: dict, rows: int, limit: int) -> list[Batch]:
    """The first `limit` prompts of each domain in batches of `rows`, at least one."""
    pad = target.generation_config.pad_token_id or 0
    chosen = {domain: ids[: rows * max(1, limit // rows)] for domain, ids in prompts.items()}
    return [batch.to(target.device) for batch in make_batches(chosen, rows, pad)]


def plain_answers(
    args, target: PreTrainedModel, draft: DSparkDraftModel, prompts: dict
) -> dict[tuple[int, ...], list[int]]:
    """What plain `generate()` answers to every prompt in use, in batches of the most rows; by prompt."""
    rows, runner, answers = max(args.rows), Runner(args, target, draft), {}
    for batch in batches_of(args, target, prompts, rows, limit=-(-args.limit // rows) * rows):
        run = Measurement(batch.source)
        runner.run(PLAIN, batch, run)
        answers |= {tuple(batch.prompt(row)): answer for row, answer in enumerate(run.answers)}
    return answers


def measure(
    args, target: PreTrainedModel, draft: DSparkDraftModel, prompts: dict, rows: int, answers: dict
) -> list[tuple[dict[str, Any], list[Measurement]]]:
    """All rules at one number of rows, by domain: results, each with the runs it comes from."""
    block = draft.config.num_draft_tokens
    settings = [
        PLAIN,
        Setting("constant", block),
        Setting("confidence", block, args.threshold),
        Setting(THROUGHPUT, block),
        Setting(THROUGHPUT, block, copies=False),
    ]
    runner = Runner(args, target, draft)
    batches = batches_of(args, target, prompts, rows, args.limit)
    for setting in settings:  # first use: self-check, kernels of new shapes
        runner.run(setting, batches[0], Measurement("warm-up"), max_new_tokens=min(8, args.max_new_tokens))
    measured = {setting: [Measurement(batch.source) for batch in batches] for setting in settings}
    deciding = {batch.source: 0.0 for batch in batches}
    of_domain = Counter(batch.source for batch in batches)
    for number, batch in enumerate(batches):
        reference = [answers[tuple(batch.prompt(row))] for row in range(rows)] if answers else []
        for repeat in range(max(args.repeats, -(-args.least_runs // of_domain[batch.source]))):
            turn = (number + repeat) % len(settings)
            for setting in settings[turn:] + settings[:turn]:
                with timed_scheduling() as spent, following(reference):
                    runner.run(setting, batch, measured[setting][number])
                deciding[batch.source] += spent[0] if setting.name == THROUGHPUT else 0.0
    results = []
    for domain in deciding:
        chosen = {s: [m for m in measured[s] if m.source == domain] for s in settings}
        for setting in settings:
            result = {"rows": rows, "domain": domain, "setting": setting.name, **speed(chosen[setting], chosen[PLAIN])}
            if setting.schedule is not None:
                stats = total(chosen[setting])
                result["share_without_draft"] = stats.share_without_draft
                result["expected_tau"] = stats.expected_tau
                if setting.name == THROUGHPUT:
                    result["scheduling"] = deciding[domain] / (stats.seconds - stats.prefill_seconds)
            results.append((result, chosen[setting]))
    return results


def cost_table(args, target: PreTrainedModel, draft: DSparkDraftModel, prompts: dict) -> ThroughputProfile:
    """What steps and drafts cost at the numbers of rows seen, in the middle of an answer."""
    lengths = [len(prompt) for ids in prompts.values() for prompt in ids]
    context = int(median(lengths)) + args.max_new_tokens // 2
    return measure_profile(
        target,
        draft,
        rows=sorted(set(args.rows)),
        contexts=[context],
        time_budget=args.table_seconds,
        max_samples=100,
    )


def reckon(table: ThroughputProfile, result: dict[str, Any], measurements: list[Measurement]) -> dict[str, float]:
    """Tokens per second of a result's runs by the cost table."""
    rows, seconds = result["rows"], 0.0
    context = table.verify_points[0].context
    tokens = sum(len(answer) * len(run.seconds) for run in measurements for answer in run.answers)
    for run in measurements:
        if run.stats is None:
            # plain generate() carries finished rows along to the end
            steps = max(map(len, run.answers)) - 1
            seconds += len(run.seconds) * steps * table.plain_seconds(rows, context)
            continue
        for event in run.stats.round_events:
            count = len(event.rows)
            seconds += table.verify_seconds(count + sum(event.verify_lengths), count, context)
            seconds += table.draft_seconds(count, event.draft_width) if event.draft_width else 0.0
    return {"tokens_per_second_by_table": tokens / seconds}


@contextmanager
def timed_scheduling() -> Iterator[list[float]]:
    """Adds up the seconds that deciding takes, copies searched for included, in the first entry of the list."""
    spent = [0.0]

    def timed(method):
        def run(*args):
            start = time.perf_counter()
            result = method(*args)
            spent[0] += time.perf_counter() - start
            return result

        return run

    deciding = [(DecodingLoop, "_offer_copies")]
    deciding += [(ThroughputPolicy, name) for name in ("wants_draft", "plan", "observe")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in deciding]
    for owner, name, method in originals:
        setattr(owner, name, timed(method))
    try:
        yield spent
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


@contextmanager
def following(answers: list[list[int]]) -> Iterator[None]:
    """Has greedy decoding with a draft choose the tokens of `answers`, [rows][tokens]; without answers its own."""
    original = DecodingLoop._accept

    def accept(loop, scores, drafted, lengths, starts, width):
        done = [len(loop.out.tokens[row]) for row in loop.rows]
        tokens = [answers[row][at : at + 1 + count] for row, at, count in zip(loop.rows, done, lengths)]
        chosen = torch.tensor(sum(tokens, []), device=scores.device)
        scores[torch.arange(len(chosen), device=scores.device), chosen] = torch.inf
        return original(loop, scores, drafted, lengths, starts, width)

    DecodingLoop._accept = accept if answers else original
    try:
        yield
    finally:
        DecodingLoop._accept = original


# ------------------------------------------------------------------------------------------------ the useless draft


def useless_copy(draft: DSparkDraftModel) -> DSparkDraftModel:
    """The draft with random layers, which is sure of every token it proposes."""
    rigged = copy.deepcopy(draft)
    rigged.config.confidence_calibration = None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in rigged.named_parameters():
            if parameter.dim() >= 2 and not name.startswith(("embed_tokens", "lm_head")):
                noise = torch.randn(parameter.shape, generator=generator) * parameter.float().std().item()
                parameter.copy_(noise)
        head = rigged.confidence_head.proj
        head.weight.zero_()
        head.bias.fill_(4.0)
    return rigged


def measure_useless(args, target, draft: DSparkDraftModel, prompts: dict, rows: int) -> dict[str, Any]:
    """A useless draft under the scheduler against plain decoding."""
    settings = [PLAIN, Setting(THROUGHPUT, draft.config.num_draft_tokens, copies=False)]
    runner = Runner(args, target, useless_copy(draft))
    batches = batches_of(args, target, prompts, rows, 1)
    length = args.useless_tokens
    for setting in settings:
        runner.run(setting, batches[0], Measurement("warm-up"), max_new_tokens=8)
    measured = {setting: [Measurement(batch.source) for batch in batches] for setting in settings}
    for repeat in range(args.useless_repeats):
        for number, batch in enumerate(batches):
            for setting in settings if (number + repeat) % 2 else settings[::-1]:
                runner.run(setting, batch, measured[setting][number], max_new_tokens=length)
    plain, rigged = (sum(median(m.seconds) for m in measured[setting]) for setting in settings)
    stats = total(measured[settings[1]])
    return {
        "rows": rows,
        "tokens": length,
        "plain_seconds": [m.seconds for m in measured[PLAIN]],
        "seconds": [m.seconds for m in measured[settings[1]]],
        "cost": rigged / plain - 1.0,
        "tau": stats.tau,
        "share_without_draft": stats.share_without_draft,
    }


# ------------------------------------------------------------------------------------------------ results


def verdicts(report: dict[str, Any]) -> dict[str, bool]:
    """What must hold, in words with the figure that decides, and whether it does."""
    cells: dict[tuple, dict[str, dict]] = {}
    for result in report["results"]:
        cells.setdefault((result["rows"], result["domain"]), {})[result["setting"]] = result
    found = {}
    for (rows, domain), by_setting in cells.items():
        for how, name in (("", "tokens_per_second"), (" by table", "tokens_per_second_by_table")):
            plain, rate = by_setting[PLAIN.name][name], by_setting[THROUGHPUT][name]
            best = max(result[name] for result in by_setting.values())
            found[f"R={rows} {domain}{how}: {rate / best:.3f} of the best rule"] = rate >= CLOSE_TO_BEST * best
            found[f"R={rows} {domain}{how}: {rate / plain:.3f} of plain"] = rate >= NEVER_SLOWER * plain
    for domain in dict.fromkeys(domain for _, domain in cells):
        lengths = [cells[key][THROUGHPUT]["mean_verify_length"] for key in sorted(cells) if key[1] == domain]
        text = " > ".join(f"{length:.2f}" for length in lengths)
        found[f"{domain}: verify length falls, {text}"] = lengths == sorted(lengths, reverse=True)
    most = max(rows for rows, _ in cells)
    share = max(by_setting[THROUGHPUT]["scheduling"] for (rows, _), by_setting in cells.items() if rows == most)
    found[f"R={most}: scheduling takes {share:.2%} of a round at most"] = share <= SCHEDULING
    for result in report["useless"]:
        text = f"R={result['rows']}: a useless draft costs {result['cost']:.1%} over {result['tokens']} tokens"
        found[text] = result["cost"] <= USELESS_COST
    return found


def print_results(results: list[dict[str, Any]]) -> None:
    header = ["R", "prompts", "rule", "tok/s", "of plain", "verified", "tau", "promised", "no draft", "scheduling"]
    header += ["by table"] if "tokens_per_second_by_table" in results[0] else []
    plain = {(r["rows"], r["domain"]): r.get("tokens_per_second_by_table") for r in results if r["setting"] == "plain"}
    rows = []
    for result in results:
        row = [str(result["rows"]), result["domain"], result["setting"]]
        row += [f"{result['tokens_per_second']:.1f}", f"{result['speedup']:.3f}"]
        if "tau" in result:
            promised = result["expected_tau"]
            row += [f"{result['mean_verify_length']:.2f}", f"{result['tau']:.2f}"]
            row += ["" if promised is None else f"{promised:.2f}", f"{result['share_without_draft']:.2f}"]
        row += [""] * (9 - len(row)) + [f"{result['scheduling']:.2%}" if "scheduling" in result else ""]
        if "tokens_per_second_by_table" in result:
            row.append(f"{result['tokens_per_second_by_table'] / plain[result['rows'], result['domain']]:.3f}")
        rows.append(row)
    print_table(header, rows)


if __name__ == "__main__":
    main()
