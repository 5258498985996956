"""The target's own responses to prompts, as training data.

A draft has to agree with its target, not with a data set, so its training text is what the target answers (arXiv
2607.05147, section 3.3): greedily, as users who want the same answer twice run it, and sampled, as others do. The
answers go to a JSONL file, one line each, in large batches. The file is the state: whatever stops the run, running it
again skips the answers that are there.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..ops import contiguous_inputs

# Batches are cut from windows of this many batches sorted by length: little padding, and mixed order all the same.
_WINDOW = 32


@dataclass(frozen=True)
class ResponseOptions:
    """How to answer.

    Attributes:
        responses (`int`): answers per prompt.
        greedy (`float`): share of greedy answers; at most one per prompt is.
        temperature, top_p, top_k: of the sampled ones; the defaults draw from the target's own distribution.
        max_new_tokens (`int`): longest answer.
        seed (`int`): of the sampling.
    """

    responses: int = 1
    greedy: float = 0.5
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024
    seed: int = 0

    def __post_init__(self):
        if self.responses < 1 or self.max_new_tokens < 1:
            raise ValueError("`responses` and `max_new_tokens` must be at least 1.")
        if not 0.0 <= self.greedy <= 1.0 or self.greedy * self.responses > 1.0:
            raise ValueError(
                f"`greedy` is a share of the answers, at most one per prompt: with {self.responses} responses it lies "
                f"within 0 and {1 / self.responses:.3g}, got {self.greedy}."
            )
        if self.temperature <= 0.0:
            raise ValueError(f"`temperature` must be positive, got {self.temperature}; greedy answers are `greedy`'s.")


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenized.

    Attributes:
        ids (`list[int]`): with the chat template applied.
        fields (`dict`): what to copy into the output: `prompt` or `messages`, `source`.
    """

    ids: list[int]
    fields: dict[str, Any]


@dataclass(frozen=True)
class _Task:
    """Answer number `response` to prompt number `prompt`."""

    prompt: int
    response: int
    greedy: bool

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt, self.response


def read_prompts(source: str | Path, *, split: str = "train", config: str | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file, or of a Hub dataset where there is no such file.

    Raises:
        ValueError: naming file and line, for damaged lines.
        ImportError: for a Hub dataset without the `datasets` package.
        OSError: when neither exists.
    """
    path = Path(source)
    if path.is_file():
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except ValueError as error:
                        raise ValueError(f"{path}, line {number} is not valid JSON ({error}).") from None
                    if not isinstance(row, dict):
                        raise ValueError(f"{path}, line {number} is not an object with a `prompt`.")
                    yield row
        return
    if path.suffix in (".jsonl", ".json") or path.exists():
        raise FileNotFoundError(f"{path} is no file.")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(
            f"{source} is no file; reading it as a Hub dataset needs the `datasets` package: pip install datasets"
        ) from None
    yield from load_dataset(str(source), config, split=split)


def tokenize_prompts(
    rows: Iterable[dict[str, Any]],
    tokenizer,
    *,
    column: str | None = None,
    chat: bool = True,
    system: str | None = None,
    thinking: bool | None = None,
    max_tokens: int | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """Prompts as the target will see them.

    Args:
        rows (iterable of `dict`): with `prompt_ids`, `messages` (a chat up to the user's last turn) or `prompt`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's; may be missing when there are `prompt_ids`.
        column (`str`, *optional*): another name for the text or the messages.
        chat (`bool`): apply the chat template, where the tokenizer has one.
        system (`str`, *optional*): a system message to put first.
        thinking (`bool`, *optional*): passed to the chat template as `enable_thinking`.
        max_tokens (`int`, *optional*): longer prompts are left out.
        limit (`int`, *optional*): use the first so many.

    Raises:
        ValueError: naming the row that has no prompt.
    """
    prompts = []
    for number, row in enumerate(rows):
        if limit is not None and len(prompts) >= limit:
            break
        name = column or next((name for name in ("prompt_ids", "messages", "prompt") if name in row), None)
        value = row.get(name)
        if not value:
            raise ValueError(f"Prompt {number} has no `prompt`, `messages` or `prompt_ids`; it has {sorted(row)}.")
        fields = {key: row[key] for key in ("source",) if key in row}
        if name == "prompt_ids":
            ids = list(value)
            fields |= {key: row[key] for key in ("prompt", "messages") if key in row}
        elif tokenizer is None:
            raise ValueError("The target has no tokenizer, so its prompts must be given as `prompt_ids`.")
        else:
            ids = _encode(value, tokenizer, chat, system, thinking)
            fields["prompt" if isinstance(value, str) else "messages"] = value
        if max_tokens is None or len(ids) <= max_tokens:
            prompts.append(Prompt(ids, fields))
    if not prompts:
        raise ValueError("There are no prompts, or none short enough.")
    return prompts


def _encode(value, tokenizer, chat: bool, system: str | None, thinking: bool | None) -> list[int]:
    if isinstance(value, str) and not (chat and tokenizer.chat_template):
        return tokenizer(value)["input_ids"]
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    options = {} if thinking is None else {"enable_thinking": thinking}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def write_responses(
    target,
    prompts: Sequence[Prompt],
    output: str | Path,
    options: ResponseOptions,
    *,
    tokenizer=None,
    batch_size: int = 64,
    shard: tuple[int, int] = (0, 1),
    settings: dict[str, Any] | None = None,
    progress: bool = True,
) -> int:
    """Answers the prompts that have no answer in `output` yet, and appends.

    Args:
        target (`PreTrainedModel`): the model that answers.
        prompts (sequence of `Prompt`): the prompts, always the same for one output.
        output (`str` or `Path`): JSONL file; `<output>.settings.json` beside it holds what it was made with.
        options (`ResponseOptions`): how to answer.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for the `response` text.
        batch_size (`int`): answers at once; halved when memory runs out.
        shard (`tuple[int, int]`): `(i, n)` answers every n-th prompt from i on, for n machines with an output each.
        settings (`dict`, *optional*): further settings that must not change between runs, such as the target's name.
        progress (`bool`): show a progress bar.

    Returns:
        How many answers were added.

    Raises:
        ValueError: when `output` was made with other settings, or is damaged elsewhere than at its end.
        OSError: when it cannot be written; what is there stays usable.
    """
    output = Path(output)
    tasks = [task for task in _tasks(len(prompts), options) if task.prompt % shard[1] == shard[0]]
    _check_settings(output, prompts, options, {**(settings or {}), "shard": list(shard)})
    done = _finished(output)
    remaining = [task for task in tasks if task.key not in done]
    batches = _batches(remaining, prompts, batch_size, options.seed)
    tokens = 0
    with (
        open(output, "ab", buffering=0) as file,
        tqdm(total=len(tasks), initial=len(tasks) - len(remaining), desc="responses", disable=not progress) as bar,
    ):
        for batch in batches:
            answers = _answer(target, batch, prompts, options)
            _append(file, b"".join(_row(task, prompts[task.prompt], ids, tokenizer) for task, ids in answers))
            tokens += sum(len(ids) for _, ids in answers)
            bar.update(len(answers))
            if bar.format_dict["elapsed"]:
                bar.set_postfix_str(f"{tokens / bar.format_dict['elapsed']:.0f} tokens/s")
    return len(remaining)


def _tasks(count: int, options: ResponseOptions) -> list[_Task]:
    tasks = []
    for number in range(count * options.responses):
        # Greedy answers are spread evenly: at a share of 1/2 every second one is.
        greedy = int((number + 1) * options.greedy) > int(number * options.greedy)
        tasks.append(_Task(*divmod(number, options.responses), greedy))
    return tasks


def _batches(tasks: list[_Task], prompts: Sequence[Prompt], batch_size: int, seed: int) -> list[list[_Task]]:
    batches = []
    for greedy in (True, False):
        kind = [task for task in tasks if task.greedy == greedy]
        for start in range(0, len(kind), batch_size * _WINDOW):
            window = sorted(kind[start : start + batch_size * _WINDOW], key=lambda task: len(prompts[task.prompt].ids))
            batches += [window[first : first + batch_size] for first in range(0, len(window), batch_size)]
    random.Random(seed).shuffle(batches)
    return batches


def _answer(
    target, batch: list[_Task], prompts: Sequence[Prompt], options: ResponseOptions
) -> list[tuple[_Task, list[int]]]:
    """Answers of one batch; halves it when it does not fit into memory."""
    try:
        prompt_ids = [prompts[task.prompt].ids for task in batch]
        return list(zip(batch, _generate(target, prompt_ids, batch[0], options)))
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
    torch.cuda.empty_cache()
    half = len(batch) // 2
    return _answer(target, batch[:half], prompts, options) + _answer(target, batch[half:], prompts, options)


@torch.no_grad()
def _generate(target, prompt_ids: list[list[int]], first: _Task, options: ResponseOptions) -> list[list[int]]:
    """Answers to a batch, each cut behind its first end-of-sequence token; all are of the first task's mode."""
    stop = target.generation_config.eos_token_id
    stop = set(stop) if isinstance(stop, list) else {stop} - {None}
    pad = target.generation_config.pad_token_id
    pad = pad if pad is not None else min(stop, default=0)
    width = max(map(len, prompt_ids))
    padded = [[pad] * (width - len(ids)) + ids for ids in prompt_ids]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
    device = target.get_input_embeddings().weight.device
    sampling = {"do_sample": False}
    if not first.greedy:
        sampling = {
            "do_sample": True,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
        }
        torch.manual_seed((options.seed * 1_000_003 + first.prompt) * 1_003 + first.response)
    with contiguous_inputs(target.get_output_embeddings()):
        output = target.generate(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=options.max_new_tokens,
            pad_token_id=pad,
            **sampling,
        )
    answers = []
    for ids in output[:, width:].tolist():
        end = next((place + 1 for place, token in enumerate(ids) if token in stop), len(ids))
        answers.append(ids[:end])
    return answers


# Files ----------------------------------------------------------------------------------------------------------------


def _row(task: _Task, prompt: Prompt, ids: list[int], tokenizer) -> bytes:
    row = {
        "prompt_number": task.prompt,
        "response_number": task.response,
        "mode": "greedy" if task.greedy else "sampled",
        **prompt.fields,
    }
    if tokenizer is not None:
        row["response"] = tokenizer.decode(ids, skip_special_tokens=True)
    row |= {"prompt_ids": prompt.ids, "response_ids": ids}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _append(file, data: bytes) -> None:
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        raise OSError(
            f"{file.name} cannot be written ({error}). What it holds is kept: make room and run this again."
        ) from error


def _finished(output: Path) -> set[tuple[int, int]]:
    """Keys of the answers in a file; cuts off a last line that was not written to its end."""
    if not output.is_file():
        output.parent.mkdir(parents=True, exist_ok=True)
        return set()
    done, end = set(), 0
    with open(output, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                done.add((row["prompt_number"], row["response_number"]))
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{output}, line {number} is damaged; delete that line to have it made again, or the file to start "
                    "anew."
                ) from None
            end += len(line)
    if end < output.stat().st_size:
        with open(output, "r+b") as file:
            file.truncate(end)
    return done


def _check_settings(output: Path, prompts: Sequence[Prompt], options: ResponseOptions, settings: dict) -> None:
    digest = hashlib.sha256(json.dumps([prompt.ids for prompt in prompts]).encode()).hexdigest()
    settings = {**settings, **asdict(options), "num_prompts": len(prompts), "prompts_sha256": digest}
    path = output.with_name(output.name + ".settings.json")
    if output.is_file() and path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(f"{path} is damaged; delete it to go on with {output.name} as it is.") from None
        changed = sorted(name for name in settings if before.get(name) != settings[name])
        if changed:
            raise ValueError(
                f"{output} was made with other settings ({', '.join(changed)}): use another output, or the same "
                "settings to go on."
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


__all__ = ["Prompt", "ResponseOptions", "read_prompts", "tokenize_prompts", "write_responses"]
