"""`first_argmax` against `torch.argmax`, ties included; copies with plain strides."""

import pytest
import torch

from dspark_hf.ops import contiguous_inputs, dense, first_argmax, on_device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 512), (2, 4, 1024), (5, 12288), (4, 300), (2, 256)])
def test_first_argmax_is_argmax(dtype, shape):
    generator = torch.Generator().manual_seed(sum(shape))
    # few distinct values: nearly every row has ties, of which the first must win
    scores = torch.randint(0, 40, shape, generator=generator).to(dtype)
    assert torch.equal(first_argmax(scores), scores.argmax(-1))
    strided = torch.stack([scores, -scores], dim=-2)[..., 0, :]
    assert torch.equal(first_argmax(strided), scores.argmax(-1))


def test_minus_infinity_rows():
    scores = torch.full((2, 512), float("-inf"))
    scores[1, 511] = -5.0
    assert first_argmax(scores).tolist() == [0, 511]


@pytest.mark.parametrize("rows", [1, 2])
def test_dense_has_the_strides_of_its_shape(rows):
    states = torch.randn(rows, 5, 4)[:, :3]
    assert dense(states).equal(states) and dense(states).stride() == (12, 4, 1)


def test_contiguous_inputs_copies_strided_ones_only_inside():
    seen = []
    layer = torch.nn.Linear(4, 3)
    layer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].is_contiguous()))
    states = torch.randn(2, 5, 4)
    wanted = layer(states[:, -1:])
    with contiguous_inputs(layer):
        assert layer(states[:, -1:]).equal(wanted)
    layer(states[:, -1:])
    assert seen == [False, True, False] and len(layer._forward_pre_hooks) == 0
    with contiguous_inputs(None):
        pass


def test_contiguous_inputs_leaves_keywords_alone():
    layer, states = torch.nn.Linear(4, 3), torch.randn(2, 5, 4)
    with contiguous_inputs(layer):
        assert layer(input=states).equal(layer(states))


def test_on_device_takes_lists_and_tensors():
    device = torch.device("cpu")
    assert on_device([3, 1], device).equal(torch.tensor([3, 1]))
    assert on_device([[3], [1]], device).dtype == torch.long
    ids = torch.arange(4)
    assert on_device(ids, device) is ids
