"""A NaN in a weight or in a gradient stops the trainer by Megatron's own check, whatever the recipe."""

from functools import partial

import pytest
import torch

from mindspeed_lowp.recipes import recipe_class, recipe_names

from ..trainer import MOE, train

DENSE = "self_attention.linear_proj"
EXPERTS = "mlp.experts.linear_fc1"


def layer_of(model: torch.nn.Module, name: str) -> torch.nn.Module:
    [layer] = [module for key, module in model.named_modules() if key.endswith(f"layers.1.{name}")]
    return layer


def break_weight(model: torch.nn.Module, layer: str) -> None:
    next(layer_of(model, layer).parameters()).data[3, 5] = float("nan")


def break_gradient(model: torch.nn.Module, layer: str) -> None:
    """One element of the output's gradient: without a bias, only quantized products see it."""

    def broken(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[7] = float("nan")
        return grad

    layer_of(model, layer).register_forward_hook(
        lambda module, inputs, output: output[0].register_hook(broken) and None
    )


@pytest.mark.parametrize(
    ("breaks", "layer", "message"),
    [
        pytest.param(break_weight, DENSE, "found NaN in local forward loss calculation", id="weight"),
        pytest.param(break_gradient, EXPERTS, "found NaN in local grad norm for bucket", id="gradient"),
    ],
)
@pytest.mark.parametrize("recipe", recipe_names())
def test_megatron_stops(tmp_path, recipe, breaks, layer, message):
    fp8_format = recipe_class(recipe).formats[-1]
    flags = [
        "--fp8-format",
        fp8_format,
        "--fp8-recipe",
        recipe,
        *MOE,
        "--train-iters",
        "1",
        "--rerun-mode",
        "disabled",
    ]
    [run] = train(tmp_path, flags, prepare=partial(breaks, layer=layer))
    assert run.exit_code == 1 and message in run.output and not run.losses
