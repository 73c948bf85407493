import pytest
import torch

from mindspeed_lowp import get_recipe, lowp_grouped_linear, lowp_linear
from mindspeed_lowp.memory import saved_bytes

from .oracle import assert_product, dequantize, quantized
from .recording import RecordingRecipe
from .test_linear import POLICIES

COUNTS = {
    "even": [64, 64, 64],
    "first empty": [0, 33, 70],
    "last empty": [40, 1, 0],
    "middle empty": [31, 0, 64, 0, 5],
    "all empty": [0, 0, 0],
    "one expert": [77],
}
WIDTH, FEATURES = 96, 40


def make_case(counts, surplus=0, dtype=torch.bfloat16, seed=0):
    """x [T + surplus, WIDTH], E weights [FEATURES, WIDTH], output gradient."""
    gen = torch.Generator().manual_seed(seed)

    def wide(*shape):
        spread = torch.exp2(torch.randint(-4, 4, shape, generator=gen).float())
        return (torch.randn(*shape, generator=gen) * spread).to(dtype)

    rows = sum(counts) + surplus
    return wide(rows, WIDTH), [wide(FEATURES, WIDTH) for _ in counts], wide(rows, FEATURES)


def run(recipe, x, weights, grad, counts, stacked=False, **options):
    """Output, the gradient of x, and those of the weights as [E, N, K]."""
    x = x.clone().requires_grad_()
    if stacked:
        parameter = torch.stack([w.mT for w in weights]).contiguous().requires_grad_()  # [E, K, N]
        y = lowp_grouped_linear(x, parameter, counts, recipe, **options)
        y.backward(grad)
        return y.detach(), x.grad, parameter.grad.mT
    parameters = [w.clone().requires_grad_() for w in weights]
    y = lowp_grouped_linear(x, parameters, counts, recipe, **options)
    y.backward(grad)
    return y.detach(), x.grad, torch.stack([p.grad for p in parameters])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_each_expert_multiplies_its_own_rows(counts, dtype, stacked):
    x, weights, grad = make_case(counts, dtype=dtype)
    recipe = get_recipe("mxfp8", fp8_format="hybrid")
    y, dx, dw = run(recipe, x, weights, grad, counts, stacked)
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        weight = weights[expert]
        if count == 0:
            assert not dw[expert].any()
            continue
        assert_product(
            y[rows], quantized(recipe, x[rows], "input", -1), quantized(recipe, weight, "weight", -1).mT
        )
        assert_product(
            dx[rows], quantized(recipe, grad[rows], "grad", -1), quantized(recipe, weight, "weight", -2)
        )
        # Blocks along the rows start at the expert's first row.
        g = quantized(recipe, grad[rows], "grad", -2)
        assert_product(dw[expert], g.mT, quantized(recipe, x[rows], "input", -2))
        start += count


def test_grouped_rows_are_quantized_group_by_group():
    counts = [31, 0, 64, 5]
    x, _, _ = make_case(counts)
    recipe = get_recipe("mxfp8")
    ends = torch.tensor(counts).cumsum(0)
    whole = dequantize(recipe.quantize_groups(x, "input", ends, (-2,))[-2], -2, ends.tolist())
    parts = [quantized(recipe, part, "input", -2) for part in x.split(counts)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_deferring_changes_no_bit(counts, stacked):
    case = make_case(counts)
    dual, weight_only, everything = (
        run(get_recipe("mxfp8", **policy), *case, counts, stacked) for policy in POLICIES.values()
    )
    for reference, other in [(dual, weight_only), (dual, everything)]:
        for a, b in zip(reference, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_surplus_rows_are_neither_read_nor_given_values(counts, policy):
    surplus = 37
    x, weights, grad = make_case(counts, surplus)
    recipe = get_recipe("mxfp8", **POLICIES[policy])
    tokens = sum(counts)
    exact = run(recipe, x[:tokens], weights, grad[:tokens], counts)
    x[tokens:], grad[tokens:] = float("nan"), float("inf")
    y, dx, dw = run(recipe, x, weights, grad, counts)
    assert torch.equal(y[:tokens], exact[0]) and not y[tokens:].any()
    assert torch.equal(dx[:tokens], exact[1]) and not dx[tokens:].any()
    assert torch.equal(dw, exact[2])


def test_one_expert_is_a_linear():
    x, weights, grad = make_case([77])
    recipe = get_recipe("mxfp8")
    y, dx, dw = run(recipe, x, weights, grad, [77])
    xl, wl = x.clone().requires_grad_(), weights[0].clone().requires_grad_()
    yl = lowp_linear(xl, wl, None, recipe)
    yl.backward(grad)
    assert torch.equal(y, yl) and torch.equal(dx, xl.grad) and torch.equal(dw[0], wl.grad)


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_counts_may_be_a_list_or_a_tensor(kind):
    counts = [31, 0, 64]
    case = make_case(counts)
    recipe = get_recipe("mxfp8")
    for a, b in zip(run(recipe, *case, kind(counts)), run(recipe, *case, counts), strict=True):
        assert torch.equal(a, b)


def test_a_nan_token_reaches_only_its_experts_gradient():
    counts = [33, 40]
    x, weights, grad = make_case(counts)
    grad[2, 7] = float("nan")
    _, dx, dw = run(get_recipe("mxfp8"), x, weights, grad, counts)
    assert dx[2].isnan().all() and not dx[3:].isnan().any()
    assert dw[0, 7].isnan().all() and not dw[1].isnan().any()


@pytest.mark.parametrize(
    ("policy", "forward", "backward"),
    [
        (
            "dual",
            [("weight", (-1, -2)), ("input, grouped", (-1, -2))],
            [("grad, grouped", (-1, -2))],
        ),
        (
            "defer-weight",
            [("weight", (-1,)), ("input, grouped", (-1, -2))],
            [("grad, grouped", (-1, -2)), ("weight", (-2,))],
        ),
        (
            "defer-all",
            [("weight", (-1,)), ("input, grouped", (-1,))],
            [("grad, grouped", (-1, -2)), ("weight", (-2,)), ("input, grouped", (-2,))],
        ),
    ],
)
def test_each_policy_quantizes_what_it_says(policy, forward, backward):
    x, weights, grad = make_case([40])
    recipe = RecordingRecipe(**POLICIES[policy])
    parameters = [w.requires_grad_() for w in weights]
    y = lowp_grouped_linear(x.requires_grad_(), parameters, [40], recipe)
    assert recipe.log == forward
    y.backward(grad)
    assert recipe.log[len(forward) :] == backward


def test_without_grad_and_with_frozen_weights_less_is_quantized():
    x, weights, grad = make_case([40])
    recipe = RecordingRecipe()
    with torch.no_grad():
        lowp_grouped_linear(x.requires_grad_(), weights, [40], recipe)
    assert recipe.log == [("weight", (-1,)), ("input, grouped", (-1,))]
    recipe.log.clear()
    lowp_grouped_linear(x, weights, [40], recipe).backward(grad)
    assert recipe.log == [("weight", (-1, -2)), ("input, grouped", (-1,)), ("grad, grouped", (-1,))]


def test_some_weights_frozen():
    counts = [33, 20]
    x, weights, grad = make_case(counts)
    recipe = get_recipe("mxfp8")
    expected = run(recipe, x, weights, grad, counts)[2]
    trained = weights[1].clone().requires_grad_()
    lowp_grouped_linear(x, [weights[0], trained], counts, recipe).backward(grad)
    assert weights[0].grad is None and torch.equal(trained.grad, expected[1])


def test_bytes_kept_for_backward():
    counts = [64, 0, 128, 64]
    x, weights, _ = make_case(counts)
    parameters = [torch.nn.Parameter(w) for w in weights]
    kept = {}
    for name, policy in POLICIES.items():
        recipe = get_recipe("mxfp8", **policy)
        y = lowp_grouped_linear(x.clone().requires_grad_(), parameters, counts, recipe)
        kept[name] = saved_bytes(y, parameters)
    group_list = 8 * len(counts)
    scales = (sum(counts) // 64 + len(counts)) * WIDTH * 2
    assert kept["defer-weight"] == x.numel() + scales + group_list
    assert kept["dual"] - kept["defer-weight"] == len(weights) * (FEATURES * WIDTH + WIDTH * 2)
    assert kept["defer-all"] == 2 * x.numel() + group_list


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_weight_gradients_are_added_to_main_grads(counts, stacked):
    x, weights, grad = make_case(counts)
    recipe = get_recipe("mxfp8")
    parameters = [torch.stack([w.mT for w in weights]).contiguous()] if stacked else weights
    parameters = [torch.nn.Parameter(p) for p in parameters]
    starts = [torch.randn(p.shape) for p in parameters]
    for parameter, start in zip(parameters, starts, strict=True):
        parameter.main_grad, parameter.grad_added_to_main_grad = start.clone(), False
    y = lowp_grouped_linear(x, parameters[0] if stacked else parameters, counts, recipe, into_main_grad=True)
    y.backward(grad)

    fp32 = run(recipe, x.float(), [w.float() for w in weights], grad.float(), counts, stacked)[2]
    main_grads = parameters[0].main_grad.mT if stacked else torch.stack([p.main_grad for p in parameters])
    before = starts[0].mT if stacked else torch.stack(starts)
    for expert, count in enumerate(counts):
        if count == 0:
            assert torch.equal(main_grads[expert], before[expert])
        else:
            difference = (main_grads[expert] - before[expert] - fp32[expert]).abs()
            scale = fp32[expert].abs().max() + before[expert].abs().max()
            assert difference.max() <= 2.0**-22 * count * scale
    assert all(p.grad_added_to_main_grad for p in parameters)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([40], r"1 tokens_per_expert for 2 experts"),
        ([40, -1], r"tokens_per_expert \[40, -1\] must be whole and not negative"),
        ([40, 40], r"tokens_per_expert \[40, 40\] .* to more than the 60 rows of x"),
    ],
)
def test_counts_that_do_not_fit_are_named(counts, message):
    x, weights, _ = make_case([30, 30])
    with pytest.raises(ValueError, match=message):
        lowp_grouped_linear(x, weights, counts, get_recipe("mxfp8"))


def test_shapes_that_do_not_fit_are_named():
    x, weights, _ = make_case([30, 30])
    recipe = get_recipe("mxfp8")
    with pytest.raises(ValueError, match=r"x \[60, 95\]; the weights expect \[T, 96\]"):
        lowp_grouped_linear(x[:, 1:], weights, [30, 30], recipe)
    with pytest.raises(ValueError, match="of one shape and dtype"):
        lowp_grouped_linear(x, [weights[0], weights[1][1:]], [30, 30], recipe)
    with pytest.raises(ValueError, match="of one shape and dtype"):
        lowp_grouped_linear(x, [weights[0], weights[1].half()], [30, 30], recipe)
    with pytest.raises(ValueError, match="weights is empty"):
        lowp_grouped_linear(x, [], [], recipe)
