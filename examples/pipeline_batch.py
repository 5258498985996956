"""A batch of prompts through Transformers' own pipeline, faster, with statistics.

    python examples/pipeline_batch.py
    python examples/pipeline_batch.py --model TARGET --draft DRAFT --batch-size 8

The pipeline knows nothing of drafts: it hands `assistant_model` to `generate()`, and `record_generation` collects what
happened there. Rows of a batch have their own lengths and stop on their own; nobody waits for another row's mistakes.
"""

from __future__ import annotations

import torch
from _pair import pair_names, pair_parser
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from dspark_hf import DSparkDraftModel, record_generation

PROMPTS = (
    "Add 17 and 25, then double the result.",
    "Write a Python function that reverses a list.",
    "List three uses of a paper clip.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h?",
)


def main(argv: list[str] | None = None) -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=len(PROMPTS), metavar="R")
    args = parser.parse_args(argv)
    target_name, draft_name = pair_names(args)

    # Batches are padded on the left, as for any decoder-only model.
    tokenizer = AutoTokenizer.from_pretrained(target_name, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(draft_name)

    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=draft)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    with record_generation() as stats:
        outputs = pipe(
            chats,
            batch_size=args.batch_size,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            return_full_text=False,
        )

    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"> {prompt}\n{output[0]['generated_text'].strip()}\n")
    by_position = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position)
    print(f"{stats.calls} calls, {stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, {stats.path}")
    print(f"tau {stats.tau:.2f}; accepted by position: {by_position or 'nothing was drafted'}")


if __name__ == "__main__":
    main()
