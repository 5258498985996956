"""Vision-language targets: text alone, and prompts with images, whose positions do not follow from the token count."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from planted import planted_draft
from running import assisted, plain_batch
from targets import HIDDEN_SIZE, NUM_LAYERS, PAD_TOKEN_ID, VOCAB_SIZE, WINDOW, left_pad, prompts
from transformers import GenerationConfig

pytestmark = pytest.mark.exactness

LENGTHS = (3, 7, 12)
IMAGE, VIDEO, START, END = 93, 92, 91, 90
_TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": PAD_TOKEN_ID, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip
_QWEN_VISION = {
    "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {"image_size": 16, "patch_size": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

# name -> (configuration class, model class, fields)
TARGETS = {
    "qwen2_vl": (
        "Qwen2VLConfig", "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**_TEXT, "rope_parameters": _ROPE},
            "vision_config": {**_QWEN_VISION, "depth": 1, "embed_dim": 32, "hidden_size": HIDDEN_SIZE, "mlp_ratio": 2},
            **_QWEN_IDS,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig", "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
            "vision_config": {
                **_QWEN_VISION, "depth": 2, "hidden_size": 32, "out_hidden_size": HIDDEN_SIZE, "intermediate_size": 32,
                "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
            },
            **_QWEN_IDS,
        },
    ),
    "gemma3": (
        "Gemma3Config", "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                **_TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
            },
            "vision_config": {**_VISION, **_IMAGE},
            "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END,
        },
    ),
    "mistral3": (
        "Mistral3Config", "Mistral3ForConditionalGeneration",
        {
            "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 16, "sliding_window": WINDOW},
            "vision_config": {"model_type": "pixtral", **_VISION, **_IMAGE},
            "image_token_index": IMAGE, "vision_feature_layer": -1,
        },
    ),
}  # fmt: skip


@functools.cache
def vision_target(name: str):
    config_class, model_class, fields = TARGETS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**fields, tie_word_embeddings=False)
    model = getattr(transformers, model_class)(config).float().eval()
    model.generation_config = GenerationConfig(pad_token_id=PAD_TOKEN_ID, eos_token_id=None, do_sample=False)
    return model


@pytest.mark.parametrize("name", TARGETS)
def test_text_alone(name):
    target = vision_target(name)
    rows = prompts(LENGTHS, seed=5, high=88)
    expected = plain_batch(target, rows, max_new_tokens=32)
    references = [row + e[max(LENGTHS) :] for row, e in zip(rows, expected.tolist(), strict=True)]
    output = assisted(target, planted_draft(target).plan(references), rows, max_new_tokens=32)
    assert torch.equal(output.sequences, expected)
    assert output.dspark_stats.path == "packed" and output.dspark_stats.tau > 2


def image_inputs() -> tuple[dict, list[list[int]]]:
    """Two prompts of different lengths, each with an image of its own size, left-padded."""
    generator = torch.Generator().manual_seed(1)
    grid = torch.tensor([[1, 4, 8], [1, 4, 4]])  # patches; 2 x 2 of them make one token
    rows = [[5, 6, START, *[IMAGE] * 8, END, 7, 8, 9], [5, START, *[IMAGE] * 4, END, 11]]
    inputs = left_pad(rows)
    return {
        **inputs,
        "pixel_values": torch.randn(4 * 8 + 4 * 4, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": grid,
        "mm_token_type_ids": (inputs["input_ids"] == IMAGE).int(),
    }, rows


@pytest.mark.parametrize("pattern", [(0, 3, 7), (7,)])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_prompts_with_images(name, pattern):
    """Positions go on from the last one of the prompt, not from its number of tokens."""
    target = vision_target(name)
    inputs, rows = image_inputs()
    width = inputs["input_ids"].shape[1]
    expected = target.generate(**inputs, max_new_tokens=32)
    references = [row + e[width:] for row, e in zip(rows, expected.tolist(), strict=True)]
    output = target.generate(
        **inputs,
        assistant_model=planted_draft(target).plan(references, pattern=pattern),
        max_new_tokens=32,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, expected)
    assert output.dspark_stats.path == "packed" and output.dspark_stats.tau > 2
