"""The decoding loop: draft a block, verify a prefix of it exactly, commit, for all rows at once (paper section 3).

Rows are independent sequences of different lengths. A finished row leaves the batch; the others move up into its slot.
Per round there is one draft forward, one target forward and, on accelerators, one copy to the host.
"""

import time
import weakref

import torch

from ..copying import RowText
from ..ops import contiguous_inputs, first_argmax, on_device
from ..sampling import accept_greedy, accept_sampled, draw, residual_weights
from ..scheduling import survival
from ..stats import GenerationStats, RoundEvent
from .capture import TapCapture, decoder_layers
from .collector import Collector
from .copies import unpadded, with_copies
from .drafter import DraftContext, Drafter, DraftRound
from .load import LOAD
from .policy import ConstantPolicy
from .processors import BlockProcessors, draft_warper
from .ragged_cache import RaggedCache, export_rows
from .settings import Settings
from .stopping import StopRules
from .verifier import Verifier

_HEADROOM = 256  # cache slots to allocate beyond the prompt when the limit is far away


class DecodingLoop:
    """
    One `generate()` call with a DSpark draft.

    Args:
        model: The target.
        draft (`DSparkDraftModel`): The draft.
        path (`str`): "packed" or "rectangular".
        settings (`Settings`): Knobs of the call.
        policy (`ConstantPolicy`): How much to draft and to verify.
        input_ids (`torch.LongTensor` of shape `(batch, P)`): Padded prompts.
        logits_processor, stopping_criteria, generation_config, streamer: As `generate()` prepared them.
        keep_cache (`bool`): Whether the cache outlives the call.
        draft_ahead (`bool`, *optional*): Draft the next block before this round's tokens reach the host, which saves a
            copy per round but wastes the draft of the last one. Defaults to True on accelerators.
    """

    def __init__(
        self,
        model,
        draft,
        path: str,
        settings: Settings,
        policy: ConstantPolicy,
        input_ids: torch.Tensor,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer=None,
        keep_cache: bool = False,
        draft_ahead: bool | None = None,
    ):
        self.model, self.draft, self.path, self.settings = model, draft, path, settings
        self.policy = policy
        self.input_ids, self.generation_config, self.streamer = input_ids, generation_config, streamer
        self.keep_cache = keep_cache
        self.device = input_ids.device
        self.draft_ahead = self.device.type != "cpu" if draft_ahead is None else draft_ahead
        self.sampling = generation_config.do_sample
        self.processors = BlockProcessors(logits_processor)
        self.warp = draft_warper(logits_processor) if self.sampling else None
        self.rules = StopRules(stopping_criteria, input_ids.shape[1], generation_config.max_length)
        self.layers = decoder_layers(model)
        parameter = draft.fc.weight
        self.capture = TapCapture(self.layers, draft.config.target_layer_ids, parameter.device, parameter.dtype)
        pad = generation_config._pad_token_tensor
        wants = generation_config.return_dict_in_generate
        reads_prefixes = self.processors.needs_prefixes or self.rules.needs_prefixes
        self.out = Collector(
            input_ids,
            0 if pad is None else int(pad),
            streamer,
            keep_scores=wants and generation_config.output_scores,
            keep_logits=wants and generation_config.output_logits,
            capacity=input_ids.shape[1] + self.rules.max_new + draft.config.block_size + 1 if reads_prefixes else 0,
        )
        self.stats = GenerationStats(path=path, calls=1)
        # Without an end-of-sequence id plain generate() lets stopped rows run on until all have stopped.
        self.rows_run_on = not self.rules.eos and input_ids.shape[0] > 1
        self.stopped_at: dict[int, int] = {}
        self.pending: tuple[DraftRound, list | None] | None = None
        self.texts: list[RowText] | None = None  # what rows may copy from
        # What finished rows leave behind when the cache is handed back: keys and values of the target, draft's context.
        self.finished_rows: dict[int, tuple] = {}

    def run(self, source, model_kwargs: dict) -> torch.Tensor:
        """
        Decodes to the end.

        Args:
            source (`DynamicCache`): The cache to prefill, empty or from an earlier turn. With `keep_cache` it holds all
                tokens but each row's last one afterwards, as plain `generate()` leaves it.
            model_kwargs (`dict`): Arguments of the target's forward as `generate()` prepared them.

        Returns:
            `torch.LongTensor` of shape `(batch, P + longest)`.
        """
        began = time.perf_counter()
        head = contiguous_inputs(self.model.get_output_embeddings())
        with self.capture.installed(), head, LOAD.call(self.model) as self.report_load:
            self._prefill(source, model_kwargs)
            self.stats.prefill_seconds = time.perf_counter() - began
            with self.model._optimize_model_for_decode():
                while self.rows:
                    self._round()
        if self.stopped_at:
            self.out.truncate(max(self.stopped_at.values()))
        if self.streamer is not None:
            self.streamer.end()
        if self.keep_cache:
            self._hand_back(source)
        self.stats.new_tokens = sum(map(len, self.out.tokens))
        self.stats.seconds = time.perf_counter() - began
        return self.out.sequences()

    # ------------------------------------------------------------------------------------------------ prompt

    def _prefill(self, source, model_kwargs: dict) -> None:
        """Plain generate's own prefill, read by the draft chunk by chunk; then the first token of every row."""
        batch = self.input_ids.shape[0]
        self.rows = list(range(batch))
        past = source.get_seq_length()
        mask = model_kwargs.get("attention_mask")
        padding = None if mask is None else mask.bool()
        prompts = unpadded(self.input_ids, padding) if self.policy.copy_tokens else None
        shared = self.draft.shared_weights(self.model)
        near = min(self.rules.max_new, _HEADROOM) + self.draft.config.block_size
        self.drafter = Drafter(self.draft, shared, batch, self.input_ids.shape[1] + near, self.warp)
        self.drafter.cache.uniform = batch == 1 and not self.draft_ahead
        earlier = getattr(source, "_dspark_context", None)
        if earlier is not None and (earlier.draft() is not self.draft or earlier.slots != past):
            earlier = None
        self.capture.sink = self.drafter.read_prompt(padding, past, earlier)
        if getattr(self.model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
            # as an integer it lets such models drop all but the last position before their last layers, taps included
            model_kwargs = model_kwargs | {"logits_to_keep": torch.tensor([-1], device=self.device)}
        outputs = self.model._prefill(self.input_ids, self.generation_config, model_kwargs)
        self.capture.sink = None
        self.prompt_slots = source.get_seq_length()
        self.cache = RaggedCache(source, [self.prompt_slots] * batch, self.prompt_slots + near)
        self.verifier = Verifier(self.model, self.layers, self.cache, self.path, padding)
        # slots that a row's draft context lacks: padding, and what an earlier turn cached
        self.gaps = [self.prompt_slots - length for length in self.drafter.cache.lengths.tolist()]
        self.padding = padding
        self.first_positions = self._first_positions(outputs, model_kwargs, batch)
        self.positions = self.first_positions

        logits = outputs.logits[:, -1].to(device=self.device, dtype=torch.float32)
        scores = self.processors(self.out.ids, self.rows, [self.input_ids.shape[1]] * batch, logits)
        self.anchors = draw(scores.softmax(-1)) if self.sampling else first_argmax(scores)
        self.out.write_ids(self.rows, self.anchors[:, None])
        if prompts is not None:
            self.texts = [RowText(prompt) for prompt in prompts]  # an accelerator is still busy with the prompt
        _, finished = self._commit([[token] for token in self.anchors.tolist()], scores, logits, self.rows)
        self._leave(finished, [0] * batch)

    def _first_positions(self, outputs, model_kwargs: dict, batch: int) -> torch.Tensor:
        """Position of each row's first new token, `(batch,)` or `(axes, batch)`; every later one follows from it."""
        kwargs = self.model._update_model_kwargs_for_generation(outputs, model_kwargs)
        positions = kwargs["position_ids"][..., -1].to(self.device)
        return positions.expand(*positions.shape[:-1], batch)

    # ------------------------------------------------------------------------------------------------ round

    def _round(self) -> None:
        rows = self.rows
        limits = [self.rules.budget(len(self.out.tokens[row])) - 1 for row in rows]

        # 1. A block per row, unless it was drafted ahead.
        context, load = max(self.cache.lengths), self.report_load(len(rows))
        if self.texts is not None:
            self._offer_copies(limits, context, load)
        clock = time.perf_counter()
        drafted, confidence = self.pending or self._draft(max(limits), context, load)
        draft_seconds = time.perf_counter() - clock
        draft_width = drafted.tokens.shape[1] if drafted else 0

        # 2. How much of each block to verify, and which rows copy theirs from their text.
        plan = self.policy.plan(rows, confidence, draft_width, limits, context, load)
        widths = [draft_width if copy is None else len(copy.tokens) for copy in plan.copies or [None] * len(rows)]
        if any(plan.copies):
            drafted, confidence = with_copies(drafted, plan.copies, self.device), plan.confidence
        counts = [1 + length for length in plan.lengths]
        width = max(plan.lengths)

        # 3. One target forward over [anchor, drafts] of all rows.
        clock = time.perf_counter()
        tokens = self.anchors[:, None]
        if width:
            tokens = torch.cat([tokens, drafted.tokens[:, :width]], dim=1)
            self.out.write_ids(rows, drafted.tokens[:, :width])
        logits, states, index, offsets = self.verifier(tokens, counts, self.positions, self.capture)
        verify_seconds = time.perf_counter() - clock

        # 4. Exact acceptance, and the target's own token behind the accepted prefix.
        starts = [sum(counts[:slot]) for slot in range(len(rows))]
        raw = logits.to(self.device)
        if self.processors or self.sampling or self.out.scores is not None or self.out.logits is not None:
            raw = raw.float()
        scores = self._process(raw, counts)
        accepted, following = self._accept(scores, drafted, plan.lengths, starts, width)

        # 5. The draft's context grows by what was kept.
        self.drafter.extend(states, index, offsets, accepted + 1, width + 1)
        block = torch.cat([tokens[:, 1:], following[:, None]], dim=1).scatter(1, accepted[:, None], following[:, None])
        self.out.write_ids(rows, block)
        self.anchors, self.positions = following, self.positions + accepted + 1

        # 6. The next block, before anything is known on the host.
        ahead = self._draft(max(limits) - 1, context, load, read=False)[0] if self.draft_ahead else None

        # 7. The round's only copy to the host.
        ahead_confidence = None if ahead is None else ahead.confidence
        late_confidence = drafted.confidence if drafted is not None and confidence is None else None
        told, (late_confidence, ahead_confidence) = _to_host(
            [accepted[:, None], block, block[:, :0] if drafted is None else drafted.tokens],
            [late_confidence, ahead_confidence],
        )
        new = [row[1 : 2 + row[0]] for row in told]
        proposals = [row[2 + width : 2 + width + proposed] for row, proposed in zip(told, widths)]

        # 8. Commit token by token up to a stop, stream, and let finished rows leave.
        kept, finished = self._commit(new, scores, raw, starts)
        event = RoundEvent(
            index=len(self.stats.round_events),
            rows=rows,
            drafted=proposals,
            confidence=confidence or late_confidence,
            survival=None,
            verify_lengths=plan.lengths,
            copied=[copy is not None for copy in plan.copies],
            accepted=[min(row[0], keep) for row, keep in zip(told, kept)],
            committed=[tokens[:keep] for tokens, keep in zip(new, kept)],
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            load=load,
            expected_tokens=plan.expected_tokens,
            expected_seconds=plan.seconds,
            plain_seconds=plan.plain_seconds,
        )
        if event.confidence is not None:
            event.survival = survival(event.confidence).tolist()
        if any(plan.copies):  # proposals of different lengths
            event.confidence, event.survival = (
                [row[:proposed] for row, proposed in zip(part, widths)] for part in (event.confidence, event.survival)
            )
        self.stats.round_events.append(event)
        self.policy.observe(rows, plan, event.accepted, sum(kept), draft_width > 0)
        if hasattr(self.streamer, "on_round"):
            self.streamer.on_round(event)
        self.pending = None if ahead is None else (ahead, ahead_confidence)
        self._leave(finished, kept)

    def _offer_copies(self, limits: list[int], context: int, load: int) -> None:
        """Tells the policy what each row could copy in the coming round."""
        most = self.policy.copy_tokens
        copies = [self.texts[row].find(min(limit, most)) for row, limit in zip(self.rows, limits)]
        self.policy.offer(self.rows, copies, limits, context, load)

    def _draft(self, limit: int, context: int, load: int, read: bool = True) -> tuple[DraftRound | None, list | None]:
        """A block for every row and, where the policy needs them now, its confidences on the host."""
        num_tokens = min(self.policy.draft_tokens, limit)
        if num_tokens < 1 or not self.policy.wants_draft(self.rows, context, load):
            return None, None
        drafted = self.drafter.draft_round(self.anchors, num_tokens)
        needed = read and self.settings.schedule != "constant" and drafted.confidence is not None
        return drafted, drafted.confidence.tolist() if needed else None

    def _process(self, raw: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Processed scores of the N verified positions, each behind its own prefix."""
        if not self.processors.needs_prefixes:
            return self.processors(None, [], [], raw)
        token_rows = [row for row, count in zip(self.rows, counts) for _ in range(count)]
        starts = [self.input_ids.shape[1] + len(self.out.tokens[row]) for row in self.rows]
        prefixes = [start + offset for start, count in zip(starts, counts) for offset in range(count)]
        return self.processors(self.out.ids, token_rows, prefixes, raw)

    def _accept(self, scores, drafted: DraftRound | None, lengths: list[int], starts: list[int], width: int):
        """Accepted lengths `(R,)` and the tokens that follow them `(R,)`."""
        limit = on_device(lengths, self.device)
        # positions behind a row's verify length repeat its last one: they are never read as accepted
        slots = torch.arange(width + 1, device=self.device)
        where = on_device(starts, self.device)[:, None] + torch.minimum(slots, limit[:, None])
        if not self.sampling:
            tokens = drafted.tokens[:, :width] if width else where[:, :0]
            return accept_greedy(tokens, first_argmax(scores)[where], limit)
        probabilities = scores.softmax(-1)
        if not width:
            return torch.zeros_like(limit), draw(probabilities[where[:, 0]])
        tokens = drafted.tokens[:, :width]
        p = probabilities[where[:, :width], tokens]
        accepted = accept_sampled(p, drafted.q_drawn[:, :width], torch.rand_like(p), limit)
        row = torch.arange(len(lengths), device=self.device)
        at_stop = probabilities[where[row, accepted]]
        q = self.drafter.q_at(drafted, accepted.clamp_max(width - 1), at_stop.shape[-1])
        return accepted, draw(residual_weights(at_stop, q, accepted < limit))

    # ------------------------------------------------------------------------------------------------ rows

    def _commit(self, new: list[list[int]], scores, logits, starts) -> tuple[list[int], list[bool]]:
        """Adds new tokens up to a stop; returns how many each row kept and whether it leaves."""
        rows = self.rows
        generated = [len(self.out.tokens[row]) for row in rows]
        kept, finished = self.rules.cut(new, generated, rows, self.out.ids, self.out.scores)
        if self.rows_run_on:
            kept, finished = self._run_on(new, kept, finished, generated)
        self.out.add_scores(rows, kept, starts, scores, logits)
        committed = [tokens[:keep] for tokens, keep in zip(new, kept)]
        self.out.add_tokens(rows, committed)
        for row, tokens in zip(rows, committed) if self.texts is not None else ():
            self.texts[row].extend(tokens)
        self.out.stream([row for row, done in zip(rows, finished) if not done])
        return kept, finished

    def _run_on(self, new, kept, finished, generated):
        """Remembers where rows stop, and lets none leave before all have."""
        for row, keep, done, count in zip(self.rows, kept, finished, generated):
            if done:
                self.stopped_at.setdefault(row, count + keep)
        kept = [min(len(tokens), self.rules.budget(count)) for tokens, count in zip(new, generated)]
        reached = min(count + keep for count, keep in zip(generated, kept))
        done = len(self.stopped_at) == self.input_ids.shape[0] and reached >= max(self.stopped_at.values())
        return kept, [done or count + keep >= self.rules.max_new for count, keep in zip(generated, kept)]

    def _leave(self, finished: list[bool], kept: list[int]) -> None:
        """Sets each row's cache length to what it committed; finished rows leave the batch."""
        for slot, keep in enumerate(kept):
            self.cache.lengths[slot] += keep
        if any(finished):
            if self.keep_cache:
                for slot in (slot for slot, done in enumerate(finished) if done):
                    context = self.drafter.row_context(slot, self.cache.lengths[slot] - self.gaps[slot])
                    self.finished_rows[self.rows[slot]] = (self.cache.row_states(slot), context)
            self._compact([slot for slot, done in enumerate(finished) if not done])
        if self.rows:
            self.drafter.longest = max(length - gap for length, gap in zip(self.cache.lengths, self.gaps))

    def _hand_back(self, source) -> None:
        """Fills the cache that outlives the call as plain `generate()` does: all tokens but the longest rows' last."""
        batch, longest = self.input_ids.shape[0], max(map(len, self.out.tokens))
        states = [self.finished_rows[row][0] for row in range(batch)]
        early = [row for row in range(batch) if len(self.out.tokens[row]) < longest]
        if early:
            # such a row's last token was never fed, while plain generate() lets finished rows run along
            cache = RaggedCache.from_rows([states[row] for row in early], spare=1)
            index = torch.tensor(early, device=self.device)
            padding = None if self.padding is None else self.padding[index]
            verifier = Verifier(self.model, self.layers, cache, self.path, padding)
            tokens = torch.tensor([[self.out.tokens[row][-1]] for row in early], device=self.device)
            behind = torch.tensor([len(self.out.tokens[row]) - 1 for row in early], device=self.device)
            verifier(tokens, [1] * len(early), self.first_positions[..., index] + behind, None)
            for slot, row in enumerate(early):
                cache.lengths[slot] += 1
                states[row] = cache.row_states(slot)
        slots = self.prompt_slots + longest - 1
        export_rows(source, states, slots)
        contexts = [self.finished_rows[row][1] for row in range(batch)]
        source._dspark_context = DraftContext(weakref.ref(self.draft), slots, contexts)

    def _compact(self, live: list[int]) -> None:
        """Keeps the slots in `live`; those behind the new end move up into freed ones."""
        order = list(range(len(live)))
        freed = [slot for slot in order if slot not in live]
        for slot, source in zip(freed, [slot for slot in live if slot >= len(live)]):
            self.cache.move_row(source, slot)
            order[slot] = source
        self.cache.drop_rows(len(live))
        self.rows = [self.rows[slot] for slot in order]
        self.gaps = [self.gaps[slot] for slot in order]
        if not live:
            return
        index = on_device(order, self.device)
        self.anchors, self.positions = self.anchors[index], self.positions[..., index]
        self.verifier.masks.select_rows(index)
        self.drafter.keep(index)
        self.drafter.cache.uniform = len(live) == 1 and not self.draft_ahead
        if self.pending is not None:
            drafted, confidence = self.pending
            confidence = confidence and [confidence[slot] for slot in order]
            self.pending = drafted.map(lambda part: part[index]), confidence


def _to_host(integers: list[torch.Tensor], floats: list[torch.Tensor | None]) -> tuple[list[list[int]], list]:
    """Copies `(R, *)` integers and `(R, *)` float32 tensors in one transfer."""
    bits = [part.view(torch.int32).long() for part in floats if part is not None]
    table = torch.cat(integers + bits, dim=1).cpu()
    column = sum(part.shape[1] for part in integers)
    rows = table[:, :column].tolist()
    values = []
    for part in floats:
        if part is None:
            values.append(None)
            continue
        end = column + part.shape[1]
        values.append(table[:, column:end].to(torch.int32).view(torch.float32).tolist())
        column = end
    return rows, values
