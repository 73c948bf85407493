"""PyTorch's transformer encoders, kept from multiplying past their converted linears.

In evaluation without gradients an `nn.TransformerEncoderLayer` hands the weights of its linears to one fused
operator and never calls the linears. A recipe would then be without effect, and evaluation in another
precision than training. (`nn.MultiheadAttention` never calls its `out_proj`, which for that reason is no
nn.Linear, and not converted.)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from mindspeed_lowp.recipes import Recipe


def has_recipe(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "recipe", None), Recipe)


def call_linears(model: nn.Module, must_be_called: Callable[[nn.Module], bool] = has_recipe) -> None:
    """Turn off the fused path of each encoder in `model` with a layer in it that must be called."""

    def is_concerned(module: nn.Module) -> bool:
        return any(map(must_be_called, module.modules()))

    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and is_concerned(module):
            module.use_nested_tensor = False  # only the fused path multiplies nested tensors
        elif isinstance(module, nn.TransformerEncoderLayer) and is_concerned(module):
            module.activation_relu_or_gelu = 0  # tells the fused path what to apply; 0: nothing that it can
