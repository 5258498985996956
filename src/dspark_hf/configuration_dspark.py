"""Configuration of a DSpark draft model.

A DSpark draft (arXiv 2607.05147) is a few decoder layers that read hidden states *tapped* from a target model and
propose a block of tokens in one forward (section 3.1, eq. 2 and 3), a sequential *Markov head* that makes the tokens
of a block agree with each other (eq. 4 to 6), and a *confidence head* that says how likely each proposal is to be
accepted (eq. 7). Everything that decides shapes or semantics is an explicit field here: which layers are tapped,
whether the anchor slot predicts, which vocabulary the draft speaks, what the checkpoint stores and what it borrows
from the target. Nothing is guessed from names later on, because a wrong block layout or a wrong tap does not fail, it
only stops tokens from being accepted.

This module holds data only: no tensors, no torch.
"""

import math
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

BACKBONES = ("qwen3", "gemma4")
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
# "dynamic" and "longrope" choose frequencies by the sequence length of a call; keys cached in earlier rounds would
# then disagree with those of later ones.
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")
SCHEDULES = ("constant", "confidence", "survival", "throughput")


class DSparkConfig(PreTrainedConfig):
    """Shapes and semantics of a draft model. Every field is validated on construction.

    Args:
        backbone (`str`): family of the draft's decoder layers, `"qwen3"` (also Llama-like: see `qk_norm`,
            `attention_bias`) or `"gemma4"`.
        hidden_size (`int`): width H of the draft.
        intermediate_size (`int`): width of the MLP.
        num_hidden_layers (`int`): number of draft layers.
        num_attention_heads (`int`): query heads per layer.
        num_key_value_heads (`int`): key/value heads per layer; divides `num_attention_heads`.
        head_dim (`int`): width of one head as the layers use it (Gemma 4: the *global* head width).
        hidden_act (`str`): activation of the MLP, a Transformers name.
        rms_norm_eps (`float`): epsilon of every RMS norm.
        attention_bias (`bool`): query, key and value projections have a bias.
        attention_output_bias (`bool`, *optional*): the output projection has one; `None` means as `attention_bias`.
        mlp_bias (`bool`): MLP projections have a bias.
        qk_norm (`bool`): queries and keys are RMS-normalised per head (Qwen 3 and Gemma 4: yes, Llama: no).
        v_norm (`bool`, *optional*): values are RMS-normalised without a weight; `None` means for `"gemma4"` only.
        k_eq_v (`bool`): there is no value projection, values are the key projection's output (Gemma 4).
        rope_parameters (`dict`): flat rotary parameters with `rope_type` and `rope_theta`.
        rope_interleaved (`bool`): the rotary embedding turns neighbouring pairs of a head (0, 1), (2, 3), ... and not
            its two halves against each other.
        max_position_embeddings (`int`): longest sequence the rotary scaling was made for, in tokens.
        layer_types (`list[str]`, *optional*): `"full_attention"` (the default) or `"sliding_attention"`, per layer.
        sliding_window (`int`, *optional*): context tokens before the anchor that a sliding layer sees.
        sliding_window_per_slot (`bool`): the window counts back from each slot, that slot included (Transformers'
            rule), and not from the anchor.
        sliding_window_non_causal (`bool`): sliding layers are bidirectional inside the block, as full ones always are.
        final_logit_softcapping (`float`, *optional*): base logits become c·tanh(logits/c) before the Markov bias.
        embedding_scale (`float`, *optional*): factor on token embeddings; `None` means sqrt(H) for `"gemma4"`, else 1.
        vocab_size (`int`): vocabulary V of the target.
        draft_vocab_size (`int`, *optional*): vocabulary of the proposals; equal to `vocab_size` if unset.
        stores_embedding (`bool`): the checkpoint carries `embed_tokens`; otherwise the target's is borrowed.
        stores_head (`bool`): the checkpoint carries `lm_head`; otherwise the target's is borrowed, of a reduced
            vocabulary the rows of its tokens.
        block_size (`int`): slots per block, anchor included.
        sample_from_anchor (`bool`): the anchor slot predicts too, so a block drafts `block_size` tokens. `False` is
            the "1+N" layout in which slot k predicts its own position and a block drafts `block_size - 1`.
        mask_token_id (`int`): token that fills the slots after the anchor. Required.
        target_layer_ids (`list[int]`): tapped target layers, strictly increasing; n is the output of layer n, -1 the
            embedding output. Required.
        num_target_layers (`int`, *optional*): depth of the target, when known.
        target_hidden_size (`int`, *optional*): width of one tap; `hidden_size` if unset.
        markov_rank (`int`): rank r of the Markov head; 0 for none (a DFlash-like draft).
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head (`bool`): there is a confidence head.
        confidence_head_with_markov (`bool`): it also reads the Markov embedding of the previous token.
        confidence_calibration (`dict`, *optional*): `{"temperature": [...], "shift": [...]}`, one number per drafted
            slot, as the calibration step writes it.
        initializer_range (`float`): standard deviation of freshly initialised weights.

    Raises:
        ValueError: naming the field, when a value is missing, out of range or contradicts another.
    """

    model_type = "dspark"
    has_no_defaults_at_init = True

    def __init__(
        self,
        backbone: str = "qwen3",
        hidden_size: int = 2560,
        intermediate_size: int = 9728,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 8,
        head_dim: int = 128,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        attention_bias: bool = False,
        attention_output_bias: bool | None = None,
        mlp_bias: bool = False,
        qk_norm: bool = True,
        v_norm: bool | None = None,
        k_eq_v: bool = False,
        rope_parameters: dict[str, Any] | None = None,
        rope_interleaved: bool = False,
        max_position_embeddings: int = 40960,
        layer_types: list[str] | None = None,
        sliding_window: int | None = None,
        sliding_window_per_slot: bool = False,
        sliding_window_non_causal: bool = False,
        final_logit_softcapping: float | None = None,
        embedding_scale: float | None = None,
        vocab_size: int = 151936,
        draft_vocab_size: int | None = None,
        stores_embedding: bool = True,
        stores_head: bool = True,
        block_size: int = 7,
        sample_from_anchor: bool = True,
        mask_token_id: int | None = None,
        target_layer_ids: list[int] | None = None,
        num_target_layers: int | None = None,
        target_hidden_size: int | None = None,
        markov_rank: int = 256,
        markov_head_type: str = "vanilla",
        enable_confidence_head: bool = True,
        confidence_head_with_markov: bool = True,
        confidence_calibration: dict[str, list[float]] | None = None,
        initializer_range: float = 0.02,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs,
    ):
        self.backbone = backbone
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.attention_bias = attention_bias
        self.attention_output_bias = attention_bias if attention_output_bias is None else attention_output_bias
        self.mlp_bias = mlp_bias
        self.qk_norm = qk_norm
        self.v_norm = backbone == "gemma4" if v_norm is None else v_norm
        self.k_eq_v = k_eq_v
        self.rope_parameters = dict(rope_parameters or {"rope_type": "default", "rope_theta": 10000.0})
        self.rope_interleaved = rope_interleaved
        self.max_position_embeddings = max_position_embeddings
        self.layer_types = list(layer_types) if layer_types is not None else ["full_attention"] * num_hidden_layers
        self.sliding_window = sliding_window
        self.sliding_window_per_slot = sliding_window_per_slot
        self.sliding_window_non_causal = sliding_window_non_causal
        self.final_logit_softcapping = final_logit_softcapping
        default_scale = math.sqrt(hidden_size) if backbone == "gemma4" else 1.0
        self.embedding_scale = default_scale if embedding_scale is None else embedding_scale
        self.vocab_size = vocab_size
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.stores_embedding = stores_embedding
        self.stores_head = stores_head
        self.block_size = block_size
        self.sample_from_anchor = sample_from_anchor
        self.mask_token_id = mask_token_id
        self.target_layer_ids = list(target_layer_ids) if target_layer_ids is not None else None
        self.num_target_layers = num_target_layers
        self.target_hidden_size = hidden_size if target_hidden_size is None else target_hidden_size
        self.markov_rank = markov_rank
        self.markov_head_type = markov_head_type
        self.enable_confidence_head = enable_confidence_head
        self.confidence_head_with_markov = confidence_head_with_markov
        self.confidence_calibration = confidence_calibration
        self.initializer_range = initializer_range
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self._validate_fields()
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens one block drafts: `block_size`, or `block_size - 1` in the 1+N layout."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Whether proposals come from a subset of the target's vocabulary."""
        return self.draft_vocab_size != self.vocab_size

    def _validate_fields(self) -> None:
        positive = (
            "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
            "max_position_embeddings vocab_size draft_vocab_size block_size target_hidden_size"
        )
        for name in positive.split():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
        _check_choice("backbone", self.backbone, BACKBONES)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` ({self.num_key_value_heads}) must divide `num_attention_heads` "
                f"({self.num_attention_heads})."
            )
        self._validate_layers()
        self._validate_rope()
        self._validate_block_and_taps()
        self._validate_heads()

    def _validate_layers(self) -> None:
        for layer_type in self.layer_types:
            _check_choice("layer_types", layer_type, LAYER_TYPES)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` has {len(self.layer_types)} entries for `num_hidden_layers` {self.num_hidden_layers}."
            )
        if "sliding_attention" in self.layer_types:
            if self.backbone == "gemma4":
                raise ValueError("`layer_types`: a Gemma 4 draft uses full attention in every layer.")
            if not isinstance(self.sliding_window, int) or self.sliding_window < 1:
                raise ValueError(
                    f"`sliding_window` must be a positive integer when `layer_types` has sliding layers, "
                    f"got {self.sliding_window!r}."
                )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` ({self.draft_vocab_size}) is larger than `vocab_size` ({self.vocab_size})."
            )

    def _validate_rope(self) -> None:
        if any(isinstance(value, dict) for value in self.rope_parameters.values()):
            raise ValueError(
                "`rope_parameters` must be one flat dictionary; pass the parameters of the layer type the draft uses."
            )
        _check_choice("rope_parameters['rope_type']", self.rope_parameters.get("rope_type", "default"), ROPE_TYPES)
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even for rotary embeddings, got {self.head_dim}.")

    def _validate_block_and_taps(self) -> None:
        if self.mask_token_id is None:
            raise ValueError("`mask_token_id` is missing: the draft needs the token that fills its block.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"`mask_token_id` ({self.mask_token_id}) is outside the vocabulary of {self.vocab_size}.")
        if not self.sample_from_anchor and self.block_size < 2:
            raise ValueError(
                "`block_size` must be at least 2 when `sample_from_anchor` is false: slot 0 drafts nothing."
            )
        taps = self.target_layer_ids
        if not taps:
            raise ValueError("`target_layer_ids` is missing: the draft needs to know which target layers it reads.")
        if any(later <= earlier for earlier, later in zip(taps, taps[1:], strict=False)) or taps[0] < -1:
            raise ValueError(f"`target_layer_ids` must be strictly increasing from -1 on, got {taps}.")
        if self.num_target_layers is not None and taps[-1] >= self.num_target_layers:
            raise ValueError(
                f"`target_layer_ids` {taps} reach outside the target's `num_target_layers` {self.num_target_layers}."
            )

    def _validate_heads(self) -> None:
        if not isinstance(self.markov_rank, int) or self.markov_rank < 0:
            raise ValueError(
                f"`markov_rank` must be 0 (no Markov head) or a positive integer, got {self.markov_rank!r}."
            )
        _check_choice("markov_head_type", self.markov_head_type, MARKOV_HEAD_TYPES)
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            raise ValueError(
                "`confidence_head_with_markov` needs a Markov head, but `markov_rank` is 0: set "
                "`confidence_head_with_markov=False`, or give the draft a Markov head."
            )
        calibration = self.confidence_calibration
        if calibration is None:
            return
        if not self.enable_confidence_head:
            raise ValueError("`confidence_calibration` is set, but the draft has no confidence head.")
        for name, values in calibration.items():
            if name not in ("temperature", "shift"):
                raise ValueError(f"`confidence_calibration` knows 'temperature' and 'shift', not {name!r}.")
            if len(values) != self.num_draft_tokens or not all(math.isfinite(value) for value in values):
                raise ValueError(
                    f"`confidence_calibration[{name!r}]` needs one finite number for each of the "
                    f"{self.num_draft_tokens} drafted slots, got {values!r}."
                )
        if any(value <= 0 for value in calibration.get("temperature", [])):
            raise ValueError(f"`confidence_calibration['temperature']` must be positive, got {calibration!r}.")


def default_generation_config(config: DSparkConfig) -> GenerationConfig:
    """Drafting knobs a new draft starts with: draft the whole block, and schedule by load when it has confidences."""
    return GenerationConfig(
        num_assistant_tokens=config.num_draft_tokens,
        assistant_confidence_threshold=0.0,
        num_assistant_tokens_schedule="throughput" if config.enable_confidence_head else "constant",
    )


def validate_generation_config(generation_config: GenerationConfig, config: DSparkConfig) -> None:
    """Checks the drafting knobs of `generation_config` against the draft they are meant for.

    Args:
        generation_config (`GenerationConfig`): only `num_assistant_tokens`, `assistant_confidence_threshold`,
            `num_assistant_tokens_schedule` and `prompt_lookup_num_tokens` are read; `None` means unset and passes.
        config (`DSparkConfig`): the draft's configuration.

    Raises:
        ValueError: for a schedule other than `"constant"`, `"confidence"` or `"throughput"`, a schedule that needs
            the confidence head this draft lacks, a token count below 1 (of copied tokens: below 0), or a threshold
            outside [0, 1].
    """
    schedule = generation_config.num_assistant_tokens_schedule
    if schedule is not None:
        _check_choice("num_assistant_tokens_schedule", schedule, SCHEDULES)
        if schedule != "constant" and not config.enable_confidence_head:
            raise ValueError(
                f"`num_assistant_tokens_schedule` {schedule!r} needs a confidence head, which this draft lacks; "
                "use 'constant'."
            )
    count = generation_config.num_assistant_tokens
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ValueError(f"`num_assistant_tokens` must be an integer of at least 1, got {count!r}.")
    copied = generation_config.prompt_lookup_num_tokens
    if copied is not None and (not isinstance(copied, int) or isinstance(copied, bool) or copied < 0):
        raise ValueError(f"`prompt_lookup_num_tokens` must be an integer; 0 copies nothing, got {copied!r}.")
    threshold = generation_config.assistant_confidence_threshold
    if threshold is not None and not 0.0 <= threshold <= 1.0:
        raise ValueError(
            f"`assistant_confidence_threshold` is a probability and must lie within [0, 1], got {threshold!r}."
        )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")


__all__ = ["DSparkConfig", "default_generation_config", "validate_generation_config"]
