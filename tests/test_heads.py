"""Markov and confidence heads against slow twins: the paper's equations, one number at a time."""

import math

import pytest
import torch

from dspark_hf import DSparkConfig
from dspark_hf.heads import ConfidenceHead, MarkovHead

HIDDEN, RANK, VOCAB, DRAFT_VOCAB = 6, 3, 11, 7


def config(head_type="vanilla", **changes):
    fields = dict(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        markov_rank=RANK,
        markov_head_type=head_type,
        mask_token_id=1,
        target_layer_ids=[0],
    )
    return DSparkConfig(**{**fields, **changes})


def make(head_class, *args, **kwargs):
    torch.manual_seed(0)
    head = head_class(config(*args, **kwargs)).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head.requires_grad_(False)


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


def matvec(matrix, vector, bias=None):
    """Plain matrix times vector, plus bias."""
    sums = [sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix.tolist()]
    return sums if bias is None else [s + b for s, b in zip(sums, bias.tolist(), strict=True)]


def twin_block(head, prev_ids, hidden):
    """Biases of one block: eq. 5, its gated form, and eq. 6, with Python floats."""
    state = [0.0] * RANK
    biases = []
    for token, h in zip(prev_ids.tolist(), hidden.tolist(), strict=True):
        e = head.markov_w1.weight[token].tolist()
        if head.head_type == "vanilla":
            latent = e
        elif head.head_type == "gated":
            gate = matvec(head.gate_proj.weight, h + e, head.gate_proj.bias)
            latent = [sigmoid(g) * x for g, x in zip(gate, e, strict=True)]
        else:
            joint = matvec(head.joint_proj.weight, state + e + h, head.joint_proj.bias)
            gate, candidate, output = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
            latent = [math.tanh(o) for o in output]
            state = [
                sigmoid(g) * s + (1 - sigmoid(g)) * math.tanh(c) for g, s, c in zip(gate, state, candidate, strict=True)
            ]
        biases.append(matvec(head.markov_w2.weight, latent))
    return torch.tensor(biases, dtype=torch.double)


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("rows", [1, 3])
def test_markov_step_and_teacher_forcing_equal_the_twin(head_type, rows):
    head = make(MarkovHead, head_type)
    prev_ids = torch.randint(0, VOCAB, (rows, 5))
    hidden = torch.randn(rows, 5, HIDDEN, dtype=torch.double)
    expected = torch.stack([twin_block(head, ids, h) for ids, h in zip(prev_ids, hidden, strict=True)])
    torch.testing.assert_close(head.bias_teacher_forced(prev_ids, hidden), expected)
    state = head.initial_state(hidden)
    for slot in range(5):
        bias, embedding, state = head.step(prev_ids[:, slot], hidden[:, slot], state)
        torch.testing.assert_close(bias, expected[:, slot])
        torch.testing.assert_close(embedding, head.markov_w1.weight[prev_ids[:, slot]])


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_teacher_forcing_takes_any_leading_axes(head_type):
    head = make(MarkovHead, head_type)
    prev_ids = torch.randint(0, VOCAB, (2, 4, 5))
    hidden = torch.randn(2, 4, 5, HIDDEN, dtype=torch.double)
    flat = head.bias_teacher_forced(prev_ids.flatten(0, 1), hidden.flatten(0, 1))
    torch.testing.assert_close(head.bias_teacher_forced(prev_ids, hidden), flat.unflatten(0, (2, 4)))


def test_only_the_rnn_head_has_a_state():
    hidden = torch.zeros(2, 5, HIDDEN, dtype=torch.double)
    assert make(MarkovHead, "vanilla").initial_state(hidden) is None
    assert make(MarkovHead, "gated").initial_state(hidden) is None
    assert make(MarkovHead, "rnn").initial_state(hidden).tolist() == [[0.0] * RANK] * 2


def test_rnn_state_goes_on_without_a_bias():
    head = make(MarkovHead, "rnn")
    hidden = torch.randn(2, HIDDEN, dtype=torch.double)
    state, prev_ids = torch.randn(2, RANK, dtype=torch.double), torch.tensor([3, 4])
    torch.testing.assert_close(head.advance(prev_ids, hidden, state), head.step(prev_ids, hidden, state)[2])


def test_shapes_follow_both_vocabularies():
    shapes = {name: tuple(tensor.shape) for name, tensor in make(MarkovHead, "rnn").state_dict().items()}
    assert shapes == {
        "markov_w1.weight": (VOCAB, RANK),
        "markov_w2.weight": (DRAFT_VOCAB, RANK),
        "joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN),
        "joint_proj.bias": (3 * RANK,),
    }
    assert set(make(MarkovHead, "gated").state_dict()) - set(shapes) == {"gate_proj.weight", "gate_proj.bias"}


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_equals_the_twin(with_markov):
    head = make(ConfidenceHead, confidence_head_with_markov=with_markov)
    hidden = torch.randn(2, 5, HIDDEN, dtype=torch.double)
    embedding = torch.randn(2, 5, RANK, dtype=torch.double)
    logits = head(hidden, embedding)
    assert logits.shape == (2, 5)
    for row in range(2):
        for slot in range(5):
            features = hidden[row, slot].tolist() + (embedding[row, slot].tolist() if with_markov else [])
            (expected,) = matvec(head.proj.weight, features, head.proj.bias)
            assert logits[row, slot].item() == pytest.approx(expected)
    if not with_markov:
        torch.testing.assert_close(head(hidden, None), logits)


def test_confidence_never_sees_the_token_of_its_own_slot():
    """The lossless rule: c_k may depend on tokens before slot k only."""
    torch.manual_seed(0)
    markov, confidence = make(MarkovHead), make(ConfidenceHead)
    hidden = torch.randn(1, 5, HIDDEN, dtype=torch.double)
    tokens = torch.randint(0, VOCAB, (1, 6))  # anchor, then the tokens of slots 0..4
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % VOCAB  # the token of slot 2
    before, after = (confidence(hidden, markov.markov_w1(ids[:, :5])) for ids in (tokens, changed))
    assert torch.equal(before[0, :3], after[0, :3])
    assert not torch.equal(before[0, 3], after[0, 3])
