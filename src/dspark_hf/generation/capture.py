"""Hidden states of the tapped target layers, read by our own forward hooks.

Hooks see a layer's raw output, the same in every version of Transformers, while entries of `output_hidden_states`
changed their meaning and end with a normed state (paper section 3.1: the draft is conditioned on raw layer outputs).
"""

from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

_ACTIVE: ContextVar["TapCapture | None"] = ContextVar("dspark_capture", default=None)


def decoder_layers(model) -> nn.ModuleList:
    """The text decoder's list of layers; `ValueError` when it cannot be told."""
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder = model.get_decoder()
    for scope in (decoder.named_children(), decoder.named_modules()):
        found = [module for _, module in scope if isinstance(module, nn.ModuleList) and len(module) == depth]
        if len(found) == 1:
            return found[0]
    raise ValueError(
        f"the decoder layers of {type(model).__name__} were not found ({depth} layers expected), "
        "so the hidden states that the draft needs cannot be read"
    )


class TapCapture:
    """
    Collects the tapped hidden states of each forward of the target.

    Args:
        layers (`nn.ModuleList`): The target's decoder layers.
        taps (`list[int]`): Layer ids in ascending order; -1 is the embedding output (the input of layer 0).
        device (`torch.device`): Where the states go.
        dtype (`torch.dtype`): What they are cast to.

    `take()` gives `[batch, tokens, T * H]`, the taps concatenated on the last axis (eq. 2). With a `sink`, every
    forward is handed to it instead, so that a prompt processed in chunks is never held as a whole.
    """

    def __init__(self, layers: nn.ModuleList, taps: list[int], device: torch.device, dtype: torch.dtype):
        self.layers, self.taps, self.device, self.dtype = layers, list(taps), device, dtype
        self.sink = None
        self._states: dict[int, torch.Tensor] = {}

    @contextmanager
    def installed(self):
        """Hooks are there inside this context only, and only react to forwards of this thread."""
        handles = []
        token = _ACTIVE.set(self)
        try:
            for tap in self.taps:
                if tap == -1:
                    handles.append(self.layers[0].register_forward_pre_hook(self._read_input, with_kwargs=True))
                else:
                    handles.append(self.layers[tap].register_forward_hook(self._reader(tap)))
            yield self
        finally:
            _ACTIVE.reset(token)
            for handle in handles:
                handle.remove()

    def _read_input(self, module, args, kwargs):
        self._store(-1, args[0] if args else kwargs["hidden_states"])

    def _reader(self, tap: int):
        def read_output(module, args, output):
            self._store(tap, output[0] if isinstance(output, tuple) else output)

        return read_output

    def _store(self, tap: int, states: torch.Tensor) -> None:
        if _ACTIVE.get() is not self:  # another thread's forward through the same layers
            return
        self._states[tap] = states.detach()
        if tap == self.taps[-1] and self.sink is not None:
            self.sink(self.take())

    def take(self) -> torch.Tensor:
        """The states of the last forward, `[batch, tokens, T * H]`; forgets them."""
        states, self._states = self._states, {}
        return torch.cat([states[tap].to(device=self.device, dtype=self.dtype) for tap in self.taps], dim=-1)
