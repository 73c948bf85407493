"""`y = x wᵀ + b` with quantized operands in all three GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_lowp.layers.checks import check_dtypes, check_recipe
from mindspeed_lowp.layers.clipping import clipped
from mindspeed_lowp.layers.kept import pack, unpack
from mindspeed_lowp.layers.parallel import (
    TensorParallel,
    align_rows,
    gather_operand,
    gather_rows,
    start_dgrad_reduction,
)
from mindspeed_lowp.layers.weight_cache import WeightCache, quantize_weights
from mindspeed_lowp.layers.weight_grad import WeightGrad, add_product_to_main_grad
from mindspeed_lowp.recipes import Operand, Recipe


def lowp_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    parallel: TensorParallel | None = None,
    weight_grad: WeightGrad = WeightGrad(),  # noqa: B008 (immutable unless it names a list)
    weight_cache: WeightCache | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, the three GEMMs of forward and backward quantized as `recipe` says.

    x: [..., K], bf16, fp16 or fp32; weight: [N, K]; bias: [N] or None -> [..., N] of x's dtype (of the
    autocast dtype under autocast). The weight's gradient has the weight's dtype. Products accumulate in fp32.

    parallel: the tensor-parallel communication of a column-parallel layer. With sequence parallelism x is
        [s, ..., K], this rank's part of the first dimension, and the result [ranks * s, ..., N].
    weight_grad: where the gradient of the weight goes.
    weight_cache: keeps the quantized weight from call to call, until the weight changes.

    Raises ValueError when shapes do not fit and for dtypes that cannot be quantized, TypeError for what is no
    recipe.
    """
    check_recipe("lowp_linear", recipe)
    check_dtypes("lowp_linear", x=x, weight=weight, bias=bias)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"lowp_linear: x {list(x.shape)} and weight {list(weight.shape)} do not fit: "
            "expected x [..., K] and weight [N, K]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"lowp_linear: bias {list(bias.shape)}; expected [N], here [{weight.shape[0]}]")
    if torch.is_autocast_enabled(x.device.type):
        # The weight stays as it is: it is quantized from its own precision, not rounded twice.
        x = x.to(torch.get_autocast_dtype(x.device.type))
    # Inside a Function grad mode is always off: whether backward can come is known only here.
    backward_may_come = torch.is_grad_enabled()
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = _LowpLinear.apply(rows, weight, bias, recipe, parallel, weight_grad, weight_cache, backward_may_come)
    if x.dim() == 2:
        return y  # no view: it may be modified in place
    ranks = parallel.group.size() if parallel is not None and parallel.sequence_parallel else 1
    leading = (x.shape[0] * ranks, *x.shape[1:-1]) if x.dim() > 1 else ()
    return y.reshape(*leading, weight.shape[0])


class _LowpLinear(torch.autograd.Function):
    """fprop, dgrad and wgrad. T: the rows of all ranks, R: of this one (the same without gathering)."""

    @staticmethod
    def forward(ctx, x, weight, bias, recipe, parallel, weight_grad, weight_cache, backward_may_come):
        # x: [R, K], weight: [N, K] -> [T, N]
        needs_dx = backward_may_come and ctx.needs_input_grad[0]
        needs_dw = backward_may_come and ctx.needs_input_grad[1]
        keeps_x = needs_dw and not recipe.defers("input")
        # There is nothing to defer once the cache has what backward needs.
        held = weight_cache is not None and weight_cache.holds((weight,), recipe, -2)
        keeps_w = needs_dx and (held or not recipe.defers("weight"))

        if parallel is not None and parallel.sequence_parallel:
            gather = _gather_quantized if parallel.quantized_gather else _gather_and_quantize
            x_fprop, x_wgrad = gather(x, recipe, parallel, keeps_x)
        else:
            quantized = recipe.quantize(x, "input", (-1, -2) if keeps_x else (-1,))
            x_fprop, x_wgrad = quantized[-1], quantized.get(-2)
        w = _quantize_weight(weight, recipe, (-1, -2) if keeps_w else (-1,), weight_cache)

        y = recipe.matmul(x_fprop, w[-1].mT, x.dtype, bias)

        kept_x = (x_wgrad if keeps_x else x) if needs_dw else None
        kept_w = (w[-2] if keeps_w else weight) if needs_dx else None
        clip_x = x if needs_dx and recipe.clips("input") else None
        clip_w = weight if needs_dw and recipe.clips("weight") else None
        ctx.save_for_backward(*pack(kept_x), *pack(kept_w), clip_x, clip_w)
        ctx.recipe, ctx.parallel = recipe, parallel
        ctx.weight_grad, ctx.weight_cache = weight_grad, weight_cache
        # Not data of backward: the Parameter itself, with its main_grad, as the cache knows it.
        by_itself = weight_grad.into_main_grad or weight_grad.delayed is not None or weight_cache is not None
        ctx.weight = weight if by_itself else None
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        # g: [T, N]
        recipe, parallel = ctx.recipe, ctx.parallel
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        saved = ctx.saved_tensors  # asked for once: recomputation allows no more
        kept_x, kept_w, (clip_x, clip_w) = unpack(*saved[:2]), unpack(*saved[2:4]), saved[4:]
        needs_dw = needs_dw and not ctx.weight_grad.postpone(g)

        gathers = parallel is not None and parallel.sequence_parallel
        x_wgrad = None
        if needs_dw:
            if isinstance(kept_x, Operand):
                x_wgrad = kept_x
            else:
                rows = align_rows(kept_x, recipe.row_alignment) if gathers else kept_x
                x_wgrad = recipe.quantize(rows, "input", (-2,))[-2]
            if gathers:
                gathering = gather_operand(x_wgrad, parallel.group)  # under way during dgrad

        g_dgrad, g_wgrad = _quantize_grad(
            g, recipe, needs_dx, needs_dw, parallel.group.size() if gathers else 1
        )

        dx, reducing = None, None
        if needs_dx:
            if not isinstance(kept_w, Operand):
                weight = kept_w if ctx.weight_cache is None else ctx.weight
                kept_w = _quantize_weight(weight, recipe, (-2,), ctx.weight_cache)[-2]
            dx = recipe.matmul(g_dgrad, kept_w, ctx.x_dtype)
            if parallel is not None and (parallel.sequence_parallel or parallel.allreduce_dgrad):
                reducing = start_dgrad_reduction(dx, parallel)  # under way during wgrad

        dw = None
        if needs_dw:
            if gathers:
                x_wgrad = Operand(*gathering.wait())
            product = _weight_gradient(ctx, g_wgrad.mT, x_wgrad, clip_w)
            if ctx.weight_grad.delayed is None:
                (dw,) = product()
            else:
                ctx.weight_grad.delayed.add((ctx.weight,), product)
        db = g.sum(0, dtype=ctx.bias_dtype) if needs_db else None

        if reducing is not None:
            (dx,) = reducing.wait()
        if needs_dx:
            dx = clipped(dx, clip_x, recipe, "input")
        return dx, dw, db, None, None, None, None, None


def _weight_gradient(
    ctx: Any, g: Operand, x: Operand, clip_w: Tensor | None
) -> Callable[[], tuple[Tensor | None]]:
    """A call of it computes g [N, T] @ x [T, K], and gives what autograd is to get. Does not hold `ctx`."""
    recipe, weight, dtype = ctx.recipe, ctx.weight, ctx.weight_dtype
    into_main_grad = ctx.weight_grad.into_main_grad

    def product() -> tuple[Tensor | None]:
        if into_main_grad:
            return (add_product_to_main_grad(weight, recipe, g, x, clip_w),)
        return (clipped(recipe.matmul(g, x, dtype), clip_w, recipe, "weight"),)

    return product


def _quantize_weight(
    weight: Tensor, recipe: Recipe, axes: Sequence[int], cache: WeightCache | None
) -> dict[int, Operand]:
    return quantize_weights(
        cache, (weight,), recipe, axes, lambda axes: recipe.quantize(weight, "weight", axes)
    )


def _gather_and_quantize(
    x: Tensor, recipe: Recipe, parallel: TensorParallel, keeps_x: bool
) -> tuple[Operand, Operand | None]:
    """All ranks' rows for fprop, and if they are kept this rank's rows x [R, K] for wgrad."""
    (all_rows,) = gather_rows((x,), parallel.group).wait()
    x_fprop = recipe.quantize(all_rows, "input", (-1,))[-1]
    if not keeps_x:
        return x_fprop, None
    if recipe.one_copy_serves_both_axes("input"):
        first = parallel.group.rank() * len(x)
        return x_fprop, Operand(x_fprop.data[first : first + len(x)].clone(), x_fprop.scale)
    return x_fprop, recipe.quantize(align_rows(x, recipe.row_alignment), "input", (-2,))[-2]


def _gather_quantized(
    x: Tensor, recipe: Recipe, parallel: TensorParallel, keeps_x: bool
) -> tuple[Operand, Operand | None]:
    """The same with one byte an element, and the scales, on the way in place of x's two."""
    aligned = len(x) % recipe.row_alignment == 0
    quantized = recipe.quantize(x, "input", (-1, -2) if keeps_x and aligned else (-1,))
    if quantized[-1].scale.dim() < 2 and "input" not in recipe.divided:
        raise ValueError(
            f"quantized_gather: {recipe.name} has one scale for all ranks' rows: give the layer "
            'recipe.for_layer({"input": group})'
        )
    gathering = gather_operand(quantized[-1], parallel.group)  # under way during what follows
    if keeps_x and not aligned:
        quantized[-2] = recipe.quantize(align_rows(x, recipe.row_alignment), "input", (-2,))[-2]
    return Operand(*gathering.wait()), quantized.get(-2)


def _quantize_grad(
    g: Tensor, recipe: Recipe, needs_dx: bool, needs_dw: bool, ranks: int
) -> tuple[Operand | None, Operand | None]:
    """g [T, N] for dgrad (axis -1) and for wgrad (axis -2, its rows laid out as the gathered input's are)."""
    axes = (-1,) * needs_dx + (-2,) * needs_dw
    if ranks == 1 or (len(g) // ranks) % recipe.row_alignment == 0:
        quantized = recipe.quantize(g, "grad", axes)
        return quantized.get(-1), quantized.get(-2)
    g_dgrad = recipe.quantize(g, "grad", (-1,))[-1] if needs_dx else None
    g_wgrad = (
        recipe.quantize(align_rows(g, recipe.row_alignment, ranks), "grad", (-2,))[-2] if needs_dw else None
    )
    return g_dgrad, g_wgrad
