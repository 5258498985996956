"""Your own logits processor and stopping criterion work unchanged, and see what plain decoding would show them.

    python examples/custom_processors.py
    python examples/custom_processors.py --model TARGET --draft DRAFT "Tell me about the sea."

A block of drafted tokens is verified at once, but a processor is still called with a true prefix of the answer and the
scores of the token after it, and a criterion after every single token: an answer never runs past the point at which it
would have been stopped. Processors that look at positions one by one, as both here do, need no change for that.
"""

from __future__ import annotations

import torch
from _pair import chat_inputs, pair_names, pair_parser
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from dspark_hf import DSparkDraftModel


class FreshWords(LogitsProcessor):
    """Makes the tokens of the last `window` positions less likely: the longer ago, the less."""

    def __init__(self, window: int = 24, strength: float = 3.0):
        self.window, self.strength = window, strength

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        recent = input_ids[:, -self.window :]
        fading = torch.linspace(0.0, self.strength, recent.shape[1], device=scores.device, dtype=scores.dtype)
        return scores.scatter_add(1, recent, -fading.expand_as(recent))


class SentenceLimit(StoppingCriteria):
    """Ends a row after so many sentences, each row by itself."""

    def __init__(self, tokenizer, prompt_length: int, sentences: int):
        self.tokenizer, self.prompt_length, self.sentences = tokenizer, prompt_length, sentences

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        texts = self.tokenizer.batch_decode(input_ids[:, self.prompt_length :], skip_special_tokens=True)
        done = [sum(text.count(mark) for mark in ".!?") >= self.sentences for text in texts]
        return torch.tensor(done, device=input_ids.device)


def main(argv: list[str] | None = None) -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("prompt", nargs="?", default="Describe a rainy day in a city.")
    parser.add_argument("--sentences", type=int, default=2, metavar="N")
    args = parser.parse_args(argv)
    target_name, draft_name = pair_names(args)

    tokenizer = AutoTokenizer.from_pretrained(target_name)
    model = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(draft_name)
    inputs = chat_inputs(tokenizer, [{"role": "user", "content": args.prompt}])
    prompt_length = inputs["input_ids"].shape[1]

    def answer(**assistance) -> torch.Tensor:
        return model.generate(
            **inputs,
            **assistance,
            do_sample=False,
            max_new_tokens=args.max_new_tokens,
            logits_processor=LogitsProcessorList([FreshWords()]),
            stopping_criteria=StoppingCriteriaList([SentenceLimit(tokenizer, prompt_length, args.sentences)]),
        )[0, prompt_length:]

    plain, drafted = answer(), answer(assistant_model=draft)
    print(tokenizer.decode(drafted, skip_special_tokens=True).strip())
    print(f"\n{len(drafted)} tokens; identical to plain generate(): {torch.equal(plain, drafted)}")


if __name__ == "__main__":
    main()
