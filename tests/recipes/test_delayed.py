"""Delayed scaling: which scale follows from which past."""

import pytest
import torch

from mindspeed_lowp import get_recipe, lowp_linear
from mindspeed_lowp.recipes.delayed import advance


def scale(recipe, largest: float, role: str = "input") -> float:
    """The scale of a tensor whose largest magnitude is `largest`."""
    x = torch.tensor([[largest, -largest / 2]]).bfloat16()
    return recipe.quantize(x, role, (-1,))[-1].scale.item()


def of(amax: float, largest_code: float = 448.0) -> float:
    return (torch.tensor(amax) * torch.tensor(1 / largest_code)).item()


def test_the_first_step_takes_what_it_sees_and_later_ones_the_step_before():
    recipe = get_recipe("delayed")
    assert scale(recipe, 2.0) == of(2.0)
    assert scale(recipe, 8.0) == of(8.0)
    advance([recipe])
    assert scale(recipe, 1.0) == of(8.0)  # the largest of the step
    advance([recipe])
    assert scale(recipe, 100.0) == of(1.0)


def test_a_tensor_that_outgrows_its_past_saturates():
    recipe = get_recipe("delayed")
    scale(recipe, 1.0)
    advance([recipe])
    operand = recipe.quantize(torch.tensor([[4.0, -0.5]]), "input", (-1,))[-1]
    assert operand.data.float().tolist() == [[448.0, -224.0]]


def test_max_looks_back_as_far_as_the_history_goes():
    recipe = get_recipe("delayed", amax_history_len=3, amax_compute_algo="max")
    for largest in (8.0, 2.0, 1.0):
        scale(recipe, largest)
        advance([recipe])
    assert scale(recipe, 0.5) == of(8.0)
    advance([recipe])
    assert scale(recipe, 0.5) == of(2.0)


def test_margin_leaves_room():
    assert scale(get_recipe("delayed", margin=3), 2.0) == of(16.0)


def test_roles_have_a_history_each_and_hybrid_gradients_the_range_of_e5m2():
    recipe = get_recipe("delayed", fp8_format="hybrid")
    scale(recipe, 2.0, "input"), scale(recipe, 4.0, "weight"), scale(recipe, 8.0, "grad")
    advance([recipe])
    assert scale(recipe, 1.0, "input") == of(2.0)
    assert scale(recipe, 1.0, "weight") == of(4.0)
    assert scale(recipe, 1.0, "grad") == of(8.0, 57344.0)


@pytest.mark.parametrize("unusable", [0.0, float("nan"), float("inf")])
def test_a_step_without_a_usable_magnitude_leaves_the_history_as_it_was(unusable):
    recipe = get_recipe("delayed")
    scale(recipe, 2.0)
    advance([recipe])
    seen = scale(recipe, unusable)
    assert seen == of(2.0) if unusable == 0 else seen != seen  # NaN: what is broken is seen
    advance([recipe])
    assert scale(recipe, 1.0) == of(2.0)


def test_each_layer_has_a_history_of_its_own():
    recipe = get_recipe("delayed", amax_history_len=4)
    first, second = recipe.for_layer(), recipe.for_layer()
    assert first == second == recipe
    scale(first, 2.0)
    advance([first, second])
    assert scale(first, 1.0) == of(2.0) and scale(second, 1.0) == of(1.0)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_saved_history_of_any_length_is_taken_over(length):
    saved = get_recipe("delayed", amax_history_len=3)
    for largest in (8.0, 2.0):
        scale(saved, largest)
        advance([saved])
    recipe = get_recipe("delayed", amax_history_len=length, amax_compute_algo="max")
    recipe.history.restore(saved.history.past)
    assert recipe.history.past.shape == (length, 3)
    assert scale(recipe, 1.0) == of(2.0 if length == 1 else 8.0)


def test_recomputation_changes_no_scale():
    recipe = get_recipe("delayed")
    x, weight = torch.randn(8, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    once = lowp_linear(x, weight, None, recipe)
    assert torch.equal(lowp_linear(x, weight, None, recipe), once)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amax_history_len": 0}, "amax_history_len=0: expected a whole number from 1"),
        ({"amax_history_len": "4"}, "amax_history_len='4': expected a whole number from 1"),
        ({"margin": 1.5}, "margin=1.5: expected a whole number from -126 to 127"),
        ({"margin": 200}, "margin=200: expected a whole number from -126 to 127"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo='mean': expected one of most_recent, max"),
        ({"fp8_format": "hif8"}, "fp8_format='hif8': delayed takes one of e4m3, hybrid"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        get_recipe("delayed", **options)
