"""How much is drafted and verified follows the load: one row, a full batch, and several calls at once.

    python examples/load_aware_batch.py
    python examples/load_aware_batch.py --model TARGET --draft DRAFT --rows 1 8 32

A lone row leaves the processor idle, so verifying seven tokens costs hardly more than one. A full batch does not: every
drafted token that is rejected takes time from another row. The schedule "throughput" measures what a step costs on this
machine (a few seconds, once) and then decides every round, from the confidences, how much to verify or whether to draft
at all. Compare with "constant", which always verifies everything.
"""

from __future__ import annotations

import threading
import time

import torch
from _pair import pair_names, pair_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel, GenerationStats

TASKS = ("Count from {} to {}.", "Add {} and {}.", "Write a poem about the numbers {} and {}.", "Which of {} and {}?")


def batch(tokenizer, rows: int) -> dict:
    """`rows` different prompts, padded on the left."""
    prompts = [TASKS[row % len(TASKS)].format(row, row + 7) for row in range(rows)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return dict(tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt"))


def describe(stats: GenerationStats) -> str:
    """Tokens a round, how much was verified of what was drafted, and how often nothing was drafted."""
    share = stats.verified / stats.drafted if stats.drafted else 0.0
    return f"tau {stats.tau:.2f}, {share:4.0%} of the drafts verified, {stats.share_without_draft:4.0%} without a draft"


def main(argv: list[str] | None = None) -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], metavar="R")
    parser.add_argument("--calls", type=int, default=3, metavar="N", help="calls at once in the last part")
    args = parser.parse_args(argv)
    target_name, draft_name = pair_names(args)

    tokenizer = AutoTokenizer.from_pretrained(target_name, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(target_name, dtype="auto")
    draft = DSparkDraftModel.from_pretrained(draft_name, dtype=model.dtype)
    # The same number of tokens for everybody, so that the times can be compared.
    settings = {"do_sample": False, "max_new_tokens": args.max_new_tokens, "min_new_tokens": args.max_new_tokens}

    def answer(inputs: dict, schedule: str) -> GenerationStats:
        output = model.generate(
            **inputs,
            **settings,
            assistant_model=draft,
            num_assistant_tokens=draft.config.num_draft_tokens,
            num_assistant_tokens_schedule=schedule,
            return_dict_in_generate=True,
        )
        return output.dspark_stats

    # "constant" given to generate() is Transformers' own default and counts as not given, so it is set here instead.
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    for rows in args.rows:
        inputs = batch(tokenizer, rows)
        answer(inputs, "throughput")  # measures this number of rows, if it is new
        start = time.perf_counter()
        model.generate(**inputs, **settings)
        plain = time.perf_counter() - start
        print(f"{rows} rows: plain {plain:.2f} s")
        for schedule in ("constant", "throughput"):
            start = time.perf_counter()
            stats = answer(inputs, schedule)
            print(f"  {schedule:<11}{time.perf_counter() - start:6.2f} s  {describe(stats)}")

    # Several calls on one target, as in a small server: each sees the rows of the others.
    results: list[GenerationStats] = []
    inputs = batch(tokenizer, 1)
    threads = [threading.Thread(target=lambda: results.append(answer(inputs, "throughput"))) for _ in range(args.calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    busiest = max((event.load for stats in results for event in stats.round_events), default=0)
    print(f"{args.calls} calls at once: up to {busiest} rows of other calls were seen")
    for stats in results:
        print(f"  {describe(stats)}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
