"""A linear layer of experts: each expert's tokens times that expert's weight, with quantized operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_lowp.layers.checks import check_dtypes, check_recipe
from mindspeed_lowp.layers.clipping import clipped
from mindspeed_lowp.layers.kept import pack, unpack
from mindspeed_lowp.layers.weight_cache import WeightCache, quantize_weights
from mindspeed_lowp.layers.weight_grad import (
    DelayedWeightGrads,
    WeightGrad,
    add_product_to_main_grad,
    add_to_main_grad,
    settled_grad,
)
from mindspeed_lowp.recipes import Operand, Recipe


def lowp_grouped_linear(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    tokens_per_expert: Tensor | Sequence[int],
    recipe: Recipe,
    *,
    into_main_grad: bool = False,
    delayed: DelayedWeightGrads | None = None,
    weight_cache: WeightCache | None = None,
) -> Tensor:
    """Expert e's rows of x times expert e's weight, the GEMMs quantized as `recipe` says.

    x: [T, K], the tokens sorted by expert, bf16, fp16 or fp32. T may exceed the sum of tokens_per_expert
        (token dispatchers pad): the surplus rows are not read, are zero in the result, get zero gradient.
    weights: [E, K, N]; or a sequence of E tensors [N, K] (Transformer Engine's weight0, weight1, ...), which
        are never stacked in high precision.
    tokens_per_expert: E row counts; an expert may have none (its weight's gradient is then exactly zero).
    into_main_grad: add each weight's gradient to its `main_grad` in place of returning it to autograd.
    delayed: takes the product that gives the weights their gradients, for after backward.
    weight_cache: keeps the quantized weights from call to call, until one of them changes.
    -> [T, N] of x's dtype (of the autocast dtype under autocast).

    Raises ValueError when shapes or counts do not fit and for dtypes that cannot be quantized, TypeError for
    what is no recipe.
    """
    check_recipe("lowp_grouped_linear", recipe)
    stacked = isinstance(weights, Tensor)
    parameters = (weights,) if stacked else tuple(weights)
    counts = tokens_per_expert.tolist() if isinstance(tokens_per_expert, Tensor) else list(tokens_per_expert)
    _check(x, parameters, stacked, counts)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    weights_class = _StackedWeights if stacked else _SeparateWeights
    return _LowpGroupedLinear.apply(
        x,
        counts,
        recipe,
        weights_class,
        WeightGrad(into_main_grad, delayed=delayed),
        weight_cache,
        torch.is_grad_enabled(),
        *parameters,
    )


class _LowpGroupedLinear(torch.autograd.Function):
    """fprop, dgrad and wgrad over groups of rows; T is the number of rows that belong to an expert."""

    @staticmethod
    def forward(
        ctx, x, counts, recipe, weights_class, weight_grad, weight_cache, backward_may_come, *parameters
    ):
        group_list = torch.tensor(counts, device=x.device).cumsum(0)  # [E]
        rows = x[: sum(counts)]  # [T, K]
        needs_dx = backward_may_come and ctx.needs_input_grad[0]
        needs_dw = backward_may_come and any(ctx.needs_input_grad[7:])
        keeps_x = needs_dw and not recipe.defers("input")
        # There is nothing to defer once the cache has what backward needs.
        held = weight_cache is not None and weight_cache.holds(parameters, recipe, weights_class.dgrad_axis)
        keeps_w = needs_dx and (held or not recipe.defers("weight"))

        w_fprop, w_dgrad = weights_class.quantize(parameters, recipe, weight_cache, fprop=True, dgrad=keeps_w)
        x_quantized = recipe.quantize_groups(rows, "input", group_list, (-1, -2) if keeps_x else (-1,))
        y = _with_surplus(recipe.grouped_matmul(x_quantized[-1], w_fprop, group_list, x.dtype), len(x))

        kept_x = (x_quantized[-2] if keeps_x else rows) if needs_dw else None
        clip_x = rows if needs_dx and recipe.clips("input") else None
        clips_w = needs_dw and recipe.clips("weight")
        kept_w = parameters if (needs_dx and not keeps_w) or clips_w else ()
        ctx.save_for_backward(group_list, *pack(kept_x), *pack(w_dgrad), clip_x, *kept_w)
        ctx.counts, ctx.recipe, ctx.weights_class = counts, recipe, weights_class
        ctx.clips_w = clips_w
        ctx.weight_grad, ctx.weight_cache = weight_grad, weight_cache
        # Not data of backward: the Parameters, whose main_grad is added to and whom the cache knows.
        by_itself = weight_grad.into_main_grad or weight_grad.delayed is not None or weight_cache is not None
        ctx.parameters = parameters if by_itself else ()
        ctx.x_rows, ctx.x_dtype, ctx.weight_dtype = len(x), x.dtype, parameters[0].dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        recipe, weights_class = ctx.recipe, ctx.weights_class
        needs_dx, needs_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[7:]
        group_list, *kept = ctx.saved_tensors
        kept_x, w_dgrad, clip_x, kept_w = unpack(*kept[0:2]), unpack(*kept[2:4]), kept[4], kept[5:]
        g = grad[: sum(ctx.counts)]  # [T, N]
        axes = (-1,) * needs_dx + (-2,) * any(needs_dw)
        g_quantized = recipe.quantize_groups(g, "grad", group_list, axes)

        dx = None
        if needs_dx:
            if w_dgrad is None:
                weights = kept_w if ctx.weight_cache is None else ctx.parameters
                _, w_dgrad = weights_class.quantize(
                    weights, recipe, ctx.weight_cache, fprop=False, dgrad=True
                )
            dx = recipe.grouped_matmul(g_quantized[-1], w_dgrad, group_list, ctx.x_dtype)
            dx = _with_surplus(clipped(dx, clip_x, recipe, "input"), ctx.x_rows)

        dw = (None,) * len(needs_dw)
        if any(needs_dw):
            x_wgrad = kept_x
            if not isinstance(kept_x, Operand):
                x_wgrad = recipe.quantize_groups(kept_x, "input", group_list, (-2,))[-2]
            g_wgrad = g_quantized[-2]
            clip_w = kept_w if ctx.clips_w else [None] * len(needs_dw)
            product = _weight_gradients(ctx, x_wgrad, g_wgrad, group_list, clip_w)
            if ctx.weight_grad.delayed is None:
                dw = product()
            else:
                ctx.weight_grad.delayed.add(ctx.parameters, product)
        return dx, None, None, None, None, None, None, *dw


def _weight_gradients(
    ctx: Any, x: Operand, g: Operand, group_list: Tensor, clip: Sequence[Tensor | None]
) -> Callable[[], tuple[Tensor | None, ...]]:
    """A call of it computes each expert's g [rows, N].T @ x [rows, K], and gives what autograd is to get.

    Does not hold `ctx`.
    """
    recipe, weights_class, counts, dtype = ctx.recipe, ctx.weights_class, ctx.counts, ctx.weight_dtype
    parameters, into_main_grad, needed = (
        ctx.parameters,
        ctx.weight_grad.into_main_grad,
        ctx.needs_input_grad[7:],
    )

    def product() -> tuple[Tensor | None, ...]:
        if into_main_grad:
            grads = weights_class.add_to_main_grads(parameters, recipe, x, g, group_list, counts, clip)
        else:
            grads = weights_class.gradients(recipe, x, g, group_list, dtype, clip)
        return tuple(grad if wanted else None for grad, wanted in zip(grads, needed, strict=True))

    return product


class _StackedWeights:
    """One tensor [E, K, N]: forward contracts axis -2, dgrad axis -1."""

    dgrad_axis = -1

    @staticmethod
    def quantize(
        parameters: Sequence[Tensor], recipe: Recipe, cache: WeightCache | None, fprop: bool, dgrad: bool
    ) -> tuple[Operand | None, Operand | None]:
        """The right operands [E, K, N] of fprop and [E, N, K] of dgrad, those that are asked for."""
        (weight,) = parameters
        axes = (-1,) * dgrad + (-2,) * fprop
        quantized = quantize_weights(
            cache, parameters, recipe, axes, lambda axes: recipe.quantize(weight, "weight", axes)
        )
        return quantized.get(-2), quantized[-1].mT if dgrad else None

    @staticmethod
    def gradients(
        recipe: Recipe,
        x: Operand,
        g: Operand,
        group_list: Tensor,
        dtype: torch.dtype,
        clip: Sequence[Tensor | None],
    ) -> tuple[Tensor]:
        if recipe.either_side:
            grad = recipe.grouped_wgrad(x.mT, g, group_list, dtype)
        else:
            grad = recipe.grouped_wgrad(g.mT, x, group_list, dtype).mT.contiguous()
        return (clipped(grad, clip[0], recipe, "weight"),)

    @staticmethod
    def add_to_main_grads(
        parameters: Sequence[Tensor],
        recipe: Recipe,
        x: Operand,
        g: Operand,
        group_list: Tensor,
        counts: Sequence[int],
        clip: Sequence[Tensor | None],
    ) -> tuple[Tensor | None]:
        (weight,) = parameters

        def add_(acc: Tensor) -> None:
            if recipe.either_side:
                recipe.grouped_wgrad_add_(acc, x.mT, g, group_list)
            else:
                acc += compute(acc.dtype)

        def compute(dtype: torch.dtype) -> Tensor:
            (grad,) = _StackedWeights.gradients(recipe, x, g, group_list, dtype, clip)
            return grad

        return (add_to_main_grad(weight, add_ if clip[0] is None else None, compute),)


class _SeparateWeights:
    """E tensors [N, K]: forward contracts axis -1, dgrad axis -2. Only one-byte codes are ever stacked."""

    dgrad_axis = -2

    @staticmethod
    def quantize(
        parameters: Sequence[Tensor], recipe: Recipe, cache: WeightCache | None, fprop: bool, dgrad: bool
    ) -> tuple[Operand | None, Operand | None]:
        """The right operands [E, K, N] of fprop and [E, N, K] of dgrad, those that are asked for."""
        stacks = quantize_weights(
            cache,
            parameters,
            recipe,
            (-1,) * fprop + (-2,) * dgrad,
            lambda axes: _stack([recipe.quantize(weight, "weight", axes) for weight in parameters], axes),
        )
        return stacks[-1].mT if fprop else None, stacks.get(-2)

    @staticmethod
    def gradients(
        recipe: Recipe,
        x: Operand,
        g: Operand,
        group_list: Tensor,
        dtype: torch.dtype,
        clip: Sequence[Tensor | None],
    ) -> tuple[Tensor, ...]:
        grads = recipe.grouped_wgrad(g.mT, x, group_list, dtype).unbind()
        return tuple(clipped(grad, w, recipe, "weight") for grad, w in zip(grads, clip, strict=True))

    @staticmethod
    def add_to_main_grads(
        parameters: Sequence[Tensor],
        recipe: Recipe,
        x: Operand,
        g: Operand,
        group_list: Tensor,
        counts: Sequence[int],
        clip: Sequence[Tensor | None],
    ) -> tuple[Tensor | None, ...]:
        # The main_grads lie apart, so each expert's rows are one fused matrix product.
        grads, start = [], 0
        for expert, (weight, count) in enumerate(zip(parameters, counts, strict=True)):
            if not weight.requires_grad:
                grads.append(None)
            elif count == 0:
                grads.append(settled_grad(weight))
            else:
                left = recipe.slice_group(g, expert, start, start + count).mT
                right = recipe.slice_group(x, expert, start, start + count)
                grads.append(add_product_to_main_grad(weight, recipe, left, right, clip[expert]))
            start += count
        return tuple(grads)


def _stack(experts: Sequence[dict[int, Operand]], axes: Sequence[int]) -> dict[int, Operand]:
    """The experts' operands of each axis as one; what two axes share stays shared."""
    stacked: dict[int, Tensor] = {}

    def stack(tensors: Sequence[Tensor]) -> Tensor:
        if id(tensors[0]) not in stacked:
            stacked[id(tensors[0])] = torch.stack(tensors)
        return stacked[id(tensors[0])]

    return {
        axis: Operand(
            *(stack(tensors) for tensors in zip(*(expert[axis] for expert in experts), strict=True))
        )
        for axis in axes
    }


def _with_surplus(rows: Tensor, total: int) -> Tensor:
    """The rows [T, N], followed by zeros up to `total` rows."""
    surplus = total - len(rows)
    if surplus == 0:
        return rows
    return torch.cat((rows, rows.new_zeros((surplus, rows.shape[1]))))


def _check(x: Tensor, weights: Sequence[Tensor], stacked: bool, counts: Sequence[int]) -> None:
    if not weights:
        raise ValueError("lowp_grouped_linear: weights is empty; expected at least one expert")
    if stacked and weights[0].dim() != 3:
        raise ValueError(f"lowp_grouped_linear: weights {list(weights[0].shape)}; expected [E, K, N]")
    if any(w.shape != weights[0].shape or w.dtype != weights[0].dtype for w in weights):
        raise ValueError("lowp_grouped_linear: weights must be of one shape and dtype")
    if not stacked and weights[0].dim() != 2:
        raise ValueError(f"lowp_grouped_linear: weights of {list(weights[0].shape)}; expected [N, K] each")
    check_dtypes("lowp_grouped_linear", x=x, weights=weights[0])
    experts = weights[0].shape[0] if stacked else len(weights)
    width = weights[0].shape[1]
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"lowp_grouped_linear: x {list(x.shape)}; the weights expect [T, {width}]")
    if len(counts) != experts:
        raise ValueError(f"lowp_grouped_linear: {len(counts)} tokens_per_expert for {experts} experts")
    if any(count != int(count) or count < 0 for count in counts) or sum(counts) > len(x):
        raise ValueError(
            f"lowp_grouped_linear: tokens_per_expert {list(counts)} must be whole and not negative, nor sum "
            f"to more than the {len(x)} rows of x"
        )
