"""The smallest program: one prompt, answered by plain generate() and by generate() with a draft.

    python examples/quickstart.py
    python examples/quickstart.py --model TARGET --draft DRAFT "Why is the sky blue?"

Importing `dspark_hf` is all the set-up there is; the draft goes where an assistant model goes. In float32 the two
answers are the same token for token.
"""

from __future__ import annotations

import time

import torch
from _pair import chat_inputs, pair_names, pair_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel

PROMPT = "Write a Python function that returns the n-th Fibonacci number."


def main(argv: list[str] | None = None) -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    args = parser.parse_args(argv)
    target_name, draft_name = pair_names(args)

    tokenizer = AutoTokenizer.from_pretrained(target_name)
    model = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(draft_name)

    inputs = chat_inputs(tokenizer, [{"role": "user", "content": args.prompt}])
    settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    # The first call with a draft checks the target and, where the draft has a confidence head, measures what a round
    # costs on this machine. Both are kept, so that only the first call pays for them.
    model.generate(**inputs, assistant_model=draft, max_new_tokens=8)

    start = time.perf_counter()
    plain = model.generate(**inputs, **settings)
    plain_seconds = time.perf_counter() - start

    start = time.perf_counter()
    output = model.generate(**inputs, **settings, assistant_model=draft, return_dict_in_generate=True)
    seconds = time.perf_counter() - start

    prompt_length = inputs["input_ids"].shape[1]
    print(tokenizer.decode(output.sequences[0, prompt_length:], skip_special_tokens=True))
    stats = output.dspark_stats
    print(f"\nplain generate()  {plain_seconds:6.2f} s")
    print(f"with the draft    {seconds:6.2f} s, {stats.rounds} rounds of {stats.tau:.2f} tokens")
    print(f"identical: {torch.equal(plain, output.sequences)}")


if __name__ == "__main__":
    main()
