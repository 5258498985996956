"""Muon for the draft's weight matrices, AdamW for the rest, as one optimizer.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest orthogonal matrix, so that every direction
of a layer's update is equally long, and needs fewer steps for the same loss. It is meant for matrices that map hidden
states to hidden states: the draft's layers and `fc`. Tables and norms stay with AdamW. Updates are scaled to the size
that AdamW's have, so one learning rate serves both.

One class, because `Trainer` schedules, clips, saves and resumes one optimizer.
"""

import torch
from torch import nn

# Quintic Newton-Schulz iteration: its fixed band around 1 is wide, and it gets there in five steps.
_COEFFICIENTS, _STEPS = (3.4445, -4.7750, 2.0315), 5
_MOMENTUM, _BETA1, _EPSILON = 0.95, 0.9, 1e-8
_ADAMW_SIZE = 0.2  # typical root mean square of an AdamW update


class MuonAdamW(torch.optim.Optimizer):
    """
    Args:
        draft (`nn.Module`): the draft; frozen parameters are left out.
        lr (`float`): learning rate.
        beta2 (`float`): of AdamW.
        weight_decay (`float`): decoupled, for matrices only.
    """

    def __init__(self, draft: nn.Module, *, lr: float, beta2: float = 0.95, weight_decay: float = 0.0):
        matrices, tables, vectors = [], [], []
        for name, parameter in draft.named_parameters():
            if parameter.requires_grad:
                hidden = name.startswith(("layers.", "fc."))
                (vectors if parameter.ndim < 2 else matrices if hidden else tables).append(parameter)
        groups = [
            {"params": matrices, "muon": True, "weight_decay": weight_decay},
            {"params": tables, "muon": False, "weight_decay": weight_decay},
            {"params": vectors, "muon": False, "weight_decay": 0.0},
        ]
        super().__init__([group for group in groups if group["params"]], {"lr": lr, "beta2": beta2})

    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    update = self._muon(parameter) if group["muon"] else self._adamw(parameter, group["beta2"])
                    parameter.add_(update, alpha=-group["lr"])
        return loss

    def _muon(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(parameter.grad, 1.0 - _MOMENTUM)
        update = orthogonalize(parameter.grad.lerp(momentum, _MOMENTUM))
        return update.to(parameter.dtype) * (_ADAMW_SIZE * max(parameter.shape) ** 0.5)

    def _adamw(self, parameter: torch.Tensor, beta2: float) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            # A tensor, so that it is saved and loaded like the rest.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        step = float(state["step"])
        mean = state["mean"].lerp_(parameter.grad, 1.0 - _BETA1)
        square = state["square"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1.0 - beta2)
        scale = (square / (1.0 - beta2**step)).sqrt_().add_(_EPSILON)
        return mean / (1.0 - _BETA1**step) / scale


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """U·Vᵀ of the singular value decomposition of `matrix` [M, N], to about a quarter, in bfloat16."""
    a, b, c = _COEFFICIENTS
    wide = matrix.bfloat16()
    if tall := wide.shape[0] > wide.shape[1]:
        wide = wide.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if tall else wide


__all__ = ["MuonAdamW", "orthogonalize"]
