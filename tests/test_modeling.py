"""The draft model where the golden set does not reach: layer variants, sliding windows, vocabularies, sharing."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.configuration_dspark import SCHEDULES, validate_generation_config
from dspark_hf.draft_cache import GROWTH
from dspark_hf.layers import DSparkRotaryEmbedding
from dspark_hf.sharing import SharedWeights

VOCAB, HIDDEN, TAPS = 50, 16, [0, 2]


def config(**changes):
    fields = dict(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        block_size=5,
        mask_token_id=49,
        target_layer_ids=TAPS,
        num_target_layers=4,
        markov_rank=3,
    )
    return DSparkConfig(**{**fields, **changes})


def draft(seed=0, **changes):
    torch.manual_seed(seed)
    model = DSparkDraftModel(config(**changes)).eval()
    for name, parameter in model.named_parameters():
        # Wide weights, and no all-one norms or zero biases, so that a mistake anywhere shows.
        noise = torch.randn_like(parameter)
        parameter.data = 1.0 + 0.2 * noise if "norm" in name else 0.4 * noise
    return model.requires_grad_(False)


def context(rows, length, seed=1):
    return torch.randn(rows, length, HIDDEN * len(TAPS), generator=torch.Generator().manual_seed(seed))


def block_ids(rows):
    return torch.tensor([[7 + row, 49, 49, 49, 49] for row in range(rows)])


def close(actual, expected, atol=2e-5):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-4)


# A slow twin of the backbone: one query, one head, one key at a time ----------------------------------------


def twin_norm(weight, x, eps):
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return normed if weight is None else weight * normed


def twin_rotate(x, position, interleaved=False, theta=10000.0):
    half = x.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[-1])
        c, s = math.cos(angle), math.sin(angle)
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return out


def visible(cfg, layer_type, query, key, length):
    """Whether block slot `query` sees key `key` of context and block, context first."""
    if layer_type == "full_attention":
        return True
    if cfg.sliding_window_per_slot and length + query - key >= cfg.sliding_window:
        return False
    if key < length:
        return cfg.sliding_window_per_slot or key >= length - cfg.sliding_window
    return cfg.sliding_window_non_causal or key - length <= query


def twin_backbone(model, ids, taps, first_position):
    """Hidden states [K, H] of one row: `ids` [K] over the context `taps` [C, T·H]."""
    cfg = model.config
    ctx = twin_norm(model.hidden_norm.weight, taps @ model.fc.weight.T, cfg.rms_norm_eps)
    x = F.embedding(ids, model.embed_tokens.weight) * cfg.embedding_scale
    length, count = len(taps), len(ids)
    scale = 1.0 if cfg.backbone == "gemma4" else cfg.head_dim**-0.5
    for layer, layer_type in zip(model.layers, cfg.layer_types):
        attn, states = layer.self_attn, twin_norm(layer.input_layernorm.weight, x, cfg.rms_norm_eps)
        both = torch.cat([ctx, states])

        def heads(linear, inputs):
            return linear(inputs).unflatten(-1, (-1, cfg.head_dim))

        q, k = heads(attn.q_proj, states), heads(attn.k_proj, both)
        v = k if attn.v_proj is None else heads(attn.v_proj, both)
        if cfg.qk_norm:
            q = twin_norm(attn.q_norm.weight, q, cfg.rms_norm_eps)
            k = twin_norm(attn.k_norm.weight, k, cfg.rms_norm_eps)
        if cfg.v_norm:
            v = twin_norm(None, v, cfg.rms_norm_eps)
        pairs = cfg.rope_interleaved
        k = torch.stack([twin_rotate(row, first_position + i, pairs) for i, row in enumerate(k)])
        q = torch.stack([twin_rotate(row, first_position + length + i, pairs) for i, row in enumerate(q)])
        mixed = torch.zeros(count, cfg.num_attention_heads, cfg.head_dim)
        for slot in range(count):
            seen = [key for key in range(length + count) if visible(cfg, layer_type, slot, key, length)]
            for head in range(cfg.num_attention_heads):
                kv_head = head // (cfg.num_attention_heads // cfg.num_key_value_heads)
                weights = torch.softmax(k[seen, kv_head] @ q[slot, head] * scale, dim=0)
                mixed[slot, head] = weights @ v[seen, kv_head]
        mixed = attn.o_proj(mixed.flatten(1))
        mlp, act = layer.mlp, F.silu if cfg.hidden_act == "silu" else lambda z: F.gelu(z, approximate="tanh")
        if cfg.backbone == "gemma4":
            x = x + twin_norm(layer.post_attention_layernorm.weight, mixed, cfg.rms_norm_eps)
            inner = twin_norm(layer.pre_feedforward_layernorm.weight, x, cfg.rms_norm_eps)
            inner = mlp.down_proj(act(mlp.gate_proj(inner)) * mlp.up_proj(inner))
            x = (x + twin_norm(layer.post_feedforward_layernorm.weight, inner, cfg.rms_norm_eps)) * layer.layer_scalar
        else:
            x = x + mixed
            inner = twin_norm(layer.post_attention_layernorm.weight, x, cfg.rms_norm_eps)
            x = x + mlp.down_proj(act(mlp.gate_proj(inner)) * mlp.up_proj(inner))
    return twin_norm(model.norm.weight, x, cfg.rms_norm_eps)


SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=4)
VARIANTS = {
    "qwen3": {},
    "llama": dict(qk_norm=False),
    "qwen2": dict(qk_norm=False, attention_bias=True, attention_output_bias=False),
    "all biases": dict(attention_bias=True, mlp_bias=True),
    "one kv head": dict(num_key_value_heads=1),
    "no grouping": dict(num_key_value_heads=4),
    "sliding": SLIDING,
    "sliding non-causal": dict(SLIDING, sliding_window_non_causal=True),
    "sliding per slot": dict(SLIDING, sliding_window_per_slot=True),
    "window within the block": dict(
        SLIDING, sliding_window=2, sliding_window_per_slot=True, sliding_window_non_causal=True
    ),
    "interleaved": dict(rope_interleaved=True),
    "gemma4": dict(backbone="gemma4", hidden_act="gelu_pytorch_tanh", final_logit_softcapping=5.0),
    "gemma4 k=v": dict(backbone="gemma4", k_eq_v=True, num_key_value_heads=1),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_backbone_equals_the_twin(variant):
    model = draft(**VARIANTS[variant])
    if model.config.backbone == "gemma4":
        for layer in model.layers:
            layer.layer_scalar.fill_(0.7)
    for rows, length in ((2, 9), (1, 0), (1, 3)):
        taps = context(rows, length)
        positions = torch.arange(2, 2 + length + 5).expand(rows, -1)
        output = model(block_ids(rows), taps if length else None, positions)
        for row in range(rows):
            close(output.last_hidden_state[row], twin_backbone(model, block_ids(rows)[row], taps[row], 2))
        expected = output.last_hidden_state @ model.lm_head.weight.T
        cap = model.config.final_logit_softcapping
        close(output.base_logits, expected if cap is None else cap * torch.tanh(expected / cap))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("slack", [0, 9])
def test_ragged_cache_equals_each_row_alone(variant, slack):
    """Lengths differ, positions start anywhere, the context comes in two pieces, and one row leaves in between."""
    model, lengths, starts = draft(**VARIANTS[variant]), [9, 2, 6], [0, 11, 3]
    taps = [context(1, length + 3, seed=length)[0] for length in lengths]
    cache = model.new_cache(3)
    rows_left = [0, 1, 2]
    for extra in (0, 3):
        new = [(0, lengths[r]) if extra == 0 else (lengths[r], lengths[r] + 3) for r in rows_left]
        slots = torch.cat([torch.arange(a, b) for a, b in new])
        rows = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(new)])
        positions = slots + torch.tensor([starts[r] for r in rows_left])[rows]
        cache.reserve(30)
        states = torch.cat([taps[r][a:b] for r, (a, b) in zip(rows_left, new)])
        model.extend_context(
            states, positions, cache, rows, slots, lengths=torch.tensor([lengths[r] + extra for r in rows_left])
        )
        block = torch.stack([block_ids(3)[r] for r in rows_left])
        firsts = cache.lengths + torch.tensor([starts[r] for r in rows_left])
        kv_length = max(lengths[r] for r in rows_left) + extra + 5 + slack
        output = model(block, None, firsts[:, None] + torch.arange(5), cache=cache, kv_length=kv_length)
        for i, r in enumerate(rows_left):
            known = lengths[r] + extra
            alone = model(
                block[i : i + 1], taps[r][None, :known], torch.arange(starts[r], starts[r] + known + 5)[None]
            )
            close(output.last_hidden_state[i], alone.last_hidden_state[0])
            close(output.base_logits[i], alone.base_logits[0])
        if extra == 0:
            rows_left = [2, 1]
            cache.keep(torch.tensor(rows_left))
    assert cache.rows.tolist() == [2, 1]


@pytest.mark.parametrize("variant", ["qwen3", "sliding"])
def test_hidden_context_is_not_there(variant):
    model, taps = draft(**VARIANTS[variant]), context(1, 6)
    padded = torch.cat([torch.full((1, 3, taps.shape[-1]), 50.0), taps], dim=1)
    positions = torch.cat([torch.zeros(3), torch.arange(11)]).long()[None]
    mask = torch.tensor([[False] * 3 + [True] * 11])
    output = model(block_ids(1), padded, positions, attention_mask=mask)
    close(output.base_logits, model(block_ids(1), taps, torch.arange(11)[None]).base_logits)


def test_masks_by_layer_type():
    model, taps = draft(**SLIDING), context(1, 9)
    expected = model(block_ids(1), taps, torch.arange(14)[None]).base_logits
    masks = {
        kind: torch.tensor([[visible(model.config, kind, q, k, 9) for k in range(14)] for q in range(5)])[None]
        for kind in ("sliding_attention", "full_attention")
    }
    close(model(block_ids(1), taps, torch.arange(14)[None], attention_mask=masks).base_logits, expected)


def test_rectangular_context_is_appended_to_the_cache():
    model, taps = draft(), context(2, 9)
    cache = model.new_cache(2, uniform=True)
    for a, b in ((0, 4), (4, 9)):
        output = model(block_ids(2), taps[:, a:b], torch.arange(a, b + 5).expand(2, -1), cache=cache)
        assert cache.lengths.tolist() == [b, b]
        expected = model(block_ids(2), taps[:, :b], torch.arange(b + 5).expand(2, -1))
        close(output.base_logits, expected.base_logits)


def test_positions_of_the_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"`position_ids` must be \[1, 9\]"):
        draft()(block_ids(1), context(1, 4), torch.arange(5)[None])


def test_cache_grows_in_blocks_and_keeps_its_contents():
    model = draft()
    cache = model.new_cache(2, slots=3)
    assert cache.capacity == GROWTH
    rows, slots = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1])
    model.extend_context(context(1, 3)[0], slots, cache, rows, slots, lengths=torch.tensor([1, 2]))
    before = [keys[:, :2].clone() for keys in cache.keys]
    cache.reserve(GROWTH + 1)
    assert cache.capacity == 2 * GROWTH
    assert all(torch.equal(old, new[:, :2]) for old, new in zip(before, cache.keys))
    # Free slots are masked, but a mask multiplies by 0, which does not remove a NaN.
    assert not any(buffer[:, 2:].any() for buffer in (*cache.keys, *cache.values))
    cache.reserve(5)
    assert cache.capacity == 2 * GROWTH


def test_a_block_leaves_the_context_alone():
    model = draft()
    cache = model.new_cache(2, uniform=True)
    model(block_ids(2), context(2, 6), torch.arange(11).expand(2, -1), cache=cache)
    before = [keys[:, :6].clone() for keys in cache.keys]
    model(block_ids(2) - 3, None, torch.arange(6, 11).expand(2, -1), cache=cache)
    assert all(torch.equal(old, new[:, :6]) for old, new in zip(before, cache.keys))
    assert cache.lengths.tolist() == [6, 6]


# Drafting ---------------------------------------------------------------------------------------------------


def twin_draft(model, hidden, anchor, first, count):
    """Tokens, logits and confidences of one row, greedily, from hidden states [K, H]."""
    head, state, prev = model.markov_head, None, anchor
    tokens, logits, confidences = [], [], []
    if head is not None and head.head_type == "rnn":
        state = torch.zeros(1, head.rank)
        if first:
            _, _, state = head.step(torch.tensor([prev]), hidden[None, 0], state)
    for slot in range(first, first + count):
        scores = model.lm_head.weight @ hidden[slot]
        if head is not None:
            bias, embedding, state = head.step(torch.tensor([prev]), hidden[None, slot], state)
            scores = scores + bias[0]
            confidences.append(model.confidence_head(hidden[slot], embedding[0]))
        choice = scores.argmax().item()
        prev = choice if model.d2t is None else choice + model.d2t[choice].item()
        tokens.append(prev)
        logits.append(scores)
    return tokens, torch.stack(logits), confidences


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("anchor_first", [True, False])
@pytest.mark.parametrize("reduced", [False, True])
def test_draft_block_equals_the_twin(head_type, anchor_first, reduced):
    changes = dict(markov_head_type=head_type, sample_from_anchor=anchor_first)
    model = draft(**changes, draft_vocab_size=20 if reduced else None)
    if reduced:
        model.d2t.copy_(torch.arange(20))  # draft id i is target id 2 i
        assert model.draft_to_target.tolist() == list(range(0, 40, 2))
    taps, positions, anchors = context(3, 4), torch.arange(9).expand(3, -1), torch.tensor([7, 8, 9])
    hidden = model(block_ids(3), taps, positions).last_hidden_state
    block = model.draft_block(taps, anchors, positions)
    count = 5 if anchor_first else 4
    assert model.config.num_draft_tokens == count
    assert block.tokens.shape == (3, count) and block.logits.shape == (3, count, 20 if reduced else VOCAB)
    for row in range(3):
        tokens, logits, confidences = twin_draft(model, hidden[row], 7 + row, 0 if anchor_first else 1, count)
        assert block.tokens[row].tolist() == tokens
        close(block.logits[row], logits)
        close(block.confidence_logits[row], torch.stack(confidences))
    short = model.draft_block(taps, anchors, positions, num_tokens=2)
    assert torch.equal(short.tokens, block.tokens[:, :2])
    close(short.logits, block.logits[:, :2])
    close(short.confidence_logits, block.confidence_logits[:, :2])


def test_sampler_draws_every_slot_and_is_followed():
    model, seen = draft(draft_vocab_size=20), []
    model.d2t.copy_(torch.arange(20) + 3)

    def sampler(logits, slot):
        seen.append((slot, logits.clone()))
        return torch.full((2,), slot + 1)

    taps, positions = context(2, 4), torch.arange(9).expand(2, -1)
    block = model.draft_block(taps, torch.tensor([7, 8]), positions, sampler=sampler)
    assert [slot for slot, _ in seen] == [0, 1, 2, 3, 4]
    close(torch.stack([logits for _, logits in seen], dim=1), block.logits)
    assert block.tokens.tolist() == [[2 * (slot + 1) + 3 for slot in range(5)]] * 2
    bias = model.markov_head.markov_w2(model.markov_head.markov_w1(torch.tensor([5])))  # slot 0 drew draft id 1
    base = model(block_ids(2), taps, positions).base_logits
    close(block.logits[:, 1], base[:, 1] + bias)


def test_draft_without_heads():
    model = draft(markov_rank=0, enable_confidence_head=False)
    taps, positions = context(2, 4), torch.arange(9).expand(2, -1)
    block = model.draft_block(taps, torch.tensor([7, 8]), positions)
    assert block.confidence_logits is None
    close(block.logits, model(block_ids(2), taps, positions).base_logits)


def test_confidence_head_without_a_markov_head():
    model = draft(markov_rank=0, confidence_head_with_markov=False)
    block = model.draft_block(context(1, 4), torch.tensor([7]), torch.arange(9)[None])
    hidden = model(block_ids(1), context(1, 4), torch.arange(9)[None]).last_hidden_state
    close(block.confidence_logits, model.confidence_head(hidden, None))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_shorter_block_reaches_the_head_in_one_piece(rows):
    """Cut out of the whole block with its strides kept, even a single row would cost a copy of the head's weight."""
    model, seen = draft(), []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    anchors, positions = torch.full((rows,), 7), torch.arange(9).expand(rows, -1)
    model.draft_block(context(rows, 4), anchors, positions, num_tokens=3)
    (states,) = seen
    assert states.shape == (rows, 3, HIDDEN) and states.stride() == (3 * HIDDEN, HIDDEN, 1)


def test_num_tokens_below_one_is_refused():
    with pytest.raises(ValueError, match="`num_tokens` must be at least 1"):
        draft().draft_block(None, torch.tensor([7]), torch.arange(5)[None], num_tokens=0)


def test_an_anchor_the_draft_has_never_heard_of():
    """Targets grow tokens after the draft was trained; such an anchor must not stop drafting."""
    model = draft()
    known = model.draft_block(None, torch.tensor([VOCAB - 1]), torch.arange(5)[None])
    block = model.draft_block(None, torch.tensor([VOCAB + 3]), torch.arange(5)[None])
    assert torch.equal(known.tokens, block.tokens)


def test_a_round_reads_nothing_back_from_the_device(monkeypatch):
    """With `kv_length` given, neither drafting nor extending the context may wait for the device."""
    model = draft(markov_head_type="rnn", draft_vocab_size=20, **SLIDING)
    cache = model.new_cache(2, slots=20)

    def refuse(*args, **kwargs):
        raise AssertionError("read back to the host")

    for name in ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "nonzero", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    rows, slots = torch.arange(2).repeat_interleave(3), torch.arange(3).repeat(2)
    model.extend_context(context(1, 6)[0], slots, cache, rows, slots, lengths=cache.lengths + 3)
    positions = cache.lengths[:, None] + torch.arange(5)
    model.draft_block(None, cache.rows, positions, cache=cache, kv_length=20)
    cache.keep(cache.rows)
    with pytest.raises(AssertionError, match="read back"):
        model.draft_block(None, cache.rows, positions, cache=cache)


# Rotary embedding, dtypes -----------------------------------------------------------------------------------

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_embedding_equals_transformers(rope):
    ours = config(head_dim=16, rope_parameters=ROPES[rope], max_position_embeddings=256)
    theirs = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters=dict(ROPES[rope]), max_position_embeddings=256
    )
    positions = torch.arange(0, 250, 7)[None]
    expected = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    for actual, wanted in zip(DSparkRotaryEmbedding(ours)(positions, torch.float32), expected):
        torch.testing.assert_close(actual, wanted)


def test_rotary_frequencies_stay_in_float32():
    model = draft().bfloat16()
    cos, _ = model.rotary(torch.tensor([[5000]]), torch.float32)
    assert torch.equal(cos, draft().rotary(torch.tensor([[5000]]), torch.float32)[0])


def test_half_precision_is_close():
    model, taps = draft(), context(2, 6)
    half = copy.deepcopy(model).bfloat16()
    output, expected = (m(block_ids(2), taps, torch.arange(11).expand(2, -1)) for m in (half, model))
    assert output.base_logits.dtype == torch.bfloat16
    error = (output.last_hidden_state.float() - expected.last_hidden_state).norm() / expected.last_hidden_state.norm()
    assert error < 0.05


def test_gradients_reach_every_trained_weight():
    model = draft(markov_head_type="rnn", backbone="gemma4").requires_grad_(True)
    output = model(block_ids(2), context(2, 6), torch.arange(11).expand(2, -1))
    prev = torch.tensor([[1, 2, 3, 4, 5]] * 2)
    logits = output.base_logits + model.markov_head.bias_teacher_forced(prev, output.last_hidden_state)
    confidence = model.confidence_head(output.last_hidden_state, model.markov_head.markov_w1(prev))
    (logits.logsumexp(-1).mean() + confidence.mean()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


# Target -----------------------------------------------------------------------------------------------------


def target(seed=3, **changes):
    fields = dict(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).eval()


def test_borrowed_weights_are_the_targets_and_are_not_kept():
    model, lender = draft(stores_embedding=False, stores_head=False), target()
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in model.state_dict())
    shared = model.shared_weights(lender)
    assert shared.embedding is lender.get_input_embeddings().weight and shared.head is lender.lm_head
    owner = draft()
    owner.load_state_dict(model.state_dict(), strict=False)
    owner.embed_tokens.weight.data.copy_(shared.embedding)
    owner.lm_head.weight.data.copy_(lender.lm_head.weight)
    arguments = (context(2, 4), torch.tensor([7, 8]), torch.arange(9).expand(2, -1))
    block = model.draft_block(*arguments, shared=shared)
    expected = owner.draft_block(*arguments)
    assert torch.equal(block.tokens, expected.tokens)
    close(block.logits, expected.logits)
    other = model.shared_weights(target(seed=4))
    assert not torch.equal(model.draft_block(*arguments, shared=other).logits, block.logits)
    close(model.draft_block(*arguments, shared=shared).logits, block.logits)


def test_a_reduced_vocabulary_borrows_its_rows_of_the_head():
    reduced = {"draft_vocab_size": 20, "stores_embedding": False}
    model, lender, tokens = draft(**reduced, stores_head=False), target(), torch.arange(3, 43, 2)
    owner = draft(**reduced, stores_head=True)
    owner.load_state_dict(model.state_dict(), strict=False)
    for each in (model, owner):
        each.d2t.copy_(tokens - torch.arange(20))
    owner.lm_head.weight.data.copy_(lender.lm_head.weight[tokens])
    assert "lm_head.weight" not in model.state_dict()
    arguments = (context(2, 4), torch.tensor([7, 8]), torch.arange(9).expand(2, -1))
    shared = model.shared_weights(lender)
    close(model.draft_block(*arguments, shared=shared).logits, owner.draft_block(*arguments, shared=shared).logits)
    assert model.shared_weights(lender).head is shared.head, "taken once"
    assert not shared.head.weight.requires_grad
    other = target(seed=4)
    assert torch.equal(model.shared_weights(other).head.weight, other.lm_head.weight[tokens])
    assert model.shared_weights(lender).head is shared.head, "one for each target"
    with torch.no_grad():
        lender.lm_head.weight.mul_(2.0)
    again = model.shared_weights(lender).head.weight
    assert torch.equal(again, lender.lm_head.weight[tokens]), "the target has been trained since"
    model.d2t.add_(1)
    assert torch.equal(model.shared_weights(lender).head.weight, lender.lm_head.weight[tokens + 1])


@pytest.mark.parametrize("missing", ["stores_embedding", "stores_head"])
def test_without_shared_weights_the_missing_part_is_named(missing):
    model = draft(**{missing: False})
    with pytest.raises(ValueError, match="embedding" if missing == "stores_embedding" else "head"):
        model.draft_block(None, torch.tensor([7]), torch.arange(5)[None])


def test_padding_columns_of_a_borrowed_head_are_dropped():
    model = draft(stores_embedding=False, stores_head=False)
    shared = model.shared_weights(target(vocab_size=64))
    assert model.draft_block(None, torch.tensor([7]), torch.arange(5)[None], shared=shared).logits.shape[-1] == VOCAB


def test_borrowed_head_of_another_dtype():
    model = draft(stores_embedding=False, stores_head=False)
    shared = model.shared_weights(target().bfloat16())
    block = model.draft_block(context(1, 4), torch.tensor([7]), torch.arange(9)[None], shared=shared)
    assert block.logits.dtype == torch.bfloat16 and block.confidence_logits.dtype == torch.float32


def test_equal_copies_are_pointed_to_the_targets_memory(tmp_path):
    lender, model = target(tie_word_embeddings=True), draft()
    model.embed_tokens.weight.data.copy_(lender.get_input_embeddings().weight)
    model.lm_head.weight.data.copy_(lender.lm_head.weight)
    shared = model.shared_weights(lender)
    assert model.embed_tokens.weight.data_ptr() == lender.get_input_embeddings().weight.data_ptr()
    assert model.lm_head.weight.data_ptr() == lender.lm_head.weight.data_ptr()
    assert shared.embedding is model.embed_tokens.weight and shared.head is model.lm_head
    # Both now point to one tensor; a save still holds two.
    model.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))


@pytest.mark.parametrize("reason", ["training", "trainable"])
def test_copies_that_are_trained_stay_the_drafts_own(reason):
    lender, model = target(), draft()
    model.lm_head.weight.data.copy_(lender.lm_head.weight)
    model.train(reason == "training").requires_grad_(reason == "trainable")
    model.shared_weights(lender)
    assert model.lm_head.weight.data_ptr() != lender.lm_head.weight.data_ptr()
    model.eval().requires_grad_(False).shared_weights(lender)
    assert model.lm_head.weight.data_ptr() == lender.lm_head.weight.data_ptr()


def test_differing_copies_stay_the_drafts_own():
    model, lender = draft(), target()
    own = model.embed_tokens.weight
    for _ in range(2):
        shared = model.shared_weights(lender)
        assert shared.embedding is own and shared.head is model.lm_head


def test_a_copied_draft_does_not_copy_the_target():
    model, lender = draft(), target()
    model.shared_weights(lender)
    copied = copy.deepcopy(model)
    assert not any(isinstance(module, LlamaForCausalLM) for module in copied.modules())
    assert copied.generation_config.num_assistant_tokens == 5
    close(
        copied.draft_block(None, torch.tensor([7]), torch.arange(5)[None]).logits,
        model.draft_block(None, torch.tensor([7]), torch.arange(5)[None]).logits,
    )


def headless():
    return target().model


@pytest.mark.parametrize(
    ("lender", "message"),
    [
        (lambda: target(hidden_size=32), "width 32 differs from the draft's `hidden_size` 16"),
        (lambda: target(vocab_size=40), "40 rows are fewer than the draft's `vocab_size` 50"),
        (headless, "no `lm_head` and LlamaModel has no output embedding"),
        (lambda: target().to("meta"), "offloaded"),
    ],
)
def test_what_cannot_be_borrowed_is_refused(lender, message):
    with pytest.raises(ValueError, match=message):
        draft(stores_embedding=False, stores_head=False).shared_weights(lender())


@pytest.mark.parametrize(
    ("changes", "lender", "message"),
    [
        ({}, lambda: target(hidden_size=32), "`hidden_size` is 32.*`target_hidden_size` 16"),
        ({"num_target_layers": None}, lambda: target(num_hidden_layers=2), r"`target_layer_ids` \[0, 2\].*2 layers"),
        ({}, lambda: target(num_hidden_layers=5), "5 layers.*`num_target_layers` 4"),
        ({}, lambda: target(vocab_size=40), "vocabulary has 40 rows.*`vocab_size` 50"),
        ({}, lambda: target(vocab_size=5000), "vocabulary has 5000 rows.*`vocab_size` 50"),
        ({}, draft, "itself a DSpark draft"),
    ],
)
def test_targets_that_do_not_fit_are_refused(changes, lender, message):
    with pytest.raises(ValueError, match=message):
        draft(**changes).validate_target(lender())


def test_encoder_decoder_targets_are_refused():
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=HIDDEN, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="encoder-decoder"):
        draft().validate_target(t5)


def test_targets_that_fit_pass():
    draft().validate_target(target())
    draft().validate_target(target(vocab_size=64))


def test_shared_weights_can_be_made_by_hand():
    model = draft(stores_embedding=False, stores_head=False)
    shared = SharedWeights(embedding=torch.randn(VOCAB, HIDDEN), head=nn.Linear(HIDDEN, VOCAB))
    assert model(block_ids(1), None, torch.arange(5)[None], shared=shared).base_logits.shape == (1, 5, VOCAB)


# Configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "`mask_token_id` is missing"),
        ({"mask_token_id": VOCAB}, "`mask_token_id` .* outside the vocabulary"),
        ({"target_layer_ids": None}, "`target_layer_ids` is missing"),
        ({"target_layer_ids": [2, 1]}, "strictly increasing"),
        ({"target_layer_ids": [-2, 1]}, "strictly increasing from -1"),
        ({"target_layer_ids": [0, 4]}, "outside the target's `num_target_layers` 4"),
        ({"markov_rank": 0}, "`confidence_head_with_markov` needs a Markov head"),
        ({"markov_rank": -1}, "`markov_rank`"),
        ({"markov_head_type": "lstm"}, "`markov_head_type` must be one of"),
        ({"backbone": "gpt2"}, "`backbone` must be one of"),
        ({"block_size": 0}, "`block_size` must be a positive integer"),
        ({"block_size": 1, "sample_from_anchor": False}, "`block_size` must be at least 2"),
        ({"draft_vocab_size": 60}, "`draft_vocab_size` .* larger"),
        ({"num_key_value_heads": 3}, "must divide `num_attention_heads`"),
        ({"layer_types": ["full_attention"]}, "`layer_types` has 1 entries"),
        ({"layer_types": ["sliding_attention"] * 2}, "`sliding_window` must be a positive integer"),
        ({"layer_types": ["linear_attention"] * 2}, "`layer_types` must be one of"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one flat dictionary"),
        ({"head_dim": 7}, "`head_dim` must be even"),
        ({"confidence_calibration": {"temperature": [1.0]}}, "one finite number for each of the 5"),
        ({"confidence_calibration": {"temperature": [0.0] * 5}}, "must be positive"),
        ({"confidence_calibration": {"scale": [1.0] * 5}}, "knows 'temperature' and 'shift'"),
    ],
)
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_generation_defaults_follow_the_heads():
    knobs = draft().generation_config
    assert (knobs.num_assistant_tokens, knobs.assistant_confidence_threshold) == (5, 0.0)
    assert knobs.num_assistant_tokens_schedule == "throughput"
    knobs = draft(enable_confidence_head=False, sample_from_anchor=False).generation_config
    assert (knobs.num_assistant_tokens, knobs.num_assistant_tokens_schedule) == (4, "constant")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_assistant_tokens_schedule": "heuristic"}, "'constant', .*'throughput', got 'heuristic'"),
        ({"assistant_confidence_threshold": 1.5}, r"within \[0, 1\], got 1.5"),
        ({"assistant_confidence_threshold": -0.1}, r"within \[0, 1\]"),
        ({"assistant_confidence_threshold": float("nan")}, r"within \[0, 1\]"),
        ({"num_assistant_tokens": 0}, "at least 1, got 0"),
    ],
)
def test_bad_generation_settings_are_refused(knobs, message):
    model = draft()
    for name, value in knobs.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=message):
        validate_generation_config(model.generation_config, model.config)


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"constant"}))
def test_schedules_that_need_confidences(schedule):
    model = draft(enable_confidence_head=False)
    model.generation_config.num_assistant_tokens_schedule = schedule
    with pytest.raises(ValueError, match="needs a confidence head"):
        validate_generation_config(model.generation_config, model.config)
    with_head = draft()
    with_head.generation_config.num_assistant_tokens_schedule = schedule
    validate_generation_config(with_head.generation_config, with_head.config)
