"""Weight gradients that are left for after backward are those of backward, to the bit."""

import pytest
import torch

from mindspeed_lowp import get_recipe, lowp_grouped_linear, lowp_linear
from mindspeed_lowp.layers import DelayedWeightGrads, WeightGrad

from .test_linear import POLICIES

RECIPES = {
    **{f"mxfp8 {name}": get_recipe("mxfp8", **policy) for name, policy in POLICIES.items()},
    "blockwise": get_recipe("blockwise"),
    "tensorwise": get_recipe("tensorwise"),
}
COUNTS = [40, 0, 25]


def linear(x, weights, recipe, fused, delayed):
    return lowp_linear(x, weights[0], None, recipe, weight_grad=WeightGrad(fused, delayed=delayed))


def separate_experts(x, weights, recipe, fused, delayed):
    return lowp_grouped_linear(x, weights, COUNTS, recipe, into_main_grad=fused, delayed=delayed)


def stacked_experts(x, weights, recipe, fused, delayed):
    return lowp_grouped_linear(x, weights[0], COUNTS, recipe, into_main_grad=fused, delayed=delayed)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
@pytest.mark.parametrize("fused", [False, True], ids=["autograd", "main_grad"])
@pytest.mark.parametrize(
    ("layer", "shapes"),
    [(linear, [(48, 64)]), (separate_experts, [(48, 64)] * 3), (stacked_experts, [(3, 64, 48)])],
)
def test_two_micro_batches(layer, shapes, fused, recipe):
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    batches = [(new(65, 64), new(65, 48)) for _ in range(2)]
    values = [new(*shape) for shape in shapes]

    def gradients(delayed):
        weights = [torch.nn.Parameter(value.clone()) for value in values]
        for weight in weights:
            weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
        inputs = []
        for x, grad in batches:
            x, grad = x.clone().requires_grad_(), grad.clone()
            inputs.append(x)
            layer(x, weights, recipe, fused, delayed).backward(grad)
            if delayed is not None:
                assert all(weight.grad is None and (weight.main_grad == 1).all() for weight in weights)
        if delayed is not None:
            for x, grad in zip(inputs, batches, strict=True):
                x.data.zero_(), grad[1].zero_()  # all that is needed of them was quantized
            delayed.compute()
            delayed.compute()  # once is enough
        assert all(weight.grad is not None for weight in weights)  # what data parallelism's hook asks for
        if fused:
            assert all(weight.grad_added_to_main_grad for weight in weights)
        grads = [weight.main_grad if fused else weight.grad for weight in weights]
        return [x.grad for x in inputs] + grads

    for together, apart in zip(gradients(None), gradients(DelayedWeightGrads()), strict=True):
        assert torch.equal(together, apart)


def test_a_frozen_weight_leaves_nothing():
    delayed = DelayedWeightGrads()
    weight = torch.nn.Parameter(torch.ones(32, 32).bfloat16(), requires_grad=False)
    x = torch.ones(4, 32).bfloat16().requires_grad_()
    y = lowp_linear(x, weight, None, get_recipe("mxfp8"), weight_grad=WeightGrad(delayed=delayed))
    y.sum().backward()
    delayed.compute()
    assert weight.grad is None and x.grad.any()
