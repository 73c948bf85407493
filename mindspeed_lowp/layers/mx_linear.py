"""A linear layer with a recipe, for models of plain PyTorch."""

from __future__ import annotations

from torch import Tensor, nn

from mindspeed_lowp.layers.linear import lowp_linear
from mindspeed_lowp.layers.weight_cache import WeightCache
from mindspeed_lowp.recipes import Recipe


class MXLinear(nn.Linear):
    """nn.Linear whose GEMMs a recipe quantizes; what `convert_model` makes of an nn.Linear.

    recipe: None multiplies in the parameters' precision.
    weight_cache: keeps the quantized weight until it changes; None quantizes it at every call.
    """

    recipe: Recipe | None = None
    weight_cache: WeightCache | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.recipe is None:
            return super().forward(input)
        return lowp_linear(input, self.weight, self.bias, self.recipe, weight_cache=self.weight_cache)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"
