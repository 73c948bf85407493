import pytest
import torch

from mindspeed_lowp import get_recipe
from mindspeed_lowp.recipes import MXFP8Recipe


def test_an_unknown_recipe_names_the_nearest_and_the_available():
    with pytest.raises(
        ValueError, match=r"unknown recipe 'mxfp' \(did you mean 'mxfp8'\?\); available: mxfp8"
    ):
        get_recipe("mxfp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fp8_format": "e5m2"},
            "fp8_format='e5m2': mxfp8 takes one of e4m3, hybrid; for E5M2 gradients, hy",
        ),
        ({"fp8_format": "e3m4"}, "fp8_format='e3m4': mxfp8 takes one of e4m3, hybrid$"),
        ({"defer_backward_quant": "no"}, "defer_backward_quant='no': expected True or False"),
        ({"defer_operands": "input"}, "defer_operands='input': expected one of weight, all"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        get_recipe("mxfp8", **options)


@pytest.mark.parametrize(
    ("options", "weight", "inputs"),
    [
        ({}, False, False),
        ({"defer_operands": "all"}, False, False),
        ({"defer_backward_quant": True}, True, False),
        ({"defer_backward_quant": True, "defer_operands": "all"}, True, True),
    ],
)
def test_what_each_policy_defers(options, weight, inputs):
    recipe = MXFP8Recipe(**options)
    assert (recipe.defers("weight"), recipe.defers("input")) == (weight, inputs)


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
def test_hybrid_quantizes_gradients_to_e5m2_and_nothing_else(fp8_format):
    recipe = MXFP8Recipe(fp8_format)
    x = torch.randn(64, 64).bfloat16()
    kinds = {role: recipe.quantize(x, role, (-1,))[-1].data.dtype for role in ("input", "weight", "grad")}
    grad = torch.float8_e5m2 if fp8_format == "hybrid" else torch.float8_e4m3fn
    assert kinds == {"input": torch.float8_e4m3fn, "weight": torch.float8_e4m3fn, "grad": grad}


def same(a, b):
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64), (3, 5), (33, 31), (2, 40, 96)])
def test_both_axes_in_one_pass_equal_each_alone(shape, dtype):
    x = torch.randn(shape).to(dtype)
    recipe = MXFP8Recipe()
    both = recipe.quantize(x, "input", (-1, -2))
    for axis in (-1, -2):
        assert same(both[axis], recipe.quantize(x, "input", (axis,))[axis])


def test_groups_of_fp32_lie_as_those_of_bf16_do():
    x = torch.randn(70, 40).bfloat16()
    group_list = torch.tensor([0, 33, 33, 69, 70])
    recipe = MXFP8Recipe()
    narrow = recipe.quantize_groups(x, "input", group_list, (-2,))[-2]
    wide = recipe.quantize_groups(x.float(), "input", group_list, (-2,))[-2]
    assert torch.equal(narrow.data.view(torch.uint8), wide.data.view(torch.uint8))
    start = 0
    for group, end in enumerate(group_list.tolist()):
        a, b = (recipe.slice_group(q, group, start, end) for q in (narrow, wide))
        assert same(a, b)
        assert same(a, recipe.quantize(x[start:end], "input", (-2,))[-2])
        start = end
