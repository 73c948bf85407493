"""FP8 training: `--fp8-format` and `--fp8-recipe` as Megatron has them, on layers of ours.

Without Transformer Engine, Megatron accepts these flags and trains in bf16 without a word. Here a flag either
takes effect or stops the run.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_lowp.features.base import MINDSPEED_IS_HOST, Feature
from mindspeed_lowp.features.command_line import add_option, find_option, nearest, stop, typed
from mindspeed_lowp.features.mxfp8_defer_backward_quant import defer_policy
from mindspeed_lowp.layers import Choice, Conversion, nothing_converted, unmatched
from mindspeed_lowp.ops.hardware import is_ascend950_or_newer, npu_name
from mindspeed_lowp.recipes import get_recipe, recipe_names

_TITLE = "low-precision training"

_BLOCK_SCALES = "MXFP8 takes each scale from its own block of 32 elements; leave it out"
_HIGH_PRECISION_WEIGHTS = "the weights themselves stay in high precision; leave it out"
_USE_FILTER = "name the layers to keep in high precision with --lowp-filter-fqns, e.g. decoder.layers.0."
_ANY_GROUP_SIZE = "experts take any number of tokens; leave it out"
_USE_DDP = "sharded parameters are not supported; use --use-distributed-optimizer"

# Flags of Megatron that only Transformer Engine would act upon, and wrappers that do not know these layers.
_REFUSED = {
    "--fp8-margin": _BLOCK_SCALES,
    "--fp8-interval": _BLOCK_SCALES,
    "--fp8-amax-history-len": _BLOCK_SCALES,
    "--fp8-amax-compute-algo": _BLOCK_SCALES,
    "--tp-only-amax-red": _BLOCK_SCALES,
    "--fp8-quantizer-factory": "it belongs to the recipe `custom`; leave it out",
    "--no-fp8-wgrad": "weight gradients are computed in MXFP8; leave it out",
    "--disable-fp8-wgrad": "weight gradients are computed in MXFP8; leave it out",
    "--fp8-param-gather": _HIGH_PRECISION_WEIGHTS,
    "--reuse-grad-buf-for-mxfp8-param-ag": _HIGH_PRECISION_WEIGHTS,
    "--keep-fp8-transpose-cache": _HIGH_PRECISION_WEIGHTS,
    "--moe-router-padding-for-fp8": _ANY_GROUP_SIZE,
    "--moe-router-padding-for-quantization": _ANY_GROUP_SIZE,
    "--fp4-format": "it is another low-precision format; choose one of the two",
    "--first-last-layers-bf16": _USE_FILTER,
    "--num-layers-at-start-in-bf16": _USE_FILTER,
    "--num-layers-at-end-in-bf16": _USE_FILTER,
    "--te-precision-config-file": _USE_FILTER,
    "--use-torch-fsdp2": _USE_DDP,
    "--use-megatron-fsdp": _USE_DDP,
    "--use-custom-fsdp": _USE_DDP,
}

_KEPT_SHOWN = 8  # layers named at start-up


class FP8TrainingFeature(Feature):
    """Turns the parallel linears of Megatron's model into quantized ones, once the model is built."""

    def __init__(self) -> None:
        super().__init__("fp8")

    def is_need_apply(self, args: Namespace) -> bool:
        # Before Megatron's own parser runs, MindSpeed knows the option by its flag.
        return bool(getattr(args, "fp8", None) or getattr(args, "fp8_format", None))

    def register_args(self, parser: ArgumentParser) -> None:
        recipe = find_option(parser, "--fp8-recipe")
        if recipe is not None and not MINDSPEED_IS_HOST:
            # Checked in pre_validate_args: argparse would offer the recipes of Transformer Engine, which are
            # not to be had, under all of Megatron's usage text.
            recipe.choices = None
            recipe.help = f"The recipe of FP8 training, with --fp8-format: {', '.join(recipe_names())}."
        add_option(
            parser,
            _TITLE,
            "--lowp-filter-fqns",
            nargs="+",
            action="extend",
            metavar="NAME",
            help="Keep in high precision each layer whose fully qualified name contains one of these names "
            "(case matters). The output layer and the router are kept so in any case.",
        )
        add_option(
            parser,
            _TITLE,
            "--lowp-emulate",
            action="store_true",
            help="On an NPU older than Ascend 950, emulate the formats it lacks: the same numbers, slowly.",
        )

    def pre_validate_args(self, args: Namespace) -> None:
        if MINDSPEED_IS_HOST:
            return  # it has FP8 training of its own, with more recipes, and checks that itself
        if getattr(args, "fp8", None):
            _check_recipe(args)
            _check_refused_flags(args)
            _check_hardware(args)
        else:
            _check_nothing_needs_fp8(args)

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        patch_manager.register_patch("megatron.training.training.get_model", convert_model_wrapper)
        if not MINDSPEED_IS_HOST:
            config_from_args = "megatron.training.arguments.core_transformer_config_from_args"
            patch_manager.register_patch(config_from_args, config_without_fp8_wrapper)


def _check_nothing_needs_fp8(args: Namespace) -> None:
    if typed("--fp8-recipe"):
        stop(
            f"--fp8-recipe {args.fp8_recipe} has no effect without --fp8-format (the run would train in high "
            "precision): add --fp8-format e4m3, or hybrid for E5M2 gradients"
        )
    for flag, value in (
        ("--lowp-filter-fqns", getattr(args, "lowp_filter_fqns", None)),
        ("--lowp-emulate", getattr(args, "lowp_emulate", False)),
    ):
        if value:
            stop(f"{flag} has no effect without FP8 training: add --fp8-format e4m3 --fp8-recipe mxfp8")


def _check_recipe(args: Namespace) -> None:
    recipe = getattr(args, "fp8_recipe", None)
    names = recipe_names()
    if recipe in names:
        return
    accepted = ", ".join(names)
    if not typed("--fp8-recipe"):
        stop(
            f"--fp8-format {args.fp8} needs --fp8-recipe as well (the default, {recipe}, is not available "
            f"here): add --fp8-recipe mxfp8; accepted: {accepted}"
        )
    close = nearest(recipe, names, count=1)
    hint = f"did you mean --fp8-recipe {close[0]}? " if close else ""
    stop(f"--fp8-recipe {recipe}: no such recipe here; {hint}accepted: {accepted}")


def _check_refused_flags(args: Namespace) -> None:
    flag = typed(*_REFUSED)
    if flag:
        stop(f"{flag} cannot be used with --fp8-recipe {args.fp8_recipe}: {_REFUSED[flag]}")


def _check_hardware(args: Namespace) -> None:
    name = npu_name()
    emulate = getattr(args, "lowp_emulate", False)
    if name is None:
        if emulate:
            stop("--lowp-emulate is for an NPU, and there is none: formats are emulated here in any case")
        return
    if is_ascend950_or_newer(name):
        if emulate:
            stop(f"--lowp-emulate: {name} computes --fp8-recipe {args.fp8_recipe} itself; leave the flag out")
    elif not emulate:
        stop(
            f"--fp8-recipe {args.fp8_recipe}: [MXFP8/HiF8] is only supported on Ascend950 or higher "
            f"architecture (this is {name}); add --lowp-emulate to emulate it: the same numbers, slowly"
        )


def config_without_fp8_wrapper(config_from_args: Callable[..., Any]) -> Callable[..., Any]:
    """Build Megatron's model from a TransformerConfig that says nothing of FP8.

    To Megatron, `config.fp8` means that Transformer Engine's layers compute under its autocast: without it,
    Megatron refuses experts, pads their tokens, and recomputes activations through a function it has not got.
    Here each layer carries its recipe, and the model around it is an ordinary one.
    """

    @functools.wraps(config_from_args)
    def wrapper(args: Namespace, *rest: Any, **options: Any) -> Any:
        return config_from_args(Namespace(**{**vars(args), "fp8": None}), *rest, **options)

    return wrapper


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

    from mindspeed_lowp.megatron import convert_chunks

    args = get_args()
    if not args.fp8:
        return  # a patch outlives the run that asked for it
    flag = typed("--mxfp8-defer-backward-quant", "--fp8-quant-fb-split")
    if args.lowp_filter_fqns:
        flag = "--lowp-filter-fqns"
    if MINDSPEED_IS_HOST and flag is None:
        return  # its own layers, its own recipes
    _check_recipe(args)
    defer, operands = defer_policy(args)
    recipe = get_recipe(
        args.fp8_recipe, fp8_format=args.fp8, defer_backward_quant=defer, defer_operands=operands
    )
    filters = args.lowp_filter_fqns or ()

    def check(conversion: Conversion) -> None:
        message = unmatched(filters, conversion.names)
        if message:
            stop(f"--lowp-filter-fqns: {message}")
        if not conversion.converted:
            stop(f"{flag or f'--fp8-recipe {args.fp8_recipe}'}: {nothing_converted(conversion)}")

    choice = Choice(recipe, filter_fqns=filters)
    report = convert_chunks(model, choice, choice, check)

    device = next(parameter.device.type for chunk in model for parameter in chunk.parameters())
    if device != "npu" or args.lowp_emulate:
        print_rank_0(
            f"{recipe.name} is emulated on this device ({device}): quantized operands equal those of an "
            "Ascend 950 to the last bit; the speed does not"
        )
    for line in _start_up_lines(recipe.name, report, has_experts=bool(args.num_experts)):
        print_rank_0(line)


def _start_up_lines(recipe: str, report: Conversion, has_experts: bool) -> Iterator[str]:
    """What the first rank did with its layers; tensor-parallel ranks do the same with their shards."""
    yield f"MX training active with recipe {recipe}"
    yield f"Swapped to MXLinear_NPU layers: {len(report.linears)}"
    if has_experts:
        yield f"{recipe} MoE training enabled"
    if report.grouped:
        yield f"[MXFP8/HiF8 GMM] Replaced {len(report.grouped)} NPU GMM methods/functions"
    shown = report.kept[:_KEPT_SHOWN] + ["..."] * (len(report.kept) > _KEPT_SHOWN)
    routers = ["every MoE router"] if has_experts else []
    yield f"Kept in high precision: {', '.join(routers + shown) or 'none'}"
