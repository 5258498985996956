"""The way into `model.generate(..., assistant_model=draft)`.

Two methods of `GenerationMixin` are wrapped when the package is imported; both look at the assistant's class and hand
every other assistant to the original. `uninstall()` takes the wrappers away again.
"""

import functools
import logging
import time
import weakref

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode

from .._compat import CACHE_KEY
from ..modeling_dspark import DSparkDraftModel
from ..sharing import target_devices
from ..stats import GenerateDSparkOutput, GenerationStats, publish
from .candidate_generator import DSparkCandidateGenerator, decode_sequentially
from .capability import PLAIN, SEQUENTIAL, verification_path
from .loop import DecodingLoop
from .policy import ConstantPolicy, ThroughputPolicy
from .processors import sequential_processors
from .profiling import profile_for
from .ragged_cache import new_dynamic_cache
from .settings import Settings, resolve_settings
from .stopping import StopRules
from .verifier import step_filler

logger = logging.getLogger(__name__)

# Other ways to speed up decoding that `generate()` would mix with ours, and the value that leaves each of them off.
_OTHER_ASSISTANCE = {
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "speculation_type": (None,),
    "use_mtp": (None, False),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
}
_HINTS = {
    "prompt_lookup_num_tokens": " The draft's scheduler copies from the text by itself; how much is set in "
    "`draft.generation_config.prompt_lookup_num_tokens` (0: nothing)."
}
# First slots to see before a draft is called useless, and the share of them accepted below which it is.
_ENOUGH_ROUNDS, _USELESS = 48, 0.02
# Tokens beyond the prompt for which the cost table must hold when a call starts.
_PROFILED_AHEAD = 256

_warned_targets: "weakref.WeakSet" = weakref.WeakSet()
_warned_drafts: "weakref.WeakSet" = weakref.WeakSet()


def validate_call(model, draft: DSparkDraftModel, mode: GenerationMode | None, config: GenerationConfig, kwargs: dict):
    """
    Refuses what this decoding cannot do, before anything is computed.

    Raises:
        ValueError: naming the argument and the fix.
    """
    draft.validate_target(model)
    resolve_settings(draft, config)
    if (config.num_beams or 1) > 1:
        raise ValueError("`num_beams` must be 1 with a DSpark draft: beam search cannot be drafted for.")
    for name, off in _OTHER_ASSISTANCE.items():
        if getattr(config, name, None) not in off:
            hint = _HINTS.get(name, "")
            raise ValueError(
                f"`{name}` cannot be used together with a DSpark draft as `assistant_model`; drop one.{hint}"
            )
    if kwargs.get("assistant_tokenizer") is not None:
        raise ValueError("`assistant_tokenizer` is not needed: a DSpark draft works on the target's token ids.")
    if mode is not None and mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(f"a DSpark draft decodes greedily or by sampling, but these arguments ask for '{mode.value}'.")
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name, False):
                raise ValueError(
                    f"`{name}=True` is not supported with a DSpark draft: tokens are verified in blocks. "
                    f"Drop `{name}` or the draft."
                )
    if config.cache_implementation in ("quantized", "offloaded", "offloaded_static", "offloaded_hybrid"):
        raise ValueError(
            f"`cache_implementation='{config.cache_implementation}'` is not supported with a DSpark draft; "
            "leave it unset."
        )
    devices = target_devices(model)
    if draft.device not in devices:
        raise ValueError(
            f"the draft is on {draft.device}, the target on {', '.join(sorted(map(str, devices)))}; "
            "move the draft with `draft.to(model.device)`."
        )


def decode(
    model,
    input_ids: torch.LongTensor,
    draft: DSparkDraftModel,
    logits_processor,
    stopping_criteria,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    **model_kwargs,
):
    """
    Decodes with `draft`; arguments as `generate()` prepares them for its decoding methods.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`, or [`GenerateDSparkOutput`] with `return_dict_in_generate`.
    """
    settings = resolve_settings(draft, generation_config)
    path, reason = (PLAIN, "ranks in lock-step need one forward per token") if synced_gpus else verification_path(model)
    if names := sequential_processors(logits_processor):
        path, reason = PLAIN, f"{', '.join(names)} can only follow one token at a time"
    if path == SEQUENTIAL:
        others = StopRules(stopping_criteria, 0, generation_config.max_length).others
        if input_ids.shape[0] > 1:
            path, reason = PLAIN, f"only single prompts can be drafted for ({reason})"
        elif others:
            path, reason = PLAIN, "criteria other than length and end-of-sequence need its tokens one by one"
    arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
    if path in (PLAIN, SEQUENTIAL):
        return _decode_otherwise(model, draft, path, reason, settings, arguments, streamer, synced_gpus, model_kwargs)

    cache, keep_cache = _starting_cache(model, generation_config, model_kwargs)
    model_kwargs[CACHE_KEY] = cache
    model_kwargs["use_cache"] = True
    policy = _policy(model, draft, path, settings, input_ids, cache, generation_config)
    loop = DecodingLoop(model, draft, path, settings, policy, *arguments, streamer=streamer, keep_cache=keep_cache)
    with torch.no_grad():
        sequences = loop.run(cache, model_kwargs)
    _finish(draft, loop.stats)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateDSparkOutput(
        sequences=sequences,
        scores=None if loop.out.scores is None else tuple(loop.out.scores),
        logits=None if loop.out.logits is None else tuple(loop.out.logits),
        dspark_stats=loop.stats,
        **{CACHE_KEY: cache},
    )


def _policy(model, draft, path: str, settings: Settings, input_ids, cache, generation_config) -> ConstantPolicy:
    """The call's policy; "throughput" measures the machine at its first use."""
    if settings.schedule != "throughput":
        return ConstantPolicy(settings)
    rows, context = input_ids.shape[0], max(generation_config.max_length, cache.get_seq_length())
    profile = profile_for(model, draft, path, rows, min(context, input_ids.shape[1] + _PROFILED_AHEAD))
    filler, sampled = step_filler(model, path), generation_config.do_sample
    return ThroughputPolicy(settings, profile, settings.num_tokens, rows, filler, sampled)


def _starting_cache(model, generation_config, model_kwargs: dict) -> tuple[DynamicCache, bool]:
    """The cache to prefill and whether it outlives the call. A static or missing one is replaced."""
    cache = model_kwargs.get(CACHE_KEY)
    user_defined = bool(getattr(cache, "_is_user_defined", False)) or (cache is not None and cache.get_seq_length() > 0)
    if type(cache) is not DynamicCache:
        if user_defined:
            raise ValueError(
                f"`{CACHE_KEY}` is a {type(cache).__name__}; with a DSpark draft pass a `DynamicCache` or none."
            )
        cache = new_dynamic_cache(model.config)
    return cache, user_defined or bool(generation_config.return_dict_in_generate)


def _decode_otherwise(model, draft, path, reason, settings, arguments, streamer, synced_gpus, model_kwargs):
    """Transformers' own loops for targets that the batched one cannot serve."""
    began = time.perf_counter()
    if path == PLAIN and model not in _warned_targets:
        _warned_targets.add(model)
        logger.warning(
            "%s is decoded without the DSpark draft: %s. The output is that of plain generate().",
            type(model).__name__,
            reason,
        )
    input_ids, logits_processor, stopping_criteria, generation_config = arguments
    arguments = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "streamer": streamer,
        **model_kwargs,
    }
    if path == SEQUENTIAL:
        generator = DSparkCandidateGenerator(
            model,
            draft,
            logits_processor,
            do_sample=generation_config.do_sample,
            num_tokens=settings.num_tokens,
            max_length=generation_config.max_length,
            eos_token_ids=tuple(StopRules(stopping_criteria, 0, generation_config.max_length).eos),
        )
        result, stats = decode_sequentially(generator, model, input_ids, **arguments), generator.stats
    else:
        result = model._sample(input_ids, synced_gpus=synced_gpus, **arguments)
        stats = GenerationStats(path=path, calls=1)
    sequences = result.sequences if isinstance(result, GenerateDecoderOnlyOutput) else result
    stats.new_tokens = (sequences.shape[1] - input_ids.shape[1]) * sequences.shape[0]
    stats.seconds = time.perf_counter() - began
    _finish(draft, stats)
    if isinstance(result, GenerateDecoderOnlyOutput):
        return GenerateDSparkOutput(**result, dspark_stats=stats)
    return result


def _finish(draft: DSparkDraftModel, stats: GenerationStats) -> None:
    """Publishes the statistics; warns once per draft when it is hardly ever right."""
    publish(stats)
    verified = [event for event in stats.round_events if any(event.verify_lengths)]
    tried = sum(event.verify_lengths[place] > 0 for event in verified for place in event.draft_rows)
    accepted = sum(event.accepted[place] > 0 for event in verified for place in event.draft_rows)
    if tried >= _ENOUGH_ROUNDS and accepted < _USELESS * tried and draft not in _warned_drafts:
        _warned_drafts.add(draft)
        logger.warning(
            "The target accepted %d of %d first drafted tokens. The output is right but nothing is gained. Likely "
            "causes: the draft was trained for another target or another version of it, its block layout was read "
            "wrongly (see `sample_from_anchor` of from_pretrained), or the target is quantised very coarsely.",
            accepted,
            tried,
        )


def decoder(draft: DSparkDraftModel, streamer=None):
    """
    The same decoding as a `custom_generate` callable, for use without the hook.

        model.generate(**inputs, custom_generate=decoder(draft))

    Args:
        draft (`DSparkDraftModel`): The draft.
        streamer (`BaseStreamer`, *optional*): `generate()` keeps its own `streamer` argument from such callables.
    """

    def generate_with_draft(
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, **model_kwargs
    ):
        validate_call(model, draft, None, generation_config, {})
        return decode(
            model,
            input_ids,
            draft,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    return generate_with_draft


# ---------------------------------------------------------------------------------------------------- installation


def _wrap_decoding(original):
    # generate() reads the signature of the method to decide what to pass, so the wrapper must show the original's
    @functools.wraps(original)
    def _assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        if not isinstance(assistant_model, DSparkDraftModel):
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        for name in ("inputs_tensor", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(name, None)
        return decode(self, input_ids, assistant_model, *args, **kwargs)

    _assisted_decoding._dspark_original = original
    return _assisted_decoding


def _wrap_validation(original):
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        draft = generation_mode_kwargs.get("assistant_model")
        if not isinstance(draft, DSparkDraftModel):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        validate_call(self, draft, generation_mode, generation_config, generation_mode_kwargs)

    _validate_generation_mode._dspark_original = original
    return _validate_generation_mode


_WRAPPERS = {"_assisted_decoding": _wrap_decoding, "_validate_generation_mode": _wrap_validation}


def install() -> None:
    """Makes `generate()` accept a DSpark draft as `assistant_model`. Importing the package does it."""
    for name, wrap in _WRAPPERS.items():
        method = getattr(GenerationMixin, name)
        if not hasattr(method, "_dspark_original"):
            setattr(GenerationMixin, name, wrap(method))


def uninstall() -> None:
    """Puts Transformers' own methods back."""
    for name in _WRAPPERS:
        original = getattr(getattr(GenerationMixin, name), "_dspark_original", None)
        if original is not None:
            setattr(GenerationMixin, name, original)
