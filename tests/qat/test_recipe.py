"""Fake quantization by recipe: linears and grouped linears against plain autograd, alone and over FP8."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_lowp import MXLinear, convert_model, get_recipe, lowp_grouped_linear, lowp_linear, ops
from mindspeed_lowp.layers import WeightCache, WeightGrad
from mindspeed_lowp.memory import saved_bytes
from mindspeed_lowp.qat import SCHEMES, MXFP8Grid, default_scale_mode, get_qat_recipe
from mindspeed_lowp.recipes import recipe_class, recipe_names
from tests.ops.test_mxfp4 import oracle
from tests.qat.toolkit import toolkit, toolkit_saturates

T, K, N, E = 12, 70, 40, 3
COUNTS = [5, 0, 6]  # and a row of surplus

mxfp8 = MXFP8Grid().project

GRIDS = {  # of weights and inputs, rows of which are blocked
    "w4a16-mxfp4": (toolkit, lambda x: x),
    "w4a4-mxfp4": (toolkit, toolkit),
    "w4a8-mxfp4": (toolkit, mxfp8),
    "w8a16-mxfp8": (mxfp8, lambda x: x),
}


def saturates(scheme: str, role: str, x: Tensor) -> Tensor:
    grid = GRIDS[scheme][role == "input"]
    if grid is toolkit:
        return toolkit_saturates(x)
    return MXFP8Grid().saturated(x) if grid is mxfp8 else torch.zeros(x.shape, dtype=torch.bool)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Values with outliers, for which gradients are wanted."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) ** 3).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("clip_grad", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_is_that_of_fake_quantized_operands(scheme, clip_grad):
    x, weight, bias, grad = tensors((2, T, K), (N, K), (N,), (2, T, N))
    y = lowp_linear(x, weight, bias, get_qat_recipe(scheme, clip_grad=clip_grad))
    y.backward(grad.detach())

    on_weight, on_input = GRIDS[scheme]
    inputs, w, g = on_input(x.detach()), on_weight(weight.detach()), grad.detach()
    torch.testing.assert_close(y, F.linear(inputs, w, bias))
    dx, dw = g @ w, g.flatten(0, 1).t() @ inputs.flatten(0, 1)
    if clip_grad:
        dx, dw = (
            d.masked_fill(saturates(scheme, role, v.detach()), 0)
            for role, v, d in (("input", x, dx), ("weight", weight, dw))
        )
        assert (dw == 0).any()
    for ours, expected in ((x.grad, dx), (weight.grad, dw), (bias.grad, g.sum((0, 1)))):
        torch.testing.assert_close(ours, expected)
        assert torch.equal(ours == 0, expected == 0)


@pytest.mark.parametrize("clip_grad", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scheme", ["w4a4-mxfp4", "w8a16-mxfp8"])
def test_grouped_linear_blocks_lie_along_the_contracted_axis(scheme, stacked, fused, clip_grad):
    """K of [E, K, N] and of E tensors [N, K]; experts without rows, and rows without an expert."""
    x, together, grad = tensors((T, K), (E, N, K), (T, N))
    apart = [w.detach().clone().requires_grad_() for w in together]
    stack = together.detach().mT.contiguous().requires_grad_()
    parameters = [stack] if stacked else apart
    for parameter in parameters:
        parameter.main_grad = torch.zeros(parameter.shape)
    recipe = get_qat_recipe(scheme, clip_grad=clip_grad)
    y = lowp_grouped_linear(x, stack if stacked else apart, COUNTS, recipe, into_main_grad=fused)
    y.backward(grad.detach())
    grads = [p.main_grad if fused else p.grad for p in parameters]
    dw = grads[0].mT if stacked else torch.stack(grads)

    on_weight, on_input = GRIDS[scheme]
    start = 0
    for expert, count in enumerate(COUNTS):
        rows = slice(start, start + count)
        w, inputs, g = on_weight(together[expert].detach()), on_input(x[rows].detach()), grad[rows].detach()
        expected_dx, expected_dw = g @ w, g.t() @ inputs
        if clip_grad:
            expected_dx.masked_fill_(saturates(scheme, "input", x[rows].detach()), 0)
            expected_dw.masked_fill_(saturates(scheme, "weight", together[expert].detach()), 0)
        torch.testing.assert_close(y[rows], inputs @ w.t())
        torch.testing.assert_close(x.grad[rows], expected_dx)
        torch.testing.assert_close(dw[expert], expected_dw, rtol=1e-5, atol=2e-5)
        assert torch.equal(dw[expert] == 0, expected_dw == 0)
        start += count
    assert not y[start:].any() and not x.grad[start:].any()


@pytest.mark.parametrize("clip_grad", [False, True])
@pytest.mark.parametrize("main_grad_dtype", [torch.float32, torch.bfloat16])
def test_gradients_accumulate_in_main_grad(main_grad_dtype, clip_grad):
    x, weight, grad = tensors((T, K), (N, K), (T, N), dtype=torch.bfloat16)
    weight.main_grad = torch.zeros(weight.shape, dtype=main_grad_dtype)
    recipe = get_qat_recipe("w4a16-mxfp4", clip_grad=clip_grad)
    for _ in range(2):
        y = lowp_linear(x, weight, None, recipe, weight_grad=WeightGrad(into_main_grad=True))
        y.backward(grad.detach())
    assert weight.grad is None
    expected = 2 * (grad.detach().float().t() @ x.detach().float())
    if clip_grad:
        expected.masked_fill_(toolkit_saturates(weight.detach()), 0)
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-4} if main_grad_dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    )
    torch.testing.assert_close(weight.main_grad.float(), expected, **tolerance)
    assert torch.equal(weight.main_grad == 0, expected == 0)


def test_nothing_is_kept_for_backward_but_the_input():
    x, weight = tensors((T, K), (N, K), dtype=torch.bfloat16)
    for scheme in SCHEMES:
        for clip_grad in (False, True):
            y = lowp_linear(x, weight, None, get_qat_recipe(scheme, clip_grad=clip_grad))
            assert saved_bytes(y, [weight]) == x.nbytes


def test_autocast_quantizes_the_weight_from_its_own_precision():
    x, weight, grad = tensors((T, K), (N, K), (T, N))
    with torch.autocast("cpu", torch.bfloat16):
        y = lowp_linear(x, weight, None, get_qat_recipe("w4a16-mxfp4"))
    assert y.dtype == torch.bfloat16
    expected = x.detach().bfloat16().float() @ toolkit(weight.detach()).t()
    torch.testing.assert_close(y.float(), expected, rtol=0.01, atol=0.05)
    y.backward(grad.detach().bfloat16())
    assert weight.grad.dtype == torch.float32
    expected = grad.detach().bfloat16().float().t() @ x.detach().bfloat16().float()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-4)


def run(recipe, dtype=torch.bfloat16, cache=None, scale=1.0):
    x, weight, grad = tensors((64, 128), (96, 128), (64, 96), dtype=dtype)
    weight = (weight.detach() * scale).requires_grad_()
    y = lowp_linear(x, weight, None, recipe, weight_cache=cache)
    return y.detach(), *torch.autograd.grad(y, [x, weight], grad.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_over_mxfp8_the_weight_is_projected_first(dtype):
    """As the recipe itself computes it on a weight that is on the grid already."""
    x, weight, grad = tensors((64, 128), (96, 128), (64, 96), dtype=dtype)
    y, dx, dw = run(get_qat_recipe("w4a16-mxfp4", base=get_recipe("mxfp8")), dtype)
    projected = toolkit(weight.detach()).requires_grad_()
    expected = lowp_linear(x, projected, None, get_recipe("mxfp8"))
    assert torch.equal(y, expected)
    for ours, theirs in zip(
        (dx, dw), torch.autograd.grad(expected, [x, projected], grad.detach()), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert not torch.equal(y, lowp_linear(x, weight, None, get_recipe("mxfp8")))


@pytest.mark.filterwarnings("ignore:quantization-aware training")  # MXFP8's blocks turned are not exact
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("clip_grad", [False, True])
def test_deferral_and_reuse_of_weights_change_no_bit(scheme, clip_grad):
    plain = run(get_qat_recipe(scheme, base=get_recipe("mxfp8"), clip_grad=clip_grad))
    for operands in ("weight", "all"):
        base = get_recipe("mxfp8", defer_backward_quant=True, defer_operands=operands)
        recipe = get_qat_recipe(scheme, base=base, clip_grad=clip_grad)
        assert recipe.defers("weight") and recipe.defers("input") == (operands == "all")
        for cache in (None, WeightCache(check=True)):
            for _ in range(2):  # the second time out of the cache
                results = run(recipe, cache=cache)
                assert all(torch.equal(a, b) for a, b in zip(results, plain, strict=True))


FP8 = [(name, fp8_format) for name in recipe_names() for fp8_format in recipe_class(name).formats]


@pytest.mark.parametrize(("name", "fp8_format"), FP8)
def test_every_recipe_multiplies_what_was_fake_quantized(name, fp8_format):
    """Also grouped; against the recipe on operands that are on the grid."""
    base = get_recipe(name, fp8_format=fp8_format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y, dx, dw = run(get_qat_recipe("w4a4-mxfp4", base=base).for_layer())
    x, weight, grad = (t.detach() for t in tensors((64, 128), (96, 128), (64, 96), dtype=torch.bfloat16))
    on_grid = [toolkit(x).requires_grad_(), toolkit(weight).requires_grad_()]
    expected = lowp_linear(*on_grid, None, base.for_layer())
    expected_grads = torch.autograd.grad(expected, on_grid, grad)
    assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip((dx, dw), expected_grads, strict=True))

    counts = [20, 0, 44]
    weights = torch.stack([weight, weight * 3, -weight])
    recipe = get_qat_recipe("w4a4-mxfp4", base=base)
    for stacked in (False, True):
        given, projected = (w.mT.contiguous() if stacked else list(w) for w in (weights, toolkit(weights)))
        ours = lowp_grouped_linear(x, given, counts, recipe.for_layer())
        theirs = lowp_grouped_linear(toolkit(x), projected, counts, base.for_layer())
        assert torch.equal(ours, theirs)


def on_the_grid(exponents: Tensor, size: int = 64) -> Tensor:
    """Every pair of codes beside each other, rows scaled by powers of two: weights [rows, size], bf16."""
    codes = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0] * (size // 8))
    rows = torch.stack([codes.roll(shift) for shift in range(len(exponents))])
    rows[:, 0] = 6.0  # so that every row's scale is its own exponent
    rows[:, 32] = -6.0
    return (rows * torch.exp2(exponents.float())[:, None]).bfloat16()


def quantized_exactly(weight: Tensor, axis: int, block_size: int = 32) -> int:
    """The number of elements that MXFP8 changes."""
    projected = toolkit(weight, block_size)
    codes, scale = ops.dynamic_mx_quant(projected, axis=axis, dst_type=torch.float8_e4m3fn)
    values = ops.anti_mx_quant(codes, scale, axis=axis, dst_type=torch.float32)
    return int((values != projected.float()).sum())


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_mxfp8_is_exact_along_the_blocks_of_mxfp4(block_size):
    weight = torch.randn(64, 256) * torch.exp2(torch.randint(-12, 12, (64, 256)).float())
    assert quantized_exactly(weight.bfloat16(), -1, block_size) == 0
    two_scales = torch.tensor([[6.0] * 16 + [2.0**-15] * 16]).bfloat16()
    assert quantized_exactly(two_scales, -1, 32) == 0 < quantized_exactly(two_scales, -1, 16)


@pytest.mark.parametrize("span", range(10, 17))
def test_along_the_other_axis_it_is_exact_while_scales_span_at_most_two_to_the_14(span):
    weight = on_the_grid(torch.tensor([0, -span] * 16))
    assert torch.equal(toolkit(weight), weight)
    assert (quantized_exactly(weight, -2) == 0) == (span <= 14)


def test_what_is_not_exact_is_counted_in_a_warning_once():
    weight = on_the_grid(torch.tensor([0, -16] * 16)).requires_grad_()
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    recipe = get_qat_recipe("w4a16-mxfp4", base=get_recipe("mxfp8")).for_layer()
    count = quantized_exactly(weight.detach(), -2)
    message = rf"{count} of the 2048 mxfp4 weights of a layer \[32, 64\] are not exact in mxfp8 along axis -2"
    with pytest.warns(UserWarning, match=message):
        lowp_linear(x, weight, None, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowp_linear(x, weight, None, recipe)
        close = on_the_grid(torch.tensor([0, -14] * 16)).requires_grad_()
        for base in ("mxfp8", "mxfp8-32x32"):
            y = lowp_linear(x, close, None, get_qat_recipe("w4a16-mxfp4", base=get_recipe(base)))
            y.sum().backward()
    deferred = get_recipe("mxfp8", defer_backward_quant=True)
    y = lowp_linear(x, weight, None, get_qat_recipe("w4a16-mxfp4", base=deferred))
    with pytest.warns(UserWarning, match=message):  # backward quantizes along that axis
        y.sum().backward()


@pytest.mark.parametrize("scale_mode", ["round", "floor", "ceil"])
def test_rules_for_the_scale(scale_mode):
    x, weight = tensors((T, K), (N, K))
    y = lowp_linear(x, weight, None, get_qat_recipe("w4a4-mxfp4", scale_mode=scale_mode))
    inputs, w = (oracle(t.detach(), scale_mode=scale_mode) for t in (x, weight))
    torch.testing.assert_close(y.detach(), inputs @ w.t())


def test_defaults_and_refusals():
    assert {scheme: default_scale_mode(scheme) for scheme in SCHEMES} == {
        "w4a16-mxfp4": "round",
        "w4a4-mxfp4": "round",
        "w4a8-mxfp4": "round",
        "w8a16-mxfp8": "floor",
    }
    with pytest.raises(ValueError, match="scheme='w4': expected one of w4a16-mxfp4, w4a4-mxfp4"):
        get_qat_recipe("w4")
    with pytest.raises(ValueError, match="scale_mode='round': expected one of floor, ceil"):
        get_qat_recipe("w8a16-mxfp8", scale_mode="round")
    once = get_qat_recipe("w4a16-mxfp4", base=get_recipe("mxfp8"))
    assert get_qat_recipe("w4a16-mxfp4", base=once) == once


def test_any_model_is_converted_and_learns_in_high_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    parameters = dict(model.named_parameters())
    recipe = get_qat_recipe("w4a8-mxfp4", clip_grad=True)
    assert convert_model(model, recipe, filter_fqns=["2"]).linears == ["0"]
    convert_model(model, recipe, filter_fqns=["2"])
    assert isinstance(model[0], MXLinear) and model[0].recipe == recipe
    assert dict(model.named_parameters()) == parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = model[0].weight.detach().clone()
    model(torch.randn(5, 64)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before.add(model[0].weight.grad, alpha=-1e-3))
    assert not torch.equal(model[0].weight, toolkit(model[0].weight.detach()))
