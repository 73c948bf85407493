"""Where a weight's gradient goes, to autograd or into Megatron's `main_grad`, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lowp.layers.clipping import clipped
from mindspeed_lowp.recipes import Operand, Recipe


class DelayedWeightGrads:
    """Products that backward left for later: called in its order, each gives its weights their gradients."""

    def __init__(self) -> None:
        self._products: list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor | None]]]] = []

    def add(self, weights: Sequence[Tensor], product: Callable[[], Sequence[Tensor | None]]) -> None:
        """product: gives what autograd would get for each of the weights."""
        self._products.append((weights, product))

    def compute(self) -> None:
        """Compute what is left, and add it to the weights' `grad`, as autograd would have.

        That is the gradient, or, once it is in `main_grad`, what `settled_grad` puts in its place.
        """
        while self._products:
            weights, product = self._products.pop(0)
            for weight, grad in zip(weights, product(), strict=True):
                if grad is not None:
                    weight.grad = grad if weight.grad is None else weight.grad + grad


@dataclass(frozen=True)
class WeightGrad:
    """The destination of a weight gradient; the default returns it to autograd.

    into_main_grad: add it to `weight.main_grad` (Megatron's gradient_accumulation_fusion).
    later: a list that takes the output gradient [T, N] instead, while it holds fewer than `limit` of them
        (0: always); the caller computes the weight gradient from it afterwards
        (Megatron's defer_embedding_wgrad_compute).
    delayed: takes the product, its operands quantized, which its owner computes after backward
        (Megatron's delay_wgrad_compute).
    """

    into_main_grad: bool = False
    later: list[Tensor] | None = None
    limit: int = 0
    delayed: DelayedWeightGrads | None = None

    def postpone(self, grad: Tensor) -> bool:
        """Put the output gradient away for later, if that is wanted; says whether it was."""
        if self.later is None or (self.limit != 0 and len(self.later) >= self.limit):
            return False
        self.later.append(grad)
        return True


def parameter_of(weight: Tensor) -> Tensor:
    """The Parameter that a weight is, or is a view of in another shape."""
    base = weight._base
    return weight if base is None or base.numel() != weight.numel() else base


def add_to_main_grad(
    weight: Tensor, add_fp32_: Callable[[Tensor], None] | None, compute: Callable[[torch.dtype], Tensor]
) -> Tensor | None:
    """Add the gradient of `weight` to its `main_grad`; returns what autograd gets instead.

    add_fp32_(acc): adds the gradient to an fp32 tensor in one operator; None where no operator does.
    compute(dtype): gives the gradient as a new tensor, for all other cases.
    """
    main_grad = parameter_of(weight).main_grad.view(weight.shape)
    if main_grad.dtype == torch.float32 and add_fp32_ is not None:
        add_fp32_(main_grad)
    else:
        main_grad.add_(compute(main_grad.dtype))
    return settled_grad(weight)


def add_product_to_main_grad(
    weight: Tensor, recipe: Recipe, left: Operand, right: Operand, clip: Tensor | None
) -> Tensor | None:
    """The same for the gradient left [N, T] @ right [T, K], clipped where `clip`, the weight, was kept."""

    def add_(acc: Tensor) -> None:
        recipe.matmul_add_(acc, left, right)

    def compute(dtype: torch.dtype) -> Tensor:
        return clipped(recipe.matmul(left, right, dtype), clip, recipe, "weight")

    return add_to_main_grad(weight, add_ if clip is None else None, compute)


def settled_grad(weight: Tensor) -> Tensor | None:
    """What autograd gets once the gradient is in `main_grad`, by Megatron's protocol.

    Its data-parallel hooks must run, so a gradient of the right shape is returned whose values nobody reads,
    unless `zero_out_wgrad` says that somebody adds them.
    """
    parameter = parameter_of(weight)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    if getattr(parameter, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)
