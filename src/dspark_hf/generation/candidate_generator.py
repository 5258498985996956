"""DSpark as a `CandidateGenerator`, for Transformers' own batch-1 loop.

That loop keeps the stock cache and crops it, so it serves targets whose cache the batched loop does not know. It can be
driven by hand too: anything that takes a candidate generator takes this one.
"""

import time
from contextlib import contextmanager

import torch
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation import CandidateGenerator

from ..modeling_dspark import DSparkDraftModel
from ..stats import GenerationStats, RoundEvent
from .capture import TapCapture, decoder_layers
from .drafter import Drafter
from .processors import draft_warper


class DSparkCandidateGenerator(CandidateGenerator):
    """
    Proposes one block per call for a single row.

    The draft needs the target's hidden states, read by hooks that must be in place during the target's forwards:

        with DSparkCandidateGenerator(target, draft).attached() as generator:
            ...

    Args:
        target: The target model.
        draft (`DSparkDraftModel`): The draft.
        logits_processor (`LogitsProcessorList`, *optional*): The call's; its position-wise warpers shape the draft too.
        do_sample (`bool`): Draw the drafted tokens instead of taking the likeliest.
        num_tokens (`int`, *optional*): Tokens to draft per round; defaults to the draft's whole block.
        max_length (`int`, *optional*): Nothing is drafted beyond this length.
        eos_token_ids (`tuple[int]`): A block is cut before such a token, which the target then yields itself; the loop
            looks for an end only at the last token of a round.

    Raises:
        ValueError: if draft and target do not fit together.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict = {}

    def __init__(
        self,
        target,
        draft: DSparkDraftModel,
        logits_processor: LogitsProcessorList | None = None,
        *,
        do_sample: bool = False,
        num_tokens: int | None = None,
        max_length: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ):
        draft.validate_target(target)
        self.vocab_size = target.config.get_text_config(decoder=True).vocab_size
        self.num_tokens = min(num_tokens or draft.config.num_draft_tokens, draft.config.num_draft_tokens)
        self.max_length, self.eos_token_ids = max_length, set(eos_token_ids)
        warp = draft_warper(logits_processor or LogitsProcessorList()) if do_sample else None
        self.drafter = Drafter(draft, draft.shared_weights(target), rows=1, capacity=0, warp=warp)
        weight = draft.fc.weight
        taps = draft.config.target_layer_ids
        self.capture = TapCapture(decoder_layers(target), taps, weight.device, weight.dtype)
        self.stats = GenerationStats(path="sequential", calls=1)
        self._round: tuple[list[int], float, float] | None = None

    @contextmanager
    def attached(self):
        """Reads the target's hidden states inside this context."""
        with self.capture.installed():
            yield self

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict | None = None,
        model_outputs=None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): Everything up to the anchor.
            model_kwargs, model_outputs: As the loop passes them; not read.
            is_first_iteration (`bool`): True before the prompt was processed: nothing can be drafted yet.
            n_last_matches (`int`): Tokens of the last block that the target accepted.

        Returns:
            `input_ids` with the drafted tokens appended, and the logits they were drawn from, `(1, K, V)` over the
            target's vocabulary (minus infinity outside the draft's), or None when nothing is drafted.
        """
        if input_ids.shape[0] != 1:
            raise ValueError("DSparkCandidateGenerator drafts for one row; call generate() with the draft for batches.")
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        self._read_states(n_last_matches)
        limit = self.num_tokens
        if self.max_length is not None:
            limit = min(limit, self.max_length - input_ids.shape[1] - 1)
        began = time.perf_counter()
        if limit < 1:
            self._round = ([], 0.0, began)
            return input_ids, None
        drafted = self.drafter.draft_round(input_ids[:, -1], limit)
        tokens = drafted.tokens[0].tolist()
        ends = [index for index, token in enumerate(tokens) if token in self.eos_token_ids]
        tokens = tokens[: ends[0]] if ends else tokens
        now = time.perf_counter()
        self._round = (tokens, now - began, now)
        if not tokens:
            return input_ids, None
        candidates = torch.cat([input_ids, drafted.tokens[:, : len(tokens)].to(input_ids.device)], dim=1)
        if drafted.q is None:
            return candidates, None
        q = self.drafter.in_target_vocabulary(drafted.q[0, : len(tokens)], self.vocab_size)
        return candidates, q.log()[None]

    def _read_states(self, matches: int) -> None:
        """Appends the last forward's states: the whole prompt, or the anchor and the accepted tokens."""
        states = self.capture.take()
        if self._round is None:
            self.drafter.read_prompt(None, 0)(states)
            return
        width = matches + 1
        rows = torch.zeros(width, dtype=torch.long)
        kept = torch.tensor([width])
        longest = self.drafter.longest + width
        self.drafter.extend(states[0, :width], rows, torch.arange(width), kept, width)
        self.drafter.longest = longest

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Files the round's statistics."""
        if self._round is None:
            return
        tokens, draft_seconds, began = self._round
        committed = input_ids[0, -(int(num_matches) + 1) :].tolist()
        self.stats.round_events.append(
            RoundEvent(
                index=len(self.stats.round_events),
                rows=[0],
                drafted=[tokens],
                confidence=None,
                survival=None,
                verify_lengths=[len(tokens)],
                accepted=[int(num_matches)],
                committed=[committed],
                draft_seconds=draft_seconds,
                verify_seconds=time.perf_counter() - began,
            )
        )


class _WithGenerator:
    """A target as the stock loop sees it, with the candidate generator chosen; the model itself is not touched."""

    def __init__(self, model, generator: CandidateGenerator):
        self._model, self._generator = model, generator

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def __call__(self, *args, **kwargs):
        return self._model(*args, **kwargs)

    def _get_candidate_generator(self, **kwargs):
        return self._generator


def decode_sequentially(generator: DSparkCandidateGenerator, model, input_ids, **arguments):
    """
    Runs Transformers' own assisted loop with `generator` on a batch of one.

    Args:
        generator (`DSparkCandidateGenerator`): Its hooks are in place during the call only.
        model: The target.
        input_ids (`torch.LongTensor` of shape `(1, P)`): The prompt.
        arguments: As `generate()` prepares them for its decoding methods.
    """
    loop = GenerationMixin._assisted_decoding
    loop = getattr(loop, "_dspark_original", loop)
    with generator.attached():
        return loop(_WithGenerator(model, generator), input_ids, **arguments)
