"""Prompts of a benchmark: read by source, grouped into domains, put into left-padded batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

# What the sources of prompt files are usually called, by domain. Any other source is a domain of its own.
DOMAINS = {
    "math": ("gsm8k", "math500"),
    "code": ("mbpp", "humaneval", "lbpp"),
    "chat": ("mt-bench", "arena-hard-v2"),
}
ALL = "all"


@dataclass(frozen=True)
class Batch:
    """R prompts of one source or domain, left-padded.

    Attributes:
        source (`str`): where the prompts come from, e.g. "gsm8k"; "-" when the file does not say.
        input_ids, attention_mask (`torch.Tensor`): each (R, longest prompt).
    """

    source: str
    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.source, self.input_ids.to(device), self.attention_mask.to(device))

    def prompt(self, row: int) -> list[int]:
        """Token ids of one row's prompt, without padding."""
        return self.input_ids[row][self.attention_mask[row].bool()].tolist()


def read_prompts(
    path: Path,
    load_tokenizer: Callable[[], PreTrainedTokenizerBase | None],
    *,
    sources: Sequence[str] = (),
    limit: int | None = None,
    chat: bool = True,
) -> dict[str, list[list[int]]]:
    """Prompts of a JSONL file as token ids, by source.

    Args:
        path (`Path`): one JSON object a line, with `prompt_ids` (used as they are) or `prompt` (wrapped in the chat
            template where there is one), and optionally `source`.
        load_tokenizer (callable): gives the target's tokenizer; called only when a line has no `prompt_ids`.
        sources (`Sequence[str]`, *optional*): only these.
        limit (`int`, *optional*): at most so many prompts of each source.
        chat (`bool`, *optional*, defaults to `True`): use the chat template.

    Raises:
        `ValueError`: a line is no such object, there is no tokenizer for it, or nothing is left.
    """
    prompts: dict[str, list[list[int]]] = {}
    tokenizer = None
    # Not splitlines(): a prompt may hold one of Unicode's other line breaks.
    for number, line in enumerate(path.read_text(encoding="utf-8").strip("\n").split("\n"), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"{path.name}, line {number}: not JSON; one object a line is expected") from None
        source = row.get("source", "-")
        if sources and source not in sources:
            continue
        chosen = prompts.setdefault(source, [])
        if limit is not None and len(chosen) >= limit:
            continue
        if "prompt_ids" in row:
            chosen.append(row["prompt_ids"])
        elif "prompt" in row:
            tokenizer = tokenizer or load_tokenizer()
            if tokenizer is None:
                raise ValueError(f"{path.name}, line {number}: the target has no tokenizer, so it needs prompt_ids")
            chosen.append(encode(tokenizer, row["prompt"], chat=chat))
        else:
            raise ValueError(f"{path.name}, line {number}: neither prompt_ids nor prompt")
    if not prompts:
        raise ValueError(f"{path.name} holds no prompts of {', '.join(sources) or 'any source'}")
    return prompts


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool = True) -> list[int]:
    """Token ids of a prompt, as a user's message where the tokenizer has a chat template."""
    if not chat or not tokenizer.chat_template:
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def group_by_domain(
    by_source: dict[str, list[list[int]]], domains: Sequence[str] | None = None
) -> dict[str, list[list[int]]]:
    """Prompts by domain, the sources of a domain taking turns.

    Args:
        by_source: prompts by source.
        domains (`Sequence[str]`, *optional*): which, in this order: names of `DOMAINS` or of single sources, or just
            "all", which puts everything into one. By default every domain, and every source that belongs to none.

    Raises:
        `ValueError`: there are no prompts of a domain.
    """
    if domains is not None and list(domains) == [ALL]:
        return {ALL: take_turns(list(by_source.values()))}
    domain_of = {source: domain for domain, sources in DOMAINS.items() for source in sources}
    grouped: dict[str, list[list[list[int]]]] = {domain: [] for domain in DOMAINS}
    for source, prompts in by_source.items():
        grouped.setdefault(domain_of.get(source, source), []).append(prompts)
    grouped = {domain: sources for domain, sources in grouped.items() if sources}
    if domains is not None:
        grouped = {source: [prompts] for source, prompts in by_source.items() if source in domains} | grouped
    if missing := [domain for domain in domains or () if domain not in grouped]:
        raise ValueError(f"no prompts of {', '.join(missing)}: there are {', '.join(grouped)}, or take {ALL}")
    return {domain: take_turns(grouped[domain]) for domain in domains or grouped}


def take_turns(lists: list[list[list[int]]]) -> list[list[int]]:
    """One list of all prompts, each source as evenly spread as it goes."""
    spread = [((place + 0.5) / len(ids), prompt) for ids in lists for place, prompt in enumerate(ids)]
    return [prompt for _, prompt in sorted(spread, key=lambda pair: pair[0])]


def make_batches(prompts: dict[str, list[list[int]]], rows: int, pad: int) -> list[Batch]:
    """Batches of `rows` prompts, each from one source; a short last batch is filled up from the source's start."""
    batches = []
    for source, ids in prompts.items():
        for start in range(0, len(ids), rows):
            chosen = [ids[(start + row) % len(ids)] for row in range(rows)]
            width = max(map(len, chosen))
            input_ids = torch.tensor([[pad] * (width - len(row)) + row for row in chosen])
            attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in chosen])
            batches.append(Batch(source, input_ids, attention_mask))
    return batches


__all__ = ["ALL", "DOMAINS", "Batch", "encode", "group_by_domain", "make_batches", "read_prompts", "take_turns"]
