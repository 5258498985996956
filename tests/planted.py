"""Drafts for the runtime tests: a planted one that is right where the test says so, and random real ones.

A random draft accepts almost nothing, so a test of the decoding loop with it passes without testing rollback, bonus
tokens or ragged lengths. `PlantedDraft` proposes the target's own continuation with a mistake after a chosen number of
tokens, different per row and round, and runs the real draft forward besides: its cache and positions are used too.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from targets import plain_greedy

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.modeling_dspark import DraftBlock

MASK_TOKEN_ID = 94
BLOCK_SIZE = 7
SURE = 40.0  # a logit so large that softmax gives exactly one hot in float32


def draft_config(target: torch.nn.Module, head: str | None = "vanilla", **changes) -> DSparkConfig:
    """Configuration of a tiny one-layer draft that fits `target`.

    Args:
        target: the model the draft is for.
        head: `"vanilla"`, `"gated"`, `"rnn"` or None (no sequential head).
        changes: fields that differ.
    """
    text = target.config.get_text_config()
    fields = {
        "backbone": "qwen3",
        "hidden_size": text.hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention"],
        "max_position_embeddings": 4096,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": text.vocab_size,
        "stores_embedding": False,
        "stores_head": False,
        "block_size": BLOCK_SIZE,
        "sample_from_anchor": True,
        "mask_token_id": min(MASK_TOKEN_ID, text.vocab_size - 1),
        "target_layer_ids": [0, text.num_hidden_layers - 1],
        "num_target_layers": text.num_hidden_layers,
        "target_hidden_size": text.hidden_size,
        "markov_rank": 0 if head is None else 8,
        "markov_head_type": head or "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": head is not None,
        # pipelines compare them with the target's
        **{name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    fields.update(changes)
    return DSparkConfig(**fields)


def random_draft(
    target: torch.nn.Module, head: str | None = "vanilla", seed: int = 0, scale: float = 0.2, **changes
) -> DSparkDraftModel:
    """A real draft with random weights, `num_assistant_tokens_schedule="constant"`."""
    return _finish(DSparkDraftModel(draft_config(target, head, **changes)), seed, scale)


def _finish(draft: DSparkDraftModel, seed: int, scale: float) -> DSparkDraftModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return draft.float().eval()


class PlantedDraft(DSparkDraftModel):
    """Proposes what `plan` says; see the module docstring. One instance serves one `generate()` call at a time."""

    def plan(
        self,
        references: list[list[int]],
        pattern: tuple[int, ...] = (0, 3, 7),
        labels: list[int] | None = None,
        confidence=None,
    ) -> PlantedDraft:
        """Sets what is proposed in the next `generate()` call and forgets the record of the last one.

        Args:
            references: per row, the unpadded prompt followed by the continuation to propose.
            pattern: tokens that are right before the mistake; row r starts at entry r and moves on every round.
            labels: row numbers to use with `pattern` instead of 0..R-1 (a row that runs alone keeps its number).
            confidence: None (all slots sure), a list of probabilities per slot, or a function
                `(row, round, tokens [k]) -> list of probabilities`.
        """
        self.references = [list(reference) for reference in references]
        self.pattern = tuple(pattern)
        self.labels = list(range(len(references))) if labels is None else labels
        self.confidence = confidence
        self.round_of_row = defaultdict(int)
        self.calls = []
        self.contexts = []
        return self

    def extend_context(self, context_hidden, position_ids, cache, rows, slots, **kwargs):
        self.contexts.append((context_hidden.clone(), position_ids.clone(), cache.rows[rows], slots.clone()))
        return super().extend_context(context_hidden, position_ids, cache, rows, slots, **kwargs)

    def draft_block(
        self, context_hidden, anchor_ids, position_ids, cache=None, sampler=None, num_tokens=None, **kwargs
    ) -> DraftBlock:
        # The real forward first: context handling, masks and shapes are the product's own.
        block = super().draft_block(
            context_hidden, anchor_ids, position_ids, cache=cache, sampler=None, num_tokens=num_tokens, **kwargs
        )
        rows = list(range(len(anchor_ids))) if cache is None else cache.rows.tolist()
        anchors = position_ids[:, -self.config.block_size].tolist()
        width = block.tokens.shape[1]
        logits = torch.zeros_like(block.logits)
        tokens = torch.empty_like(block.tokens)
        confidence_logits = torch.full(block.tokens.shape, SURE)
        for i, (row, anchor) in enumerate(zip(rows, anchors, strict=True)):
            for slot, token in enumerate(self._proposal(row, anchor, width)):
                logits[i, slot, token] = SURE
                tokens[i, slot] = token
        if sampler is not None:
            for slot in range(width):
                tokens[:, slot] = sampler(logits[:, slot], slot)
        for i, row in enumerate(rows):
            if self.confidence is not None:
                rigged = self.confidence
                if callable(rigged):
                    rigged = rigged(row, self.round_of_row[row], tokens[i].tolist())
                confidence_logits[i] = torch.logit(torch.tensor(list(rigged)[:width]), eps=1e-6)
            self.round_of_row[row] += 1
        self.calls.append({"rows": rows, "anchors": anchors, "tokens": tokens.tolist(), "width": width})
        has_confidence = self.config.enable_confidence_head
        return DraftBlock(tokens, logits, confidence_logits if has_confidence else None)

    def right(self, row: int, round_number: int) -> int:
        """Right tokens before the mistake, in this round of this row."""
        return self.pattern[(round_number + self.labels[row]) % len(self.pattern)]

    def _proposal(self, row: int, anchor: int, width: int) -> list[int]:
        truth = self.references[row][anchor + 1 : anchor + 1 + width]
        proposal = truth + [1] * (width - len(truth))
        right = self.right(row, self.round_of_row[row])
        if right < width:
            proposal[right] = (proposal[right] + 1) % self.config.vocab_size
        return proposal


def planted_draft(target: torch.nn.Module, seed: int = 0, head: str | None = "vanilla", **changes) -> PlantedDraft:
    """A `PlantedDraft` for `target` without a plan yet."""
    return _finish(PlantedDraft(draft_config(target, head, **changes)), seed, 0.2)


def planted_for(
    target: torch.nn.Module, prompts: list[list[int]], max_new_tokens: int = 64, copies: int = 1, **plan
) -> PlantedDraft:
    """A `PlantedDraft` whose references are the target's greedy continuations of `prompts`, each row `copies` times."""
    continuations = plain_greedy(target, prompts, max_new_tokens)
    references = [p + c for p, c in zip(prompts, continuations, strict=True) for _ in range(copies)]
    return planted_draft(target).plan(references, **plan)


class ForwardCounter:
    """Counts forwards of a module and records the number of input tokens [R, Q] of each, inside a `with` block."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.shapes: list[tuple[int, ...]] = []

    def __enter__(self) -> ForwardCounter:
        def record(module, args, kwargs):
            ids = kwargs.get("input_ids", args[0] if args else None)
            self.shapes.append(tuple((kwargs["inputs_embeds"].shape[:2]) if ids is None else ids.shape))

        self.handle = self.module.register_forward_pre_hook(record, with_kwargs=True)
        return self

    def __exit__(self, *exception) -> None:
        self.handle.remove()
