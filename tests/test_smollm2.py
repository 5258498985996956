"""A real pair: SmolLM2-135M-Instruct and the draft that `DSPARK_SCOUT_DRAFT` names, against the draft's own record.

The record (`golden.json` beside the weights) was made in float32 by a separate batch-1 loop: the first block, the
accepted length of every round up to 96 new tokens, and the output, which equals plain `generate()`.
"""

from __future__ import annotations

import json

import pytest
import torch
from running import accepted_by_row
from targets import left_pad
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel, record_generation

pytestmark = [pytest.mark.smollm2, pytest.mark.exactness]

NEW_TOKENS = 96


@pytest.fixture(scope="module")
def target(smollm2_path):
    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def draft(scout_folder):
    draft = DSparkDraftModel.from_pretrained(scout_folder, dtype=torch.float32)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return draft


@pytest.fixture(scope="module")
def records(scout_folder) -> list[dict]:
    return json.loads((scout_folder / "golden.json").read_text())


def run(target, draft, prompts: list[list[int]], **kwargs):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": 2, "pad_token_id": 2, **kwargs}
    return target.generate(**left_pad(prompts, pad=2), assistant_model=draft, return_dict_in_generate=True, **options)


def capped(accepted: list[int], budget: int = NEW_TOKENS) -> list[int]:
    """The recorded lengths without what lies beyond the budget."""
    committed, kept = 1, []
    for right in accepted:
        if committed >= budget:
            break
        kept.append(min(right, budget - committed - 1))
        committed += kept[-1] + 1
    return kept


@pytest.mark.slow
def test_each_prompt_alone(target, draft, records):
    """Output, first block and every accepted length."""
    for record in records:
        prompt = record["prompt_ids"]
        output = run(target, draft, [prompt])
        new = output.sequences[0, len(prompt) :].tolist()
        assert new == record["output_ids"], record["source"]
        accepted = accepted_by_row(output.dspark_stats, 1)[0]
        assert accepted == capped(record["accepted_per_round"]), record["source"]
        first = output.dspark_stats.round_events[0]
        assert new[0] == record["first_round"]["anchor"]
        assert first.drafted[0] == record["first_round"]["drafted"]
        want = torch.tensor(record["first_round"]["confidence_logits"]).sigmoid()
        torch.testing.assert_close(torch.tensor(first.confidence[0]), want, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_the_three_prompts_in_one_batch(target, draft, records):
    """Left-padded together: the same outputs and the same accepted lengths."""
    prompts = [record["prompt_ids"] for record in records]
    output = run(target, draft, prompts)
    width = max(map(len, prompts))
    accepted = accepted_by_row(output.dspark_stats, len(records))
    for row, record in enumerate(records):
        new = output.sequences[row, width:].tolist()
        length = len(record["output_ids"])
        assert new[:length] == record["output_ids"] and set(new[length:]) <= {2}
        assert accepted[row] == capped(record["accepted_per_round"])
    assert output.dspark_stats.path == "packed"


@pytest.mark.slow
def test_bfloat16_stays_within_a_few_ulp(target, smollm2_path, scout_folder, records):
    """Half precision: every token is within a few ulp of the likeliest one of a plain forward over the same text."""
    half = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16).eval()
    draft = DSparkDraftModel.from_pretrained(scout_folder, dtype=torch.bfloat16)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    prompts = [record["prompt_ids"] for record in records]
    sequences = run(half, draft, prompts, max_new_tokens=48).sequences
    width = max(map(len, prompts))
    for prompt, sequence in zip(prompts, sequences.tolist(), strict=True):
        text = torch.tensor([prompt + sequence[width:]])
        with torch.no_grad():
            logits = half(text).logits[0, len(prompt) - 1 : -1].float()
        top = logits.max(dim=-1).values
        deficit = top - logits.gather(1, text[0, len(prompt) :, None]).squeeze(1)
        ulp = 2.0 ** (top.abs().log2().floor() - 7)  # bfloat16 keeps 8 significant bits
        assert (deficit <= 4 * ulp).all(), deficit.max()


@pytest.mark.slow
def test_pipeline_with_the_chat_template(target, draft, smollm2_path):
    """The way most people generate: a pipeline, a chat, and the end of sequence that the model itself gives."""
    from transformers import pipeline

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    chat = [{"role": "user", "content": "Name three colors."}]
    arguments = {"max_new_tokens": 32, "do_sample": False}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(chat, **arguments)
    with record_generation() as stats:
        drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)(
            chat, **arguments
        )
    assert drafted == plain
    assert stats.rounds > 0 and stats.accepted > 0
