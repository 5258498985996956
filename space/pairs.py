"""The models behind the page: which pairs may be loaded, the checks before anything is, and the loaded ones.

A pair is a target and a DSpark draft made for it. Nothing is loaded at import. The first visitor who needs a pair loads
it, the others wait for it and share it, and its lock lets one generation at a time use it: on one machine two at once
would only slow each other down.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel
from dspark_hf.demo import smollm2_folder

SMOLLM2 = "SmolLM2-135M-Instruct"
DRAFT_FOLDER = "checkpoints/smollm2-135m-instruct-dspark"
# Pairs that anyone may choose where the page is public and the machine allows it (see `hosted`).
PUBLISHED = (
    ("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7"),
    ("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7"),
)
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_KEPT = 2  # pairs in memory at once


class PairError(ValueError):
    """A pair that cannot be used; the message is a sentence for the visitor."""


@dataclass(frozen=True)
class PairName:
    """Where the two models come from: folders, repositories, or `SMOLLM2`."""

    target: str
    draft: str

    def __str__(self) -> str:
        return f"{_short(self.target)} + {_short(self.draft)}"


@dataclass
class Pair:
    """
    A loaded pair.

    Attributes:
        name (`PairName`): Where it came from.
        model (`PreTrainedModel`), draft (`DSparkDraftModel`): On one device.
        tokenizer (`PreTrainedTokenizerBase`): Pads on the left.
        lock (`threading.Lock`): Held by the generation that uses the pair.
        has_rounds (`bool`): Whether the target is verified in batched blocks, so that every round can be watched.
        survival (`list[list[float]]`): Survival of the rounds of the warm-up, to predict from before the first run.
        is_warm (`bool`): Whether the warm-up is done.
        warming (`threading.Lock`): Held during it.
    """

    name: PairName
    model: torch.nn.Module
    draft: DSparkDraftModel
    tokenizer: object
    lock: threading.Lock = field(default_factory=threading.Lock)
    has_rounds: bool = True
    survival: list[list[float]] = field(default_factory=list)
    is_warm: bool = False
    warming: threading.Lock = field(default_factory=threading.Lock)

    @property
    def block(self) -> int:
        """Most tokens drafted a round."""
        return self.draft.config.num_draft_tokens


def hosted() -> bool:
    """Whether this runs as a public Space, where visitors choose from a list and name nothing themselves."""
    return bool(os.environ.get("SPACE_ID"))


def default_pair(target: str | None = None, draft: str | None = None) -> PairName:
    """
    The pair that the page starts with: the arguments, `DSPARK_TARGET` and `DSPARK_DRAFT`, or the shipped one.

    Raises:
        PairError: no draft is named and the shipped one is not there.
    """
    target = target or os.environ.get("DSPARK_TARGET") or SMOLLM2
    draft = draft or os.environ.get("DSPARK_DRAFT")
    if draft is None and target == SMOLLM2:
        here = Path(__file__).resolve().parent
        places = [folder / DRAFT_FOLDER for folder in (here, here.parent)]
        draft = next((str(place) for place in places if (place / "config.json").is_file()), None)
    if draft is None:
        raise PairError(
            f"No draft for {_short(target)}: the folder {DRAFT_FOLDER} is not there. "
            "Name one with --draft FOLDER or the variable DSPARK_DRAFT."
        )
    return PairName(target, draft)


def allowed_pairs(default: PairName) -> list[PairName]:
    """
    What visitors may choose from: the default, then `DSPARK_PAIRS` (`target|draft`, separated by commas).

    Without that variable a machine with a GPU offers the published pairs too; a CPU would take minutes a sentence.
    """
    listed = os.environ.get("DSPARK_PAIRS")
    if listed:
        pairs = [tuple(part.strip() for part in entry.split("|")) for entry in listed.split(",") if entry.strip()]
        if any(len(pair) != 2 for pair in pairs):
            raise PairError("DSPARK_PAIRS must read target|draft,target|draft.")
    else:
        pairs = PUBLISHED if torch.cuda.is_available() else ()
    return list(dict.fromkeys([default, *(PairName(*pair) for pair in pairs)]))


def check_name(target: str, draft: str) -> PairName:
    """
    The pair that a visitor typed, checked by its form before anything is looked up.

    Raises:
        PairError: not `owner/name` and not a folder with a model.
    """
    for role, name in (("target", target), ("draft", draft)):
        name = name.strip()
        if role == "target" and name == SMOLLM2:
            continue
        if not name:
            raise PairError(f"Please name a {role}, as owner/name on the Hugging Face Hub or as a folder.")
        is_folder = Path(name).is_dir()
        if is_folder and not (Path(name) / "config.json").is_file():
            raise PairError(f"The {role} folder {name!r} holds no config.json, so it is no model.")
        if not is_folder and not _REPOSITORY.fullmatch(name):
            raise PairError(f"The {role} {name[:80]!r} is neither a folder nor of the form owner/name.")
    return PairName(target.strip(), draft.strip())


class Pairs:
    """
    The loaded pairs, and which may be.

    Args:
        default (`PairName`): What the page starts with.
        load (`Callable`, *optional*): Loads a pair; by default [`load_pair`].

    Attributes:
        allowed (`list[PairName]`): What may be chosen on a public page.
        costs (`dict[PairName, dict]`): The measured cost tables of pairs, see `runs.costs`.
    """

    def __init__(self, default: PairName, load: Callable[[PairName], Pair] | None = None):
        self.default, self.load = default, load or load_pair
        self.allowed = allowed_pairs(default)
        self.costs: dict[PairName, dict] = {}
        self._loaded: OrderedDict[PairName, Pair] = OrderedDict()
        self._loading = threading.Lock()

    def is_warm(self, name: PairName) -> bool:
        """Whether a run with this pair could start at once."""
        pair = self._loaded.get(name)
        return pair is not None and pair.is_warm

    def get(self, name: PairName) -> Pair:
        """
        The loaded pair; the first caller loads it.

        Raises:
            PairError: not allowed here, or it cannot be loaded.
        """
        if hosted() and name not in self.allowed:
            raise PairError("This public page only runs the pairs in its list. Duplicate the Space to run another.")
        with self._loading:
            pair = self._loaded.get(name)
            if pair is None:
                while len(self._loaded) >= _KEPT:
                    self._loaded.popitem(last=False)
                pair = self._loaded[name] = self.load(name)
            self._loaded.move_to_end(name)
            return pair


def load_pair(name: PairName) -> Pair:
    """
    Loads a pair: the small files are read and compared first, then the draft, then the target.

    Safetensors only, and no code from a repository is run.

    Raises:
        PairError: with the reason.
    """
    target = str(smollm2_folder()) if name.target == SMOLLM2 else name.target
    safe = {"trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(target, **safe)
    except (OSError, ValueError, KeyError) as error:
        raise PairError(f"The target {_short(name.target)} cannot be read: {_first_sentence(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise PairError(f"The target {_short(name.target)} is an encoder-decoder model, which DSpark cannot draft for.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        draft = DSparkDraftModel.from_pretrained(name.draft)
    except (OSError, ValueError, KeyError) as error:
        raise PairError(f"The draft {_short(name.draft)} cannot be read: {_first_sentence(error)}") from error
    width = config.get_text_config(decoder=True).hidden_size
    if draft.config.target_hidden_size != width:
        raise PairError(
            f"The draft {_short(name.draft)} is for targets of width {draft.config.target_hidden_size}, "
            f"but {_short(name.target)} has width {width}."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left", **safe)
        model = AutoModelForCausalLM.from_pretrained(target, dtype="auto", use_safetensors=True, **safe)
        draft.validate_target(model)
    except (OSError, ValueError, KeyError) as error:
        raise PairError(f"The pair cannot be loaded: {_first_sentence(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = model.to(device).eval()
    return Pair(name, model, draft.to(device=device, dtype=model.dtype).eval(), tokenizer)


def _short(name: str) -> str:
    """A folder's own name, without the path that leads to it."""
    return Path(name).name if Path(name).is_dir() else name


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    sentence = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    return sentence[:300] or type(error).__name__
