"""A chat of several turns: the answer streams, and after each round it shows what the draft got right.

    python examples/chat_streaming.py                          # three turns that are given
    python examples/chat_streaming.py --interactive            # yours; an empty line ends it
    python examples/chat_streaming.py --model TARGET --draft DRAFT --marks

A streamer is Transformers' own. If it also has a method `on_round`, it gets a `RoundEvent` after every round: what was
drafted, how sure the draft was, how much was verified and kept, and how long it took.
"""

from __future__ import annotations

import torch
from _pair import chat_inputs, pair_names, pair_parser
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from dspark_hf import DSparkDraftModel, RoundEvent

TURNS = (
    "Write a Python function that adds two numbers.",
    "Now one that multiplies them.",
    "How do I call both of them?",
)


class LiveStreamer(TextStreamer):
    """Prints text as it comes and counts rounds; with `marks`, also ‹kept/verified› behind the text of each round."""

    def __init__(self, tokenizer, marks: bool = False):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.marks = marks
        self.rounds: list[RoundEvent] = []

    def on_round(self, event: RoundEvent) -> None:
        self.rounds.append(event)
        if self.marks:  # text is printed up to the last complete word, so a mark may come a word early
            print(f"‹{event.accepted[0]}/{event.verify_lengths[0]}›", end="", flush=True)

    def summary(self) -> str:
        """One line on the turn."""
        tokens = sum(len(event.committed[0]) for event in self.rounds)
        seconds = sum(event.draft_seconds + event.verify_seconds for event in self.rounds)
        if not self.rounds or not seconds:
            return "[no round: the answer ended with its first token]"
        kept = "".join(str(event.accepted[0]) for event in self.rounds)
        # The first token comes from the prompt's own forward, before the first round.
        return (
            f"[{tokens + 1} tokens in {len(self.rounds)} rounds, tau {tokens / len(self.rounds):.2f}, "
            f"{tokens / seconds:.1f} tokens/s; kept by round: {kept}]"
        )


def main(argv: list[str] | None = None) -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--interactive", action="store_true", help="read your turns from the terminal")
    parser.add_argument("--marks", action="store_true", help="show after each round what was kept")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    args = parser.parse_args(argv)
    target_name, draft_name = pair_names(args)

    tokenizer = AutoTokenizer.from_pretrained(target_name)
    model = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(draft_name)
    sampling = {"do_sample": False}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature}

    messages: list[dict] = []
    for text in iter(lambda: input("> "), "") if args.interactive else TURNS:
        if not args.interactive:
            print(f"> {text}")
        messages.append({"role": "user", "content": text})
        inputs = chat_inputs(tokenizer, messages)
        streamer = LiveStreamer(tokenizer, args.marks)
        output = model.generate(
            **inputs, **sampling, max_new_tokens=args.max_new_tokens, assistant_model=draft, streamer=streamer
        )
        print(streamer.summary() + "\n")
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
