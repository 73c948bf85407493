"""The model that Megatron builds, converted as the arguments say, and what the log says of it."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mindspeed_lowp.features.base import MINDSPEED_IS_HOST
from mindspeed_lowp.features.command_line import stop, typed
from mindspeed_lowp.features.layer_selection import Names, Selections, asked_by, select
from mindspeed_lowp.features.mindspeed_layers import obstacle
from mindspeed_lowp.features.recipe_options import recipe_from_args
from mindspeed_lowp.features.reuse_quantized_weight import reuse_policy
from mindspeed_lowp.layers import (
    Choice,
    Conversion,
    by_name,
    nothing_converted,
    reuse_quantized_weights,
    unmatched,
)
from mindspeed_lowp.recipes import Recipe

# Flags that may leave no layer to convert.
_CHOOSING = (
    "--lowp-filter-fqns",
    "--lowp-moe-fqns",
    "--lowp-config",
    "--no-use-gmm-fp8",
    "--first-last-layers-bf16",
)

_KEPT_SHOWN = 8  # layers named at start-up


def blocks_in_high_precision(args: Namespace) -> Sequence[int]:
    """The transformer blocks that --first-last-layers-bf16 keeps, counted from 0 over all pipeline stages."""
    if not getattr(args, "first_last_layers_bf16", False):
        return ()
    every = range(args.num_layers)
    start, end = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
    return [*every[:start], *every[args.num_layers - end :]]


def convert_model_wrapper(get_model: Callable[..., list]) -> Callable[..., list]:
    """Quantize the linears of what Megatron's `get_model` builds.

    Layers change their class in place and keep their Parameters: the wrappers around the model (DDP,
    Float16Module), the optimizer and checkpoints, whether made before or after, see no difference.
    """

    @functools.wraps(get_model)
    def wrapper(*args: Any, **kwargs: Any) -> list:
        model = get_model(*args, **kwargs)
        _convert(model)
        return model

    return wrapper


def _convert(model: list) -> None:
    # Imported when Megatron is: under MindSpeed, patches come before the first import of Megatron.
    from megatron.training import get_args, print_rank_0

    from mindspeed_lowp.megatron.convert import convert_chunks

    args = get_args()
    if not args.fp8:
        return  # a patch outlives the run that asked for it
    if MINDSPEED_IS_HOST:
        why = obstacle(args)
        if why:
            print_rank_0(f"MindSpeed's own FP8 recipes stay, because of {why}")
            return
        _claim(model, args)
    else:
        from mindspeed_lowp.megatron import own_layers  # noqa: F401
    selections = select(args)
    linears, experts = selections.linears, selections.experts
    recipes = {name: recipe_from_args(name, args) for name in selections.recipes}

    def check(conversion: Conversion) -> None:
        _check_names(linears.filter_fqns, conversion.names, "layer", print_rank_0)
        _check_names(experts.fqns, conversion.experts, "expert", print_rank_0)
        if not conversion.converted:
            flag = typed(*_CHOOSING) or asked_by(args)
            stop(f"{flag}: {nothing_converted(conversion)}")

    gathers = getattr(args, "lowp_quantized_all_gather", False)
    if gathers:
        if linears.recipe is None:
            stop("--lowp-quantized-all-gather: no linear but those of experts has a recipe; leave it out")
        from mindspeed_lowp.megatron.linear import gather_quantized

        gather_quantized(model)
    report = convert_chunks(
        model,
        by_name(
            Choice(recipes.get(linears.recipe), filter_fqns=linears.filter_fqns.values),
            Choice(recipes.get(experts.recipe), experts.fqns.values, experts.filter_fqns.values),
        ),
        check,
        blocks_in_high_precision(args),
    )
    reuse, checked = reuse_policy(args)
    if reuse:
        for chunk in model:
            reuse_quantized_weights(chunk, check=checked)

    device = next(parameter.device.type for chunk in model for parameter in chunk.parameters())
    emulated = device if device != "npu" or args.lowp_emulate else None
    for line in _start_up_lines(selections, report, bool(args.num_experts), emulated):
        print_rank_0(line)
    if gathers:
        nbytes = _gathered_bytes(recipes[linears.recipe])
        print_rank_0(f"Sequence-parallel inputs are gathered quantized: {nbytes:.3f} bytes an element, not 2")
    if reuse:
        print_rank_0(f"Quantized weights are reused within each step{', and checked' if checked else ''}")


def _gathered_bytes(recipe: Recipe) -> float:
    """Bytes an element that is quantized along its rows: code, and share of a scale."""
    rows = torch.zeros(128, 4096, dtype=torch.bfloat16)
    data, scale = recipe.for_layer().quantize(rows, "input", (-1,))[-1]
    return (data.nbytes + scale.nbytes) / rows.numel()


def _claim(model: list, args: Namespace) -> None:
    """Take over MindSpeed's layers; stop at any that it would go on computing in FP8 unseen by a recipe."""
    from mindspeed_lowp.mindspeed.claim import claim

    left = claim(model, bool(args.num_experts))
    if left:
        stop(
            f"{asked_by(args)}: these layers are of classes that mindspeed_lowp does not know: "
            f"{', '.join(left[:_KEPT_SHOWN])}; leave out the flag of MindSpeed that brings them, or "
            "`import mindspeed_lowp.adaptor`"
        )


def _check_names(names: Names, known: Sequence[str], kind: str, log: Callable[[str], None]) -> None:
    message = unmatched(names.values, known, kind)
    if message and names.may_miss:
        log(f"warning: {names.origin}: {message}")
    elif message:
        stop(f"{names.origin}: {message}")


def _start_up_lines(
    selections: Selections, report: Conversion, has_experts: bool, emulated: str | None
) -> Iterator[str]:
    """What the first rank did with its layers; tensor-parallel ranks do the same with their shards."""
    yield from selections.notes
    if emulated:
        names = " and ".join(selections.recipes)
        yield (
            f"{names} {'are' if len(selections.recipes) > 1 else 'is'} emulated on this device ({emulated}): "
            "quantized operands equal those of an Ascend 950 to the last bit; the speed does not"
        )
    if selections.linears.recipe:
        yield f"MX training active with recipe {selections.linears.recipe}"
        yield f"Swapped to MXLinear_NPU layers: {len(report.linears)}"
    if has_experts and selections.experts.recipe:
        yield f"{selections.experts.recipe} MoE training enabled"
    if report.grouped:
        yield f"[MXFP8/HiF8 GMM] Replaced {len(report.grouped)} NPU GMM methods/functions"
    shown = report.kept[:_KEPT_SHOWN] + ["..."] * (len(report.kept) > _KEPT_SHOWN)
    routers = ["every MoE router"] if has_experts else []
    yield f"Kept in high precision: {', '.join(routers + shown) or 'none'}"
