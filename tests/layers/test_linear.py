import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mindspeed_lowp import get_recipe, lowp_linear
from mindspeed_lowp.layers import WeightGrad
from mindspeed_lowp.memory import saved_bytes

from .oracle import assert_product, quantized
from .recording import RecordingRecipe

DUAL = {}
DEFER_WEIGHT = {"defer_backward_quant": True}
DEFER_ALL = {"defer_backward_quant": True, "defer_operands": "all"}
POLICIES = {"dual": DUAL, "defer-weight": DEFER_WEIGHT, "defer-all": DEFER_ALL}


def make_case(rows=96, width=160, features=64, dtype=torch.bfloat16, bias=True, seed=0):
    """x [rows, width], weight [features, width], bias, output gradient, of magnitudes far apart."""
    gen = torch.Generator().manual_seed(seed)

    def wide(*shape):
        spread = torch.exp2(torch.randint(-6, 6, shape, generator=gen).float())
        return (torch.randn(*shape, generator=gen) * spread).to(dtype)

    x, weight, grad = wide(rows, width), wide(features, width), wide(rows, features)
    return x, weight, wide(features) if bias else None, grad


def run(recipe, x, weight, bias, grad, linear=lowp_linear, **options):
    """Output and the gradients of x, weight and bias."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    bias = None if bias is None else bias.clone().requires_grad_()
    y = linear(x, weight, bias, recipe, **options)
    y.backward(grad.view_as(y))
    return y.detach(), x.grad, weight.grad, None if bias is None else bias.grad


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64, 64), (96, 160, 64), (5, 33, 7), (130, 40, 97), (1, 1, 1)])
def test_output_and_gradients_are_the_products_of_the_quantized_operands(shape, dtype, fp8_format):
    x, weight, bias, grad = make_case(*shape, dtype=dtype)
    if dtype == torch.float16:
        x, weight, grad = x / 16, weight / 16, grad / 16  # keeps sums within fp16's range
    recipe = get_recipe("mxfp8", fp8_format=fp8_format)
    y, dx, dw, db = run(recipe, x, weight, bias, grad)

    x1, x2 = quantized(recipe, x, "input", -1), quantized(recipe, x, "input", -2)
    w1, w2 = quantized(recipe, weight, "weight", -1), quantized(recipe, weight, "weight", -2)
    g1, g2 = quantized(recipe, grad, "grad", -1), quantized(recipe, grad, "grad", -2)
    assert_product(y, x1, w1.mT, bias)
    assert_product(dx, g1, w2)
    assert_product(dw, g2.mT, x2)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (dtype,) * 4
    torch.testing.assert_close(db, grad.sum(0, dtype=dtype), rtol=0, atol=0)


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("shape", [(64, 64, 64), (96, 160, 64), (5, 33, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deferring_changes_no_bit(shape, dtype, fp8_format):
    case = make_case(*shape, dtype=dtype)
    dual, weight_only, everything = (
        run(get_recipe("mxfp8", fp8_format=fp8_format, **policy), *case) for policy in POLICIES.values()
    )
    for reference, other in [(dual, weight_only), (dual, everything)]:
        for a, b in zip(reference, other, strict=True):
            assert torch.equal(a, b)


def test_leading_dimensions_are_rows():
    x, weight, bias, grad = make_case(rows=96)
    recipe = get_recipe("mxfp8")
    flat = run(recipe, x, weight, bias, grad)
    y, dx, dw, db = run(recipe, x.view(4, 3, 8, -1), weight, bias, grad)
    assert y.shape == (4, 3, 8, 64)
    assert torch.equal(y.view(96, -1), flat[0]) and torch.equal(dx.view(96, -1), flat[1])
    assert torch.equal(dw, flat[2]) and torch.equal(db, flat[3])


def test_memory_layout_of_input_and_gradient_does_not_matter():
    x, weight, bias, grad = make_case()
    recipe = get_recipe("mxfp8")
    plain = run(recipe, x, weight, bias, grad)

    def strided(t):
        return t.mT.contiguous().mT

    y = lowp_linear(
        (xs := strided(x).detach().requires_grad_()), (ws := strided(weight).requires_grad_()), bias, recipe
    )
    y.backward(strided(grad))
    for a, b in zip(plain[:3], (y, xs.grad, ws.grad), strict=True):
        assert torch.equal(a, b)


def test_no_rows_give_empty_output_and_zero_weight_gradient():
    x, weight, bias, grad = make_case(rows=0)
    y, dx, dw, db = run(get_recipe("mxfp8"), x, weight, bias, grad)
    assert y.shape == (0, 64) and dx.shape == (0, 160)
    assert not dw.any() and dw.shape == weight.shape and not db.any()


def test_nan_in_the_gradient_reaches_the_weight_gradient():
    x, weight, bias, grad = make_case()
    grad[3, 5] = float("nan")
    _, dx, dw, _ = run(get_recipe("mxfp8"), x, weight, bias, grad)
    assert dx[3].isnan().all() and not dx[4].isnan().any()
    assert dw[5].isnan().all() and not dw[6].isnan().any()


# What is quantized, and when


@pytest.mark.parametrize(
    ("policy", "forward", "backward"),
    [
        ("dual", [("input", (-1, -2)), ("weight", (-1, -2))], [("grad", (-1, -2))]),
        (
            "defer-weight",
            [("input", (-1, -2)), ("weight", (-1,))],
            [("grad", (-1, -2)), ("weight", (-2,))],
        ),
        (
            "defer-all",
            [("input", (-1,)), ("weight", (-1,))],
            [("input", (-2,)), ("grad", (-1, -2)), ("weight", (-2,))],
        ),
    ],
)
def test_each_policy_quantizes_what_it_says(policy, forward, backward):
    x, weight, bias, grad = make_case()
    recipe = RecordingRecipe(**POLICIES[policy])
    y = lowp_linear(x.requires_grad_(), weight.requires_grad_(), bias, recipe)
    assert recipe.log == forward
    y.backward(grad)
    assert recipe.log[len(forward) :] == backward


def test_without_grad_only_the_forward_axis_is_quantized():
    x, weight, bias, _ = make_case()
    recipe = RecordingRecipe()
    with torch.no_grad():
        lowp_linear(x.requires_grad_(), weight.requires_grad_(), bias, recipe)
    assert recipe.log == [("input", (-1,)), ("weight", (-1,))]


def test_frozen_weight_needs_no_second_axis_of_the_input():
    x, weight, bias, grad = make_case()
    recipe = RecordingRecipe()
    y = lowp_linear(x.requires_grad_(), weight, bias, recipe)
    y.backward(grad)
    assert recipe.log == [("input", (-1,)), ("weight", (-1, -2)), ("grad", (-1,))]
    assert torch.equal(x.grad, run(get_recipe("mxfp8"), *make_case())[1])


def test_input_without_gradient_needs_no_second_axis_of_the_weight():
    x, weight, bias, grad = make_case()
    recipe = RecordingRecipe()
    lowp_linear(x, weight.requires_grad_(), bias, recipe).backward(grad)
    assert recipe.log == [("input", (-1, -2)), ("weight", (-1,)), ("grad", (-2,))]
    assert torch.equal(weight.grad, run(get_recipe("mxfp8"), *make_case())[2])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gives_the_same_bits(policy, reentrant):
    x, weight, bias, grad = make_case()
    recipe = RecordingRecipe(**POLICIES[policy])
    plain = run(recipe, x, weight, bias, grad)
    recipe.log.clear()

    def recomputed(x, weight, bias, recipe):
        return checkpoint(lowp_linear, x, weight, bias, recipe, use_reentrant=reentrant)

    again = run(recipe, x, weight, bias, grad, linear=recomputed)
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
    if reentrant:  # whose first pass runs without grad
        assert recipe.log[:2] == [("input", (-1,)), ("weight", (-1,))]


def test_autocast_computes_in_its_dtype_and_keeps_the_weights_own():
    x, weight, bias, grad = make_case(dtype=torch.float32)
    recipe = get_recipe("mxfp8")

    def under_autocast(x, weight, bias, recipe):
        with torch.autocast("cpu", torch.bfloat16):
            return lowp_linear(x, weight, bias, recipe)

    y, dx, dw, db = run(recipe, x, weight, bias, grad.bfloat16(), linear=under_autocast)
    assert y.dtype == torch.bfloat16
    assert (dx.dtype, dw.dtype, db.dtype) == (torch.float32,) * 3
    expected = quantized(recipe, weight, "weight", -1)  # from fp32, not by way of bf16
    assert_product(y, quantized(recipe, x.bfloat16(), "input", -1), expected.mT, bias)
    assert torch.equal(y, lowp_linear(x.bfloat16(), weight, bias, recipe))


# Memory


def test_bytes_kept_for_backward():
    size = 256
    x, weight, _, _ = make_case(size, size, size, bias=False)
    weight = torch.nn.Parameter(weight)
    measured = {}
    for name, policy in POLICIES.items():
        recipe = get_recipe("mxfp8", **policy)
        measured[name] = saved_bytes(lowp_linear(x.clone().requires_grad_(), weight, None, recipe), [weight])
    bf16 = saved_bytes(F.linear(x.clone().requires_grad_(), weight), [weight])
    assert bf16 == 2 * size * size
    assert measured["defer-weight"] <= 0.52 * bf16
    assert measured["dual"] - measured["defer-weight"] == weight.numel() * 33 // 32
    assert measured["defer-all"] == bf16


# Where the weight gradient goes


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_is_added_to_main_grad(main_dtype):
    x, weight, _, grad = make_case(bias=False)
    recipe = get_recipe("mxfp8")
    weight = torch.nn.Parameter(weight)
    start = torch.randn(weight.shape).to(main_dtype)
    weight.main_grad = start.clone()
    weight.grad_added_to_main_grad = False
    fused = WeightGrad(into_main_grad=True)
    lowp_linear(x.requires_grad_(), weight, None, recipe, weight_grad=fused).backward(grad)

    g2, x2 = quantized(recipe, grad, "grad", -2), quantized(recipe, x.detach(), "input", -2)
    product = g2.mT @ x2
    tolerance = 2.0**-24 * (len(x) + 4) * (g2.mT.abs() @ x2.abs()) + 2.0**-23 * (product.abs() + 8)
    if main_dtype == torch.bfloat16:
        tolerance = tolerance + 2.0**-7 * (product.abs() + 8)
    assert ((weight.main_grad.double() - start.double() - product).abs() <= tolerance).all()
    assert weight.grad_added_to_main_grad is True
    assert weight.grad.shape == weight.shape  # values nobody reads: data parallelism's hook wants a gradient


def test_a_weight_that_somebody_adds_gets_zeros_beside_main_grad():
    x, weight, _, grad = make_case(bias=False)
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.zeros(weight.shape)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = True
    fused = WeightGrad(into_main_grad=True)
    lowp_linear(x, weight, None, get_recipe("mxfp8"), weight_grad=fused).backward(grad)
    assert weight.main_grad.any() and not weight.grad.any()


def test_weight_gradient_is_postponed_up_to_the_limit():
    x, weight, _, grad = make_case(bias=False)
    later: list[torch.Tensor] = []
    weight_grad = WeightGrad(later=later, limit=1)
    recipe = get_recipe("mxfp8")
    first = weight.clone().requires_grad_()
    lowp_linear(x, first, None, recipe, weight_grad=weight_grad).backward(grad)
    assert first.grad is None and len(later) == 1 and torch.equal(later[0], grad)
    second = weight.clone().requires_grad_()
    lowp_linear(x, second, None, recipe, weight_grad=weight_grad).backward(grad)
    assert len(later) == 1 and torch.equal(second.grad, run(recipe, x, weight, None, grad)[2])


def test_shapes_that_do_not_fit_are_named():
    x, weight, bias, _ = make_case()
    with pytest.raises(ValueError, match=r"x \[96, 159\] and weight \[64, 160\]"):
        lowp_linear(x[:, 1:], weight, bias, get_recipe("mxfp8"))
    for wrong in (bias[:1], bias[None]):
        with pytest.raises(ValueError, match=r"bias \[1.*\]; expected \[N\], here \[64\]"):
            lowp_linear(x, weight, wrong, get_recipe("blockwise"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 160, 64), (96, 0, 64), (96, 160, 0), (0, 0, 0)])
def test_empty_dimensions_work_as_in_a_plain_linear(shape, dtype):
    case = make_case(*shape, dtype=dtype, bias=False)
    ours = run(get_recipe("mxfp8"), *case)
    plain = run(None, *case, linear=lambda x, weight, bias, recipe: F.linear(x, weight, bias))
    for a, b in zip(ours[:3], plain[:3], strict=True):
        assert torch.equal(a, b)  # empty or zero


@pytest.mark.parametrize("leading", [(96,), (4, 24), ()])
def test_output_may_be_modified_in_place(leading):
    x, weight, bias, _ = make_case(rows=96 if leading else 1)
    x = x.view(*leading, 160).requires_grad_()
    y = lowp_linear(x, weight, bias, get_recipe("mxfp8"))
    expected = y.detach() + 1
    y += 1
    torch.relu_(y).sum().backward()
    assert torch.equal(y, expected.relu()) and x.grad is not None


def test_a_deferred_weight_changed_before_backward_is_refused():
    x, weight, bias, grad = make_case()
    weight.requires_grad_()
    y = lowp_linear(x.requires_grad_(), weight, bias, get_recipe("mxfp8", **DEFER_WEIGHT))
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_dtypes_that_cannot_be_quantized_are_named(name):
    x, weight, bias, _ = make_case()
    tensors = {"x": x, "weight": weight, "bias": bias}
    tensors[name] = tensors[name].to(torch.int32)
    with pytest.raises(ValueError, match=f"{name} has dtype torch.int32; expected bf16, fp16 or fp32"):
        lowp_linear(**tensors, recipe=get_recipe("mxfp8"))
