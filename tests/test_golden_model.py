"""The draft model against the official code's numbers, on every golden case: each path of the model gives the same."""

import pytest
import torch
import transformers
from golden_set import CASES, PROMPTS, ROUNDS, golden

from dspark_hf.draft_cache import DraftCache

TOLERANCE = 1e-4


@pytest.fixture(params=CASES)
def case(request):
    return golden(request.param)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def assert_block(case, prompt, round_number, block, row=0):
    """A drafted block equals the recorded one: tokens exactly, logits and confidences within the tolerance."""
    assert block.tokens[row].tolist() == case(prompt, round_number, "sampled_draft_tokens")[0].tolist()
    close(block.logits[row], case(prompt, round_number, "corrected_logits")[0])
    if case.draft.confidence_head is None:
        assert block.confidence_logits is None
    else:
        close(block.confidence_logits[row], case(prompt, round_number, "confidence_logits")[0])


def test_the_set_has_cases():
    assert {"qwen3_rnn", "gemma4"} <= set(CASES)


def test_backbone_and_base_logits_without_a_cache(case):
    for prompt in PROMPTS:
        context = torch.cat([case(prompt, r, "context_hidden") for r in ROUNDS], dim=1)
        for round_number in ROUNDS:
            length = sum(case(prompt, r, "context_hidden").shape[1] for r in range(round_number + 1))
            with torch.no_grad():
                output = case.draft(
                    case(prompt, round_number, "draft_input_ids"), context[:, :length], torch.arange(length + 7)[None]
                )
            close(output.last_hidden_state, case(prompt, round_number, "backbone_hidden"))
            close(output.base_logits, case(prompt, round_number, "base_logits"))


@pytest.mark.parametrize("kv_length", ["given", "read back"])
def test_rounds_with_a_cache(case, kv_length):
    for prompt in PROMPTS:
        cache = case.draft.new_cache(1)
        for round_number in ROUNDS:
            positions = case(prompt, round_number, "draft_position_ids")
            block = case.draft.draft_block(
                case(prompt, round_number, "context_hidden"),
                case(prompt, round_number, "draft_input_ids")[:, 0],
                positions,
                cache=cache,
                kv_length=int(positions[0, -1]) + 1 if kv_length == "given" else None,
            )
            assert_block(case, prompt, round_number, block)
            assert cache.lengths.tolist() == [int(positions[0, -7])]


def test_extend_context_does_what_forward_does(case):
    for prompt in PROMPTS:
        cache = case.draft.new_cache(1)
        for round_number in ROUNDS:
            context = case(prompt, round_number, "context_hidden")[0]
            positions = case(prompt, round_number, "draft_position_ids")[0]
            slots, row = positions[: len(context)], torch.zeros(len(context), dtype=torch.long)
            cache.reserve(int(positions[-1]) + 1)
            case.draft.extend_context(context, slots, cache, row, slots, lengths=positions[None, -7])
            anchor = case(prompt, round_number, "draft_input_ids")[:, 0]
            block = case.draft.draft_block(None, anchor, positions[None, -7:], cache=cache)
            assert_block(case, prompt, round_number, block)


def ragged_context(case, cache, round_number, order, surplus=0):
    """Writes one round's context of the prompts in `order`, shuffled, `surplus` rejected tokens behind each."""
    states, rows, slots, lengths = [], [], [], []
    for row, prompt in enumerate(order):
        context = case(prompt, round_number, "context_hidden")[0]
        start = int(case(prompt, round_number, "draft_position_ids")[0, 0])
        lengths.append(start + len(context))
        states += [context, torch.full((surplus, context.shape[1]), 9.0)]
        rows.append(torch.full((len(context) + surplus,), row))
        slots.append(torch.arange(start, start + len(context) + surplus))
    states, rows, slots = torch.cat(states), torch.cat(rows), torch.cat(slots)
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    cache.reserve(max(lengths) + max(7, surplus))
    case.draft.extend_context(
        states[shuffled], slots[shuffled], cache, rows[shuffled], slots[shuffled], lengths=torch.tensor(lengths)
    )
    return max(lengths) + 7


@pytest.mark.parametrize("slack", [0, 40], ids=["exact kv_length", "bound"])
def test_ragged_batch_equals_each_prompt_alone(case, slack):
    order = [0, 1, 2]
    cache = DraftCache(case.draft.config, 3, slots=8)
    for round_number in ROUNDS:
        kv_length = ragged_context(case, cache, round_number, order, surplus=3 if slack else 0) + slack
        anchors = torch.cat([case(prompt, round_number, "draft_input_ids")[:, 0] for prompt in order])
        positions = torch.cat([case(prompt, round_number, "draft_position_ids")[:, -7:] for prompt in order])
        block = case.draft.draft_block(None, anchors, positions, cache=cache, kv_length=kv_length)
        for row, prompt in enumerate(order):
            assert_block(case, prompt, round_number, block, row)
        # Rows may change places between rounds.
        cache.keep([2, 0, 1])
        order = [order[2], order[0], order[1]]
        assert cache.rows.tolist() == order


def test_every_round_of_the_greedy_run(case):
    """Dozens of blocks: the target's states of the whole output, the draft's cache carried from round to round."""
    loader = getattr(transformers, "AutoModelForCausalLM" if "qwen3" in case.name else "AutoModelForImageTextToText")
    target = loader.from_pretrained(case.target_folder).eval()
    taps = case.draft.config.target_layer_ids
    for prompt, sample in enumerate(case.runs["greedy_thr0.0"]["samples"]):
        ids = torch.tensor([sample["output_ids"]])
        with torch.no_grad():
            states = target(input_ids=ids, output_hidden_states=True).hidden_states
        states = torch.cat([states[tap + 1] for tap in taps], dim=-1)
        close(states[:, : case(prompt, 0, "context_hidden").shape[1]], case(prompt, 0, "context_hidden"))
        cache, done = case.draft.new_cache(1), 0
        for recorded in sample["rounds"]:
            start = recorded["start"]
            if start > states.shape[1]:
                break  # the last round may lie beyond the budget, where the output was cut
            block = case.draft.draft_block(
                states[:, done:start],
                torch.tensor([recorded["anchor_token"]]),
                torch.arange(done, start + 7)[None],
                cache=cache,
                kv_length=start + 7,
            )
            assert block.tokens[0].tolist() == recorded["sampled_draft_tokens"]
            if block.confidence_logits is not None:
                close(block.confidence_logits[0], torch.tensor(recorded["confidence_logits_full_block"]))
            done = start


def test_training_forward_with_its_dense_mask(case):
    """All anchors of a sequence at once, one mask per query: what the training step runs."""
    data = {name[6:]: tensor for name, tensor in case.tensors.items() if name.startswith("train.")}
    if not data:
        pytest.skip("the small golden subset has no training tensors; set DSPARK_GOLDEN to the full set")
    draft, rows = case.draft, torch.arange(2)[:, None, None]
    positions = data["anchor_positions"][..., None] + torch.arange(8)
    tokens = data["input_ids"][rows, positions.clamp(max=31)]  # [2, 8 blocks, anchor and 7 labels]
    block_ids = torch.full((2, 8, 7), draft.config.mask_token_id)
    block_ids[..., 0] = torch.where(data["block_keep_mask"], tokens[..., 0], draft.config.mask_token_id)
    with torch.no_grad():
        output = draft(
            block_ids.flatten(1),
            data["target_hidden_states"],
            data["position_ids"],
            attention_mask=data["attention_mask_dense"].bool(),
        )
        kept = data["block_keep_mask"]
        hidden, logits = output.last_hidden_state.unflatten(1, (8, 7)), output.base_logits.unflatten(1, (8, 7))
        close(hidden[kept], data["backbone_hidden"].unflatten(1, (8, 7))[kept])
        previous = tokens[..., :7]
        if draft.markov_head is not None:
            logits = logits + draft.markov_head.bias_teacher_forced(previous, hidden)
        close(logits[kept], data["draft_logits"][kept])
        if draft.confidence_head is not None:
            confidence = draft.confidence_head(hidden, draft.markov_head.markov_w1(previous))
            close(confidence[kept], data["confidence_pred"][kept])
