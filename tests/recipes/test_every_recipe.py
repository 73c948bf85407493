"""Every recipe and format: layers compute the products of the operands that the recipe quantized."""

import en_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import get_recipe, lowp_grouped_linear, lowp_linear
from mindspeed_lowp.recipes import Operand, Recipe, recipe_class, recipe_names
from tests.layers.oracle import dequantize as dequantize_mx
from tests.layers.oracle import rounding_bound

EVERY = [
    pytest.param(name, fmt, id=f"{name}-{fmt}")
    for name in recipe_names()
    for fmt in recipe_class(name).formats
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def elements(codes: Tensor) -> Tensor:
    if codes.dtype == torch.uint8:  # HiFloat8
        return torch.from_numpy(codes.contiguous().numpy().view(en_dtypes.hifloat8).astype(np.float64))
    return codes.double()


def values(operand: Operand, axis: int) -> Tensor:
    """The matrix [M, N] that an operand stands for, float64, but for a scale of the whole matrix."""
    data, scale = operand
    if scale.dim() > data.dim():
        return dequantize_mx(operand, axis)
    if scale.dim() < data.dim():
        return elements(data)
    scale = scale.double()
    for dim, length in enumerate(data.shape):
        if scale.shape[dim] != length:
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, length)
    return elements(data) * scale


def assert_product(actual: Tensor, left: Operand, right: Operand, bias: Tensor | None = None) -> None:
    """actual is left @ right (+ bias) but for fp32 summation and the rounding to its dtype."""
    a, b = values(left, -1), values(right, -2)
    factor = 1.0
    if left.scale.dim() < left.data.dim():
        product = left.scale.flatten()[0] * right.scale.flatten()[0]  # fp32
        if bias is None:  # the hardware keeps sign, exponent and ten bits of mantissa
            product = (product.view(torch.int32) & -(1 << 13)).view(torch.float32)
        factor = product.double().item()
    exact = a @ b * factor + (0 if bias is None else bias.double())
    bound = rounding_bound(a, b, actual.dtype) * abs(factor)
    info = torch.finfo(actual.dtype)
    bound = bound + (2 * info.eps + 2.0**-21) * exact.abs() + info.smallest_normal * info.eps
    if bias is not None:
        bound = bound + 2.0**-22 * (a.abs() @ b.abs() * abs(factor) + bias.double().abs())
    worst = ((actual.double() - exact).abs() - bound).max().item() if actual.numel() else 0.0
    assert worst <= 0, f"off by up to {worst} beyond fp32 accumulation"


def wide(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers whose rows differ in magnitude, far from 1 altogether."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp2(torch.randint(-4, 4, (*shape[:-1], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * rows / 32).to(dtype)


def quantized(recipe: Recipe, x: Tensor, role: str, axis: int) -> Operand:
    return recipe.quantize(x, role, (axis,))[axis]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(128, 256, 128), (5, 33, 7), (130, 200, 97), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(("name", "fp8_format"), EVERY)
def test_linear(name, fp8_format, shape, dtype):
    rows, width, features = shape
    x, weight, grad = (
        wide((rows, width), dtype, 0),
        wide((features, width), dtype, 1),
        wide((rows, features), dtype, 2),
    )
    bias = wide((features,), dtype, 3)
    recipe = get_recipe(name, fp8_format=fp8_format)
    for given in (None, bias):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y = lowp_linear(*leaves, given, recipe)
        y.backward(grad)
        assert_product(
            y, quantized(recipe, x, "input", -1), quantized(recipe, weight, "weight", -1).mT, given
        )
        assert_product(
            leaves[0].grad, quantized(recipe, grad, "grad", -1), quantized(recipe, weight, "weight", -2)
        )
        assert_product(
            leaves[1].grad, quantized(recipe, grad, "grad", -2).mT, quantized(recipe, x, "input", -2)
        )
        assert (y.dtype, leaves[0].grad.dtype, leaves[1].grad.dtype) == (dtype,) * 3


@pytest.mark.parametrize("stacked", [False, True], ids=["separate", "stacked"])
@pytest.mark.parametrize("counts", [[1, 0, 500, 37], [0, 0, 0], [64, 128]], ids=str)
@pytest.mark.parametrize(("name", "fp8_format"), EVERY)
def test_each_expert_is_a_linear_of_its_own(name, fp8_format, counts, stacked):
    """No scale is shared by two experts, however the tokens are distributed."""
    width, features = 160, 96
    x, grad = wide((sum(counts), width), torch.bfloat16, 0), wide((sum(counts), features), torch.bfloat16, 2)
    weights = [wide((features, width), torch.bfloat16, 10 + expert) for expert in range(len(counts))]
    x = x.clone().requires_grad_()
    if stacked:
        given = torch.stack([weight.mT for weight in weights]).requires_grad_()
    else:
        given = [weight.clone().requires_grad_() for weight in weights]
    y = lowp_grouped_linear(x, given, counts, get_recipe(name, fp8_format=fp8_format))
    y.backward(grad)
    dw = given.grad.mT if stacked else [weight.grad for weight in given]
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        alone, weight = x.detach()[rows].clone().requires_grad_(), weights[expert].clone().requires_grad_()
        expected = lowp_linear(alone, weight, None, get_recipe(name, fp8_format=fp8_format))
        expected.backward(grad[rows])
        for actual, wanted in ((y[rows], expected), (x.grad[rows], alone.grad), (dw[expert], weight.grad)):
            torch.testing.assert_close(actual, wanted, rtol=2**-7, atol=1e-6)
        if count == 0:
            assert not dw[expert].any()
        start += count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in recipe_names() if "hif8" in recipe_class(name).formats])
def test_hifloat8_is_used_where_it_is_precise(name, dtype):
    """The largest magnitude becomes 15, of a gradient 224; near 32768, its maximum, one bit would be left."""
    recipe = get_recipe(name, fp8_format="hif8")
    x = wide((130, 200), dtype, 0)
    for role, largest in (("input", 15), ("weight", 15), ("grad", 224)):
        for axis in (-1, -2):
            assert elements(quantized(recipe, x, role, axis).data).abs().max() == largest


@pytest.mark.parametrize(("name", "fp8_format"), EVERY)
def test_zeros_give_zeros(name, fp8_format):
    x, weight = (
        torch.zeros(40, 64).bfloat16().requires_grad_(),
        torch.zeros(24, 64).bfloat16().requires_grad_(),
    )
    y = lowp_linear(x, weight, None, get_recipe(name, fp8_format=fp8_format))
    y.backward(torch.zeros_like(y))
    assert not y.any() and not x.grad.any() and not weight.grad.any()


def assert_broken(y: Tensor, where: tuple, others: list[int] | None = None) -> None:
    """Nothing of y[where] is finite, all of its rows `others` are."""
    assert not y[where].isfinite().any()
    assert others is None or y[others].isfinite().all()


@pytest.mark.parametrize("stacked", [False, True], ids=["separate", "stacked"])
@pytest.mark.parametrize("broken", ["x", "weight", "grad"])
@pytest.mark.parametrize(("name", "fp8_format"), EVERY)
def test_a_broken_element_breaks_its_expert_only(name, fp8_format, broken, stacked):
    """It is seen in all that it is multiplied into, and in nothing of another expert."""
    counts, mine = [40, 0, 33, 20], 2
    others = [row for row in range(93) if not 40 <= row < 73]
    for bad in (float("nan"), float("-inf")):
        x, grad = wide((97, 96), torch.bfloat16, 0), wide((97, 72), torch.bfloat16, 1)
        weights = [wide((72, 96), torch.bfloat16, 2 + expert) for expert in range(4)]
        {"x": x[45], "weight": weights[mine][7], "grad": grad[45]}[broken][5] = bad
        x.requires_grad_()
        given = torch.stack([w.mT for w in weights]) if stacked else weights
        leaves = [given.requires_grad_()] if stacked else [weight.requires_grad_() for weight in given]
        y = lowp_grouped_linear(x, given, counts, get_recipe(name, fp8_format=fp8_format))
        y.backward(grad)
        dw = leaves[0].grad.mT if stacked else [leaf.grad for leaf in leaves]
        if broken == "x":
            # Experts share what decides a scale of `delayed`.
            assert_broken(y, (45,), None if name == "delayed" else others)
            assert_broken(dw[mine], (slice(None), 5))
            assert x.grad.isfinite().all()
        elif broken == "weight":
            assert_broken(y, (slice(40, 73), 7), others)
            assert_broken(x.grad, (slice(40, 73), 5), others)
            assert dw[mine].isfinite().all()
        else:
            assert_broken(x.grad, (45,), others)
            assert_broken(dw[mine], (5,))
        if (name, broken) != ("delayed", "x"):
            assert all(dw[expert].isfinite().all() for expert in (0, 1, 3))
        assert not y[93:].any() and not x.grad[93:].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("name", "fp8_format"), EVERY)
def test_a_broken_gradient_is_seen(name, fp8_format, bad):
    x, weight = (
        wide((40, 64), torch.bfloat16, 0).requires_grad_(),
        wide((24, 64), torch.bfloat16, 1).requires_grad_(),
    )
    recipe = get_recipe(name, fp8_format=fp8_format)
    for _ in range(2):
        y = lowp_linear(x, weight, None, recipe)
        grad = torch.randn_like(y)
        grad[3, 5] = bad
        y.backward(grad)
        assert not x.grad[3].isfinite().all() and not weight.grad[5].isfinite().all()
