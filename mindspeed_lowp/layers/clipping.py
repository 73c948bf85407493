"""The clipped straight-through estimator: no gradient for what saturated when it was quantized."""

from __future__ import annotations

from torch import Tensor

from mindspeed_lowp.recipes import Recipe, Role


def clipped(grad: Tensor, x: Tensor | None, recipe: Recipe, role: Role) -> Tensor:
    """The gradient of x, in place zero where x is saturated; as it is where x was not kept for that."""
    return grad if x is None else grad.masked_fill_(recipe.saturated(x, role), 0.0)
