"""Rollouts for reinforcement learning: groups of samples per prompt, rewards, an update, and again.

    python examples/rollouts.py
    python examples/rollouts.py --model TARGET --draft DRAFT --group 8 --steps 10

Sampling with a draft gives the policy's own distribution exactly, so nothing in the loop has to know about it: no
importance weights for the draft, no other loss. As the policy learns, it leaves behind the model that the draft was
trained for: `tau`, tokens a round, slowly falls; the samples stay right. Groups are rows of one ragged batch.

The reward here is a toy: answers of about `--length` characters. The update is REINFORCE with the group's mean as
baseline, on the target's last layer only, to keep it small.
"""

from __future__ import annotations

import torch
from _pair import pair_names, pair_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel, record_generation

PROMPTS = ("Name an animal.", "What is the capital of Italy?", "Say hello.")


def completion_mask(completions: torch.LongTensor, eos: int | None) -> torch.Tensor:
    """1 up to and including the first end of sequence, 0 behind it [R, T]."""
    if eos is None:
        return torch.ones_like(completions, dtype=torch.float32)
    ends = (completions == eos).long().cumsum(1)
    return ((ends - (completions == eos).long()) == 0).float()


def log_probabilities(model, sequences: torch.LongTensor, mask: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Log-probability of every completion token under the model [R, T], with gradients."""
    length = sequences.shape[1] - prompt_length
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(sequences, attention_mask=mask, position_ids=positions, logits_to_keep=length + 1).logits[:, :-1]
    tokens = sequences[:, prompt_length:, None]
    return logits.float().log_softmax(-1).gather(2, tokens).squeeze(2)


def main(argv: list[str] | None = None) -> None:
    parser = pair_parser(__doc__)
    parser.set_defaults(max_new_tokens=32)
    parser.add_argument("--group", type=int, default=4, metavar="G", help="samples per prompt")
    parser.add_argument("--steps", type=int, default=3, metavar="N")
    parser.add_argument("--length", type=int, default=40, metavar="CHARS", help="the length that is rewarded")
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args(argv)
    target_name, draft_name = pair_names(args)

    tokenizer = AutoTokenizer.from_pretrained(target_name, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32).requires_grad_(False).eval()
    draft = DSparkDraftModel.from_pretrained(draft_name)
    trained = list(model.get_decoder().layers[-1].requires_grad_(True).parameters())
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)

    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    prompt_length = inputs["input_ids"].shape[1]
    torch.manual_seed(0)

    for step in range(args.steps):
        # 1. Rollouts: `group` samples of each prompt, side by side. top_k=0: the policy's whole distribution.
        with record_generation() as stats:
            sequences = model.generate(
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=args.group,
                max_new_tokens=args.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                assistant_model=draft,
            )
        completions = sequences[:, prompt_length:]

        # 2. Rewards, against the mean of each prompt's group.
        answers = tokenizer.batch_decode(completions, skip_special_tokens=True)
        rewards = torch.tensor([-abs(len(answer) - args.length) / args.length for answer in answers])
        groups = rewards.view(len(PROMPTS), args.group)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)

        # 3. The update.
        mask = completion_mask(completions, tokenizer.eos_token_id)
        attention = inputs["attention_mask"].repeat_interleave(args.group, dim=0)
        attention = torch.cat([attention, mask.long()], dim=1)
        log_probs = log_probabilities(model, sequences, attention, prompt_length)
        loss = -(advantages[:, None] * log_probs * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        print(
            f"step {step}: reward {rewards.mean():.3f}, loss {loss.item():+.4f}, tau {stats.tau:.2f}, "
            f"{stats.tokens_per_second:.1f} tokens/s in {len(rewards)} rollouts"
        )


if __name__ == "__main__":
    main()
