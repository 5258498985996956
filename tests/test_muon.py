"""Muon and AdamW in one optimizer: the right parameters, orthogonal updates, resumes where it was."""

import copy

import pytest
import targets
import torch
from test_training import losses, make_trainer

from dspark_hf.training.checkpointing import checkpoint_to_resume
from dspark_hf.training.muon import MuonAdamW, orthogonalize

STEPS = dict(max_steps=12, logging_steps=1, save_strategy="steps", save_steps=4, muon=True)


@pytest.mark.parametrize("shape", [(24, 24), (16, 60), (60, 16)])
def test_orthogonalized_directions_are_about_equally_long(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before, after = (torch.linalg.svdvals(value.float()) for value in (matrix, orthogonalize(matrix)))
    assert before[0] / before[-1] > 2.5
    assert 0.5 < after[-1] and after[0] < 1.4
    # The directions themselves stay.
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.T @ orthogonalize(matrix).float() @ v.T
    assert (turned - torch.diag(turned.diagonal())).abs().max() < 0.1


def test_matrices_of_the_layers_get_muon_and_everything_else_adamw(tmp_path):
    trainer = make_trainer(tmp_path, targets.build("qwen3", "sdpa"), **STEPS)
    optimizer = trainer.create_optimizer()
    names = {id(parameter): name for name, parameter in trainer.draft.named_parameters() if parameter.requires_grad}
    groups = [{names.pop(id(p)) for p in group["params"]} for group in optimizer.param_groups]
    assert not names
    assert {"fc.weight", "layers.1.mlp.down_proj.weight", "layers.0.self_attn.q_proj.weight"} <= groups[0]
    assert {"markov_head.markov_w1.weight", "confidence_head.proj.weight"} <= groups[1]
    assert {"norm.weight", "layers.0.input_layernorm.weight"} <= groups[2]
    assert all(name.startswith(("layers.", "fc.")) for name in groups[0])


def test_adamw_half_agrees_with_pytorch():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.ParameterDict({"table": torch.nn.Parameter(torch.ones(5, 3))}) for _ in range(2))
    options = dict(lr=0.1, weight_decay=0.01)
    pair = [
        (ours, MuonAdamW(ours, beta2=0.95, **options)),
        (theirs, torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), **options)),
    ]
    for _ in range(5):
        gradient = torch.randn(5, 3)
        for parameters, optimizer in pair:
            parameters["table"].grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours["table"], theirs["table"])


@pytest.mark.slow
def test_it_learns_and_resumes_on_the_same_curve(tmp_path):
    target = targets.build("qwen3", "sdpa")
    straight = make_trainer(tmp_path / "straight", target, **STEPS)
    straight.train()
    curve = losses(straight)
    assert curve[12] < 0.95 * curve[1]
    stopped = make_trainer(tmp_path / "stopped", target, **STEPS)
    start = copy.deepcopy(stopped.draft.state_dict())
    stopped.train()
    newest = checkpoint_to_resume(tmp_path / "stopped" / "run")
    for checkpoint in (tmp_path / "stopped" / "run").glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-8":
            checkpoint.rename(tmp_path / checkpoint.name)
    assert newest.name == "checkpoint-12"
    resumed = make_trainer(tmp_path / "stopped", target, **STEPS)
    resumed.train(resume_from_checkpoint=str(checkpoint_to_resume(tmp_path / "stopped" / "run")))
    assert losses(resumed) == curve
    for name, tensor in resumed.draft.state_dict().items():
        assert torch.equal(tensor, straight.draft.state_dict()[name])
        if name.startswith("layers.") and tensor.ndim == 2:
            assert not torch.equal(tensor, start[name])
