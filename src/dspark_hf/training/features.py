"""What training needs from the frozen target, computed on the fly: tapped states, final states, next-token logits.

Storing the features of a large data set takes terabytes (a tap of width 2560 in bf16 is 5 kB per token and layer); one
no-grad forward of the target recomputes them for a fraction of the cost of its own training. Logits are never made for
a whole row: `TargetHead` turns the final states of the supervised slots into logits when the loss asks for them.

How a target gets from its last hidden state to its logits differs (a soft cap, a constant factor), so that is
measured once against the target's own forward instead of being read from its name, and a target that does something
else is refused.
"""

import copy
import math

import torch
from torch import nn

from ..generation.capture import TapCapture, decoder_layers
from ..sharing import linear_rows

_PROBE_TOKENS = 16
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative; half precision below
_HALF_TOLERANCE = 0.05


class TargetHead:
    """Logits of the target from its final, normed hidden states.

    Args:
        target (`PreTrainedModel`): with a language-model head.

    Attributes:
        vocab_size (`int`): V, padding columns excluded.
        scale (`float`): factor on the head's output (Granite, Cohere), 1 for most.
        softcap (`float`, *optional*): c of c·tanh(logits / c) (Gemma).

    Raises:
        ValueError: when the logits cannot be reproduced from the head.
    """

    def __init__(self, target: nn.Module):
        self.head = target.get_output_embeddings()
        text_config = target.config.get_text_config(decoder=True)
        if self.head is None:
            raise ValueError(f"{type(target).__name__} has no output head; load it with AutoModelForCausalLM.")
        self.vocab_size = text_config.vocab_size
        self.scale, self.softcap = 1.0, None
        self._measure(target, getattr(text_config, "final_logit_softcapping", None))

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] in float32 of final hidden states [..., H]; the caller may overwrite them."""
        weight = self.head.weight
        raw = self.head(hidden.to(device=weight.device, dtype=weight.dtype if weight.is_floating_point() else None))
        logits = raw[..., : self.vocab_size].to(device=hidden.device, dtype=torch.float32)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def columns(self, token_ids: torch.Tensor) -> "TargetHead | None":
        """The head of these tokens [V_draft] alone, or `None` where its weight cannot be sliced (quantised, say)."""
        weight = getattr(self.head, "weight", None)
        if type(self.head) is not nn.Linear or weight.is_meta or not weight.is_floating_point():
            return None
        part = copy.copy(self)
        part.head = linear_rows(weight, self.head.bias, token_ids)
        part.vocab_size = token_ids.shape[0]
        return part

    @torch.no_grad()
    def _measure(self, target: nn.Module, softcap: float | None) -> None:
        ids = probe_ids(target)
        hidden = target.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        wanted = target(input_ids=ids, use_cache=False).logits[..., : self.vocab_size].float()
        raw = self(hidden)
        choices = [(1.0, softcap)] if softcap is not None else []
        choices.append((1.0, None))
        # Least-squares factor between the two; near 1 it is rounding.
        factor = ((raw * wanted).sum() / (raw * raw).sum()).item()
        if abs(factor - 1.0) > _HALF_TOLERANCE:
            choices.append((factor, None))
        errors = []
        for self.scale, self.softcap in choices:
            errors.append(((self(hidden) - wanted).norm() / wanted.norm()).item())
        tolerance = _TOLERANCE.get(target.dtype, _HALF_TOLERANCE)
        for (self.scale, self.softcap), error in zip(choices, errors):
            # The first that is as good as any: a soft cap hardly bends small logits, but is there when declared.
            if error <= tolerance and error <= 3 * min(errors) + 1e-5:
                return
        raise ValueError(
            f"The logits of {type(target).__name__} are not its output head applied to its last hidden state (nor that "
            "soft-capped or scaled), so the training objective cannot be computed for it."
        )


class TargetFeatures:
    """Tapped and final hidden states of token rows.

    Args:
        target (`PreTrainedModel`): frozen here and put into evaluation mode.
        taps (`list[int]`): layer ids as in `DSparkConfig.target_layer_ids`.
        device (`torch.device`): where the draft is.

    Attributes:
        head (`TargetHead`): for logits.
    """

    def __init__(self, target: nn.Module, taps: list[int], device: torch.device):
        self.target = target.eval().requires_grad_(False)
        self.device = device
        self.capture = TapCapture(decoder_layers(target), taps, device, target.dtype)
        self.head = TargetHead(target)

    @torch.no_grad()
    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward of the target's decoder.

        Rows are padded on the right, where causal attention keeps padding from mattering, and packed sequences are
        told apart by positions that start again at 0: no attention mask, so the fast kernels stay in use.

        Args:
            input_ids (`torch.Tensor` [R, T]): tokens.
            position_ids (`torch.Tensor` [R, T], *optional*): needed for packed rows.

        Returns:
            Taps [R, T, taps·H_target] and final normed states [R, T, H_target].
        """
        device = self.target.get_input_embeddings().weight.device
        inputs = {"input_ids": input_ids.to(device)}
        if position_ids is not None:
            inputs["position_ids"] = position_ids.to(device)
        with torch.autocast(self.device.type, enabled=False), self.capture.installed():
            final = self.target.get_decoder()(**inputs, use_cache=False).last_hidden_state
            taps = self.capture.take()
        return taps, final.to(self.device)

    def check_packing(self) -> None:
        """Raises `ValueError` unless packed sequences give the target the states they have alone."""
        ids = probe_ids(self.target)
        split = ids.shape[1] // 3
        positions = torch.cat([torch.arange(split), torch.arange(ids.shape[1] - split)])[None]
        packed = self(ids, positions)[1][:, split:]
        alone = self(ids[:, split:])[1]
        tolerance = _TOLERANCE.get(self.target.dtype, _HALF_TOLERANCE)
        if (packed.float() - alone.float()).norm() > tolerance * alone.float().norm():
            raise ValueError(
                f"{type(self.target).__name__} lets packed sequences see each other, so packing would train on wrong "
                "features; train without packing."
            )


def probe_ids(target: nn.Module) -> torch.Tensor:
    """A row of distinct ordinary token ids [1, 16] on the target's input device: no placeholders of images or sound."""
    configs = (target.config, target.config.get_text_config(decoder=True))
    special = [value for config in configs for key, value in config.to_dict().items() if "_token_i" in key]
    vocabulary = min(configs[1].vocab_size, 1000)
    ids = [token for step in range(vocabulary) if (token := 5 + (step * 37) % (vocabulary - 5)) not in special]
    return torch.tensor([ids[:_PROBE_TOKENS]], device=target.get_input_embeddings().weight.device)


@torch.no_grad()
def embedding_factor(target: nn.Module) -> float:
    """Factor between the target's raw token embeddings and what its first layer reads (Gemma, Granite: not 1).

    1.0 where there is no such factor, for instance because positions are added.
    """
    capture = TapCapture(decoder_layers(target), [-1], target.get_input_embeddings().weight.device, torch.float32)
    ids = probe_ids(target)
    with capture.installed():
        target.get_decoder()(input_ids=ids, use_cache=False)
        read = capture.take()
    raw = target.get_input_embeddings().weight[ids].float()
    factor = ((read * raw).sum() / (raw * raw).sum()).item()
    if (read - factor * raw).norm() > _HALF_TOLERANCE * read.norm():
        return 1.0
    # Measured in the target's precision; the usual factors are meant exactly.
    usual = (1.0, math.sqrt(raw.shape[-1]))
    return next((value for value in usual if abs(factor / value - 1.0) < 1e-2), round(factor, 4))


__all__ = ["TargetFeatures", "TargetHead", "embedding_factor", "probe_ids"]
