"""The training objective against the official code's numbers, and the fused loss against its plain twin."""

import dataclasses
import functools
import json
import subprocess
import sys

import pytest
import torch
from golden_set import CASES, ROOT, golden
from safetensors.torch import load_file
from torch import nn

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.sharing import SharedWeights
from dspark_hf.training.objective import (
    LossSettings,
    acceptance,
    block_mask,
    make_blocks,
    metrics_from_sums,
    plain_loss,
    sample_anchors,
    slot_weights,
)
from dspark_hf.training.step import TrainingStep, teacher_forced_latents

TOLERANCE = 1e-4


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@functools.cache
def training_case(name):
    """A golden case with its `train.*` tensors (prefix removed), numbers, and a draft of its own to train."""
    case, folder = golden(name), ROOT / name
    tensors, numbers = case.tensors, json.loads((folder / "golden.json").read_text()).get("train")
    if numbers is None:  # the small subset keeps them apart
        tensors, numbers = load_file(folder / "train.safetensors"), json.loads((folder / "train.json").read_text())
    draft = DSparkDraftModel.from_pretrained(folder / "draft").train()
    return draft, {key[6:]: value for key, value in tensors.items() if key.startswith("train.")}, numbers


@pytest.fixture(params=CASES)
def case(request):
    return training_case(request.param)


def settings_of(draft, numbers):
    alphas = numbers["alphas"]
    confidence = alphas["confidence_head_alpha"] if draft.confidence_head is not None else 0.0
    return LossSettings(alphas["ce_loss_alpha"], alphas["l1_loss_alpha"], confidence, alphas["loss_decay_gamma"])


class OwnHead:
    """The target's head as the golden run used it: the draft's frozen copy, soft cap included."""

    def __init__(self, draft):
        self.draft, self.vocab_size = draft, draft.config.vocab_size

    @torch.no_grad()
    def __call__(self, hidden):
        return self.draft.compute_base_logits(hidden)


def own_weights(draft):
    return SharedWeights(draft.embed_tokens.weight, draft.lm_head)


def blocks_of(draft, data):
    anchors, keep = sample_anchors(data["loss_mask"], 8, data["anchor_random_vals"])
    config = draft.config
    options = {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    return make_blocks(data["input_ids"], data["loss_mask"], anchors, keep, **options)


def test_anchors_blocks_and_mask(case):
    draft, data, _ = case
    blocks = blocks_of(draft, data)
    assert torch.equal(blocks.anchors, data["anchor_positions"])
    assert torch.equal(blocks.keep, data["block_keep_mask"])
    assert torch.equal(blocks.labels, data["target_ids"])
    assert torch.equal(blocks.supervised, data["eval_mask"])
    assert torch.equal(blocks.position_ids.flatten(1), data["position_ids"][:, 32:])
    assert torch.equal(block_mask(blocks, 32)[:, None], data["attention_mask_dense"].bool())


def test_uniforms_are_the_official_draw(case):
    draft, data, numbers = case
    torch.manual_seed(numbers["seed"])
    assert torch.equal(torch.rand(2, 31), data["anchor_random_vals"])


def test_forward_losses_and_metrics(case):
    draft, data, numbers = case
    blocks = blocks_of(draft, data)
    with torch.no_grad():
        output = draft(
            blocks.input_ids.flatten(1),
            data["target_hidden_states"],
            data["position_ids"],
            attention_mask=block_mask(blocks, 32),
        )
        close(output.last_hidden_state, data["backbone_hidden"])
        hidden, logits = output.last_hidden_state.unflatten(1, (8, 7)), output.base_logits.unflatten(1, (8, 7))
        if draft.markov_head is not None:
            logits = logits + draft.markov_head.bias_teacher_forced(blocks.previous_ids, hidden)
        rows = torch.arange(2)[:, None, None]
        target_logits = draft.compute_base_logits(data["target_last_hidden_states"][rows, blocks.label_sources])
        if "draft_logits" in data:
            close(logits, data["draft_logits"])
            close(target_logits, data["aligned_target_logits"])
        close(acceptance(logits, target_logits)[1], data["accept_rate"])
        confidence = None
        if draft.confidence_head is not None:
            embeddings = draft.markov_head.markov_w1(blocks.previous_ids)
            confidence = draft.confidence_head(hidden, embeddings)
            close(confidence, data["confidence_pred"])
        for number, wanted in enumerate(numbers["losses"]):
            settings = settings_of(draft, wanted)
            close(slot_weights(blocks.supervised, settings.decay), data[f"loss_weights.{number}"])
            losses = plain_loss(logits, target_logits, blocks.labels, blocks.supervised, confidence, settings)
            assert losses["loss"].item() == pytest.approx(wanted["total"], abs=TOLERANCE)
            assert losses["ce"].item() == pytest.approx(wanted["ce_loss"], abs=TOLERANCE)
            if settings.l1:
                assert losses["l1"].item() == pytest.approx(wanted["l1_loss"], abs=TOLERANCE)
            if confidence is not None:
                assert losses["confidence"].item() == pytest.approx(wanted["confidence_loss"], abs=TOLERANCE)


OFFICIAL_NAMES = {
    "tau": "tau_probabilistic",
    "confidence_error": "confidence_abs_error",
    "confidence_bias": "confidence_bias",
    "survival_bias": "confidence_cumprod_bias",
    "confidence": "confidence_loss",
    "ce": "ce_loss",
} | {f"accept@{slot}": f"accept_rate@{slot}" for slot in range(7)}


@pytest.mark.parametrize("chunk_size", [5, 1000])
def test_training_step(case, chunk_size):
    """The step that is trained: dummies cut, supervised slots only, fused loss; losses, metrics and all gradients."""
    draft, data, numbers = case
    inputs = ("input_ids", "loss_mask", "anchor_random_vals", "target_hidden_states", "target_last_hidden_states")
    for number, wanted in enumerate(numbers["losses"]):
        draft.zero_grad()
        settings, head = settings_of(draft, wanted), OwnHead(draft)
        step = TrainingStep(draft, own_weights(draft), head, settings, num_anchors=8, chunk_size=chunk_size)
        output = step(*(data[name] for name in inputs))
        assert output["loss"].item() == pytest.approx(wanted["total"], abs=TOLERANCE)
        metrics = metrics_from_sums({name: value for name, value in output.items() if name != "loss"})
        for name, official in OFFICIAL_NAMES.items():
            if f"train/{official}" in wanted["metrics"]:
                assert metrics[name] == pytest.approx(wanted["metrics"][f"train/{official}"], abs=TOLERANCE), name
        if number:
            continue
        output["loss"].backward()
        gradients = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
        assert set(gradients) == set(numbers["grad_norms"])
        for name, gradient in gradients.items():
            assert gradient.norm().item() == pytest.approx(numbers["grad_norms"][name], abs=TOLERANCE)
            if f"grad.{name}" in data:
                close(gradient, data[f"grad.{name}"])


# Without golden numbers -----------------------------------------------------------------------------------------------


def small_draft(**changes):
    fields = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=50,
        block_size=4,
        mask_token_id=49,
        target_layer_ids=[0, 1],
        markov_rank=8,
    )
    torch.manual_seed(0)
    draft = DSparkDraftModel(DSparkConfig(**(fields | changes))).train()
    if draft.d2t is not None:
        kept = torch.randperm(draft.config.vocab_size)[: draft.config.draft_vocab_size].sort().values
        draft.d2t.copy_(kept - torch.arange(len(kept)))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(std=0.3)
    return draft


class LinearHead(nn.Linear):
    """A target's head; float32 logits, as `TargetHead` gives them."""

    vocab_size = property(lambda self: self.out_features)

    @torch.no_grad()
    def forward(self, hidden):
        return super().forward(hidden)


def random_batch(draft, rows=3, length=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = draft.config.target_hidden_size
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[:, :4] = 0
    mask[0, 11:12] = 0
    mask[1:2, 8:] = 0
    return dict(
        input_ids=torch.randint(0, draft.config.vocab_size - 1, (rows, length), generator=generator),
        loss_mask=mask,
        uniforms=torch.rand(rows, length - 1, generator=generator),
        context_hidden=torch.randn(rows, length, 2 * width, generator=generator),
        target_hidden=torch.randn(rows, length, width, generator=generator),
    )


def plain_step(draft, shared, head, settings, batch, num_anchors):
    """What `TrainingStep` computes, with every logit in memory and autograd doing the rest."""
    anchors, keep = sample_anchors(batch["loss_mask"], num_anchors, batch["uniforms"])
    config = draft.config
    blocks = make_blocks(
        batch["input_ids"],
        batch["loss_mask"],
        anchors,
        keep,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    rows, length = batch["input_ids"].shape
    positions = torch.cat([torch.arange(length).expand(rows, -1), blocks.position_ids.flatten(1)], 1)
    output = draft(
        blocks.input_ids.flatten(1),
        batch["context_hidden"],
        positions,
        attention_mask=block_mask(blocks, length, dummies_see_themselves=True),
        shared=shared,
    )
    shape = blocks.labels.shape[1:]
    hidden, logits = output.last_hidden_state.unflatten(1, shape), output.base_logits.unflatten(1, shape)
    if draft.markov_head is not None:
        logits = logits + draft.markov_head.bias_teacher_forced(blocks.previous_ids, hidden)
    if draft.draft_to_target is not None:
        full = logits.new_full((*logits.shape[:-1], config.vocab_size), float("-inf"))
        logits = full.index_copy(-1, draft.draft_to_target, logits)
    target_logits = head(batch["target_hidden"][torch.arange(rows)[:, None, None], blocks.label_sources])
    confidence = None
    if draft.confidence_head is not None:
        confidence = draft.confidence_head(hidden, draft.markov_head.markov_w1(blocks.previous_ids))
    return blocks, logits, target_logits, confidence


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("draft_vocab_size", [50, 30])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_fused_step_equals_its_plain_twin(head_type, draft_vocab_size, softcap):
    changes = {"markov_head_type": head_type} if head_type else {"markov_rank": 0, "enable_confidence_head": False}
    draft = small_draft(draft_vocab_size=draft_vocab_size, final_logit_softcapping=softcap, **changes)
    head, batch = LinearHead(32, 50), random_batch(draft)
    shared = own_weights(draft)
    settings = LossSettings(ce=0.4, l1=0.7, confidence=0.9, decay=3.0)
    step = TrainingStep(draft, shared, head, settings, num_anchors=6, chunk_size=7)
    output = step(**batch)
    output["loss"].backward()
    fused = {name: p.grad.clone() for name, p in draft.named_parameters() if p.requires_grad}
    draft.zero_grad()

    blocks, logits, target_logits, confidence = plain_step(draft, shared, head, settings, batch, 6)
    inside = torch.ones_like(blocks.supervised)
    labels = blocks.labels
    if draft.draft_to_target is not None:
        inside = torch.isin(labels, draft.draft_to_target)
        labels = torch.where(inside, labels, draft.draft_to_target[0])  # no cross entropy there, checked below
    whole = plain_loss(logits, target_logits, labels, blocks.supervised, confidence, settings)
    token_loss = plain_loss(logits, target_logits, labels, blocks.supervised & inside, None, settings)
    loss = settings.ce * token_loss["ce"] + settings.l1 * whole["l1"]
    if confidence is not None:
        loss = loss + settings.confidence * whole["confidence"]
    loss.backward()
    torch.testing.assert_close(output["loss"], loss, atol=1e-5, rtol=1e-5)
    for name, gradient in fused.items():
        torch.testing.assert_close(gradient, draft.get_parameter(name).grad, atol=1e-5, rtol=1e-4, msg=name)
    metrics = metrics_from_sums({name: value for name, value in output.items() if name != "loss"})
    assert metrics["ce"] == pytest.approx(token_loss["ce"].item(), abs=1e-5)
    assert metrics["l1"] == pytest.approx(whole["l1"].item(), abs=1e-5)


def test_latents_are_what_the_markov_head_projects():
    for head_type in ("vanilla", "gated", "rnn"):
        draft = small_draft(markov_head_type=head_type)
        ids, hidden = torch.randint(0, 50, (2, 3, 4)), torch.randn(2, 3, 4, 32)
        latents = teacher_forced_latents(draft.markov_head, draft.markov_head.markov_w1(ids), hidden)
        wanted = draft.markov_head.bias_teacher_forced(ids, hidden)
        torch.testing.assert_close(draft.markov_head.markov_w2(latents), wanted)


def test_packed_rows_train_as_separate_rows():
    """Two sequences in one row: the same loss as in two rows, whatever lies in between."""
    draft, head = small_draft(), LinearHead(32, 50)
    shared = own_weights(draft)
    step = TrainingStep(draft, shared, head, LossSettings(), num_anchors=40)  # all of them
    parts = [random_batch(draft, rows=1, length=length, seed=length) for length in (13, 9)]
    batch = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0] if name != "uniforms"}
    batch["uniforms"] = torch.rand(1, 21)
    batch["position_ids"] = torch.cat([torch.arange(13), torch.arange(9)])[None]
    batch["segment_ids"] = torch.tensor([[0] * 13 + [1] * 9])
    # The first sequence ends in a response, and the second starts with one: the border must still hold.
    batch["loss_mask"] = torch.ones_like(batch["loss_mask"])
    packed = step(**batch)
    sums = []
    for part in parts:
        part["loss_mask"] = torch.ones_like(part["loss_mask"])
        sums.append(step(**part))
    assert packed["blocks"].item() == 12 + 8
    for name in ("slots", "accept", "survival", "ce", "l1", "confidence", "confidence_error"):
        torch.testing.assert_close(packed[name], sums[0][name] + sums[1][name], atol=1e-4, rtol=1e-4)


def test_sliding_layers_see_their_window():
    draft = small_draft(layer_types=["sliding_attention", "full_attention"], sliding_window=3)
    step = TrainingStep(draft, own_weights(draft), LinearHead(32, 50), LossSettings())
    batch = random_batch(draft, rows=1)
    anchors, keep = torch.tensor([[9]]), torch.tensor([[True]])
    blocks = make_blocks(batch["input_ids"], batch["loss_mask"], anchors, keep, block_size=4, mask_token_id=49)
    masks = step._masks(blocks, 20, None)
    assert masks["full_attention"][0, 1].nonzero().flatten().tolist() == [*range(9), 20, 21, 22, 23]
    assert masks["sliding_attention"][0, 1].nonzero().flatten().tolist() == [6, 7, 8, 20, 21]


def test_a_batch_without_anchors_has_zero_loss_and_gradients():
    draft = small_draft()
    step = TrainingStep(draft, own_weights(draft), LinearHead(32, 50), LossSettings())
    batch = random_batch(draft)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    output = step(**batch)
    output["loss"].backward()
    assert output["loss"].item() == 0.0
    # Every parameter takes part all the same, or a process in a group would wait for ever.
    assert all(p.grad is not None and not p.grad.any() for p in draft.parameters() if p.requires_grad)


def test_bf16_autocast_follows_float32():
    draft, head = small_draft(), LinearHead(32, 50)
    step = TrainingStep(draft, own_weights(draft), head, LossSettings(), num_anchors=8)
    batch = random_batch(draft)
    exact = step(**batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = step(**batch)
    rounded["loss"].backward()
    assert rounded["loss"].dtype == torch.float32
    assert rounded["loss"].item() == pytest.approx(exact["loss"].item(), rel=0.05)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in draft.parameters() if p.requires_grad)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="`l1` is the weight"):
        LossSettings(l1=-1.0)
    with pytest.raises(ValueError, match="both 0"):
        LossSettings(ce=0.0, l1=0.0)
    draft = small_draft(sample_from_anchor=False)
    with pytest.raises(ValueError, match="sample_from_anchor"):
        TrainingStep(draft, own_weights(draft), LinearHead(32, 50), LossSettings())
    assert dataclasses.asdict(LossSettings()) == {"ce": 0.1, "l1": 0.9, "confidence": 1.0, "decay": 4.0}


PEAK = """
import resource, sys, torch
from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.sharing import SharedWeights
from dspark_hf.training.objective import LossSettings
from dspark_hf.training.step import TrainingStep

V, anchors = 150_000, 64
draft = DSparkDraftModel(DSparkConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
    head_dim=16, vocab_size=V, block_size=7, mask_token_id=1, target_layer_ids=[0], markov_rank=4)).train()
class Head(torch.nn.Linear):
    vocab_size = V
    @torch.no_grad()
    def forward(self, hidden):
        return super().forward(hidden)
step = TrainingStep(draft, SharedWeights(draft.embed_tokens.weight, draft.lm_head), Head(16, V), LossSettings(),
                    num_anchors=anchors, chunk_size=int(sys.argv[1]))
batch = dict(input_ids=torch.randint(0, V, (1, 100)), loss_mask=torch.ones(1, 100), uniforms=torch.rand(1, 99),
             context_hidden=torch.randn(1, 100, 16), target_hidden=torch.randn(1, 100, 16))
def run(**batch):
    step(**batch)["loss"].backward()
run(**{name: value[:, :4] for name, value in batch.items() if name != "uniforms"}, uniforms=batch["uniforms"][:, :3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(**batch)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, anchors * 7 * V * 4)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read as Linux reports it")
def test_peak_memory_stays_below_one_tensor_of_all_logits():
    result = subprocess.run([sys.executable, "-c", PEAK, "16"], capture_output=True, text=True, check=True)
    grown, one_tensor = map(int, result.stdout.split())
    assert one_tensor > 250e6
    # All at once would hold at least four such tensors.
    assert grown < one_tensor / 4, f"{grown / 1e6:.0f} MB"
