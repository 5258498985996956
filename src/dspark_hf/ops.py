"""Tensor operations that the decoding loop needs faster than PyTorch has them."""

from contextlib import contextmanager

import torch
from torch import nn

_CHUNK = 256


def first_argmax(scores: torch.Tensor) -> torch.Tensor:
    """
    Index of the first maximum of each row, as `scores.argmax(-1)` gives it.

    PyTorch's argmax is not vectorised on CPUs (6 times slower than this on bfloat16 rows of 49,152), its maximum is:
    take the maximum of chunks, then look inside the first chunk that holds the row's.

    Args:
        scores (`torch.Tensor` of shape `(..., V)`): Any floating dtype.

    Returns:
        `torch.LongTensor` of shape `(...)`.
    """
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size % _CHUNK or size <= _CHUNK:
        return scores.argmax(-1)
    chunks = scores.unflatten(-1, (size // _CHUNK, _CHUNK))
    best = chunks.amax(-1).argmax(-1)
    inside = chunks.take_along_dim(best[..., None, None], dim=-2).squeeze(-2).argmax(-1)
    return best * _CHUNK + inside


def dense(states: torch.Tensor) -> torch.Tensor:
    """
    A copy of a slice with the strides that its shape alone would have.

    A linear layer takes other strides for a batch of matrices, where half-precision CPU kernels are up to a hundred
    times slower or copy the weight first. `contiguous()` leaves a slice of a single row as it is, since that counts as
    contiguous whatever its outer stride.
    """
    return states.clone(memory_format=torch.contiguous_format)


def on_device(values, device: torch.device) -> torch.Tensor:
    """
    Numbers (a list, perhaps nested, or a CPU tensor) as a tensor on `device`.

    A copy from ordinary memory to a GPU waits for everything queued there; one from pinned memory is queued itself.
    """
    tensor = torch.as_tensor(values)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@contextmanager
def contiguous_inputs(module: nn.Module | None):
    """
    Makes the first input of `module` [`dense`] while the context lasts.

    Meant for a target's head, which reads the last position of every prompt as a strided slice. `None` does nothing.
    """
    if module is None:
        yield
        return

    def copy_first(_, inputs):
        # a head of another make may be called by keyword: its input then stays as it is
        return (dense(inputs[0]), *inputs[1:]) if inputs else None

    handle = module.register_forward_pre_hook(copy_first)
    try:
        yield
    finally:
        handle.remove()
