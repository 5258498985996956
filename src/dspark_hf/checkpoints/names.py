"""Tensor names as this package has them, whatever wrapped the model that was saved.

Exporters save the same modules from inside a wrapper and leave its name in front: `model.layers.0...`. Transformers'
own DFlash draft keeps the context projection in an `encoder`. Both are undone here, once, for every packaging, and the
stored name is remembered for reading and for messages.
"""

from collections.abc import Iterable

PREFIXES = ("model.", "encoder.")
WHOLE_NAMES = {"encoder.output_norm_enc.weight": "hidden_norm.weight"}


def plain_name(stored: str) -> str:
    """A tensor's name without the prefixes of a wrapper."""
    if stored in WHOLE_NAMES:
        return WHOLE_NAMES[stored]
    for prefix in PREFIXES:
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return stored


def plain_names(stored: Iterable[str]) -> dict[str, str]:
    """Plain name of every stored name; names that would collide stay as they are, and are reported as unexpected."""
    stored = list(stored)
    plain = [plain_name(name) for name in stored]
    taken = {name for name in plain if plain.count(name) > 1} | (set(plain) & set(stored))
    return {name: short if short == name or short not in taken else name for name, short in zip(stored, plain)}


__all__ = ["plain_name", "plain_names"]
