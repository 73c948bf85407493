"""FP8 training: `--fp8-format` and `--fp8-recipe` as Megatron has them, on layers of ours.

Without Transformer Engine, Megatron accepts these flags and trains in bf16 without a word. Here a flag either
takes effect or stops the run.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mindspeed_lowp.features.base import MINDSPEED_IS_HOST, Feature
from mindspeed_lowp.features.command_line import add_choices, add_option, find_option, stop, typed
from mindspeed_lowp.features.layer_selection import TITLE, asked_by, known_recipe, select
from mindspeed_lowp.features.mindspeed_layers import obstacle
from mindspeed_lowp.features.model_conversion import convert_model_wrapper
from mindspeed_lowp.features.recipe_options import check_format, check_options, recipe_from_args
from mindspeed_lowp.ops.hardware import is_ascend950_or_newer, npu_name
from mindspeed_lowp.recipes import recipe_names, registered_recipes

_EVERY_STEP = "scales are computed at every step; leave it out"
_ALL_GEMMS = "weight gradients are computed in FP8 too; leave it out"
_HIGH_PRECISION_WEIGHTS = "the weights themselves stay in high precision; leave it out"
_USE_FILTER = "name the layers to keep in high precision with --lowp-filter-fqns, e.g. decoder.layers.0."
_ANY_GROUP_SIZE = "experts take any number of tokens; leave it out"
_OTHER_FORMAT = "it is for another low-precision format; leave it or --fp8-format out"
_USE_DDP = "sharded parameters are not supported; use --use-distributed-optimizer"

# Flags of Megatron that only Transformer Engine would act upon, and wrappers that do not know these layers.
_REFUSED = {
    "--fp8-interval": _EVERY_STEP,
    "--tp-only-amax-red": "scales are agreed upon by all ranks that share a tensor; leave it out",
    "--fp8-quantizer-factory": "it belongs to Transformer Engine's recipe `custom`; leave it out",
    "--no-fp8-wgrad": _ALL_GEMMS,
    "--disable-fp8-wgrad": _ALL_GEMMS,
    "--fp8-param-gather": _HIGH_PRECISION_WEIGHTS,
    "--reuse-grad-buf-for-mxfp8-param-ag": _HIGH_PRECISION_WEIGHTS,
    "--keep-fp8-transpose-cache": _HIGH_PRECISION_WEIGHTS,
    "--moe-router-padding-for-fp8": _ANY_GROUP_SIZE,
    "--moe-router-padding-for-quantization": _ANY_GROUP_SIZE,
    "--fp4-format": _OTHER_FORMAT,
    "--fp4-recipe": _OTHER_FORMAT,
    "--fp4-quantizer-factory": _OTHER_FORMAT,
    "--te-precision-config-file": _USE_FILTER,
    "--use-torch-fsdp2": _USE_DDP,
    "--use-megatron-fsdp": _USE_DDP,
    "--use-custom-fsdp": _USE_DDP,
}

# Flags that mean something in FP8 training alone; Megatron takes those of its own in any case.
_BLOCKS = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
_NEED_FP8 = (
    "--lowp-filter-fqns",
    "--lowp-moe-fqns",
    "--no-use-gmm-fp8",
    "--lowp-emulate",
    "--first-last-layers-bf16",
    *_BLOCKS,
    "--fp8-amax-history-len",
    "--fp8-amax-compute-algo",
    "--fp8-margin",
    "--fp8-interval",
    "--fp8-quantizer-factory",
    "--no-fp8-wgrad",
    "--disable-fp8-wgrad",
    "--fp8-param-gather",
    "--keep-fp8-transpose-cache",
)


class FP8TrainingFeature(Feature):
    """Turns the parallel linears of Megatron's model into quantized ones, once the model is built."""

    def __init__(self) -> None:
        super().__init__("fp8")

    def is_need_apply(self, args: Namespace) -> bool:
        # Before Megatron's own parser runs, MindSpeed knows the option by its flag.
        return bool(getattr(args, "fp8", None) or getattr(args, "fp8_format", None))

    def register_args(self, parser: ArgumentParser) -> None:
        if MINDSPEED_IS_HOST:
            # Its own recipes stay the choices, and get company.
            formats = [name for cls in registered_recipes() for name in cls.formats]
            add_choices(parser, "--fp8-recipe", *recipe_names())
            add_choices(parser, "--fp8-format", *formats)
        else:
            # Checked in pre_validate_args: argparse would offer Transformer Engine's recipes and formats, and
            # none that is registered later, under all of Megatron's usage text.
            _open_choices(parser, "--fp8-recipe", recipe_names(), "the recipe of FP8 training")
            formats = dict.fromkeys(name for cls in registered_recipes() for name in cls.formats)
            _open_choices(parser, "--fp8-format", formats, "FP8 training in this format, with --fp8-recipe")
        add_option(
            parser,
            TITLE,
            "--lowp-emulate",
            action="store_true",
            help="On an NPU older than Ascend 950, emulate the formats it lacks: the same numbers, slowly.",
        )

    def pre_validate_args(self, args: Namespace) -> None:
        if getattr(args, "fp8", None):
            if MINDSPEED_IS_HOST and obstacle(args):
                return  # it has FP8 training of its own, and checks that itself
            names = select(args).recipes
            for name in names:
                known_recipe(name, args)
            _check_refused_flags(args)
            check_format(names, args)
            check_options(names, args)
            _check_blocks(names, args)
            for name in names:
                recipe_from_args(name, args)
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
    flag = typed(*_NEED_FP8)
    if flag:
        remedy = "leave it out" if flag in _REFUSED else "add --fp8-format e4m3 --fp8-recipe mxfp8"
        stop(f"{flag} has no effect without FP8 training: {remedy}")


def _open_choices(parser: ArgumentParser, flag: str, accepted: Iterable[str], what: str) -> None:
    option = find_option(parser, flag)
    if option is not None:
        option.choices = None
        option.help = f"{what[0].upper()}{what[1:]}: {', '.join(accepted)}."


def _check_refused_flags(args: Namespace) -> None:
    flag = typed(*_REFUSED)
    if flag:
        stop(f"{flag} cannot be used with {asked_by(args)}: {_REFUSED[flag]}")


def _check_blocks(recipes: Sequence[str], args: Namespace) -> None:
    if not getattr(args, "first_last_layers_bf16", False):
        flag = typed(*_BLOCKS)
        if flag:
            stop(f"{flag} has no effect without --first-last-layers-bf16: add it, or leave {flag} out")
        return
    if "delayed" in recipes:
        accepted = ", ".join(name for name in recipe_names() if name != "delayed")
        stop(
            f"--first-last-layers-bf16 cannot be used with the recipe delayed ({asked_by(args)}); accepted: "
            f"{accepted}"
        )
    counts = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
    for flag, count in zip(_BLOCKS, counts, strict=True):
        if not 0 <= count <= args.num_layers:
            stop(f"{flag} {count}: expected a number from 0 to --num-layers {args.num_layers}")


def _check_hardware(args: Namespace) -> None:
    name = npu_name()
    emulate = getattr(args, "lowp_emulate", False)
    if name is None:
        if emulate:
            stop("--lowp-emulate is for an NPU, and there is none: formats are emulated here in any case")
        return
    if is_ascend950_or_newer(name):
        if emulate:
            stop(f"--lowp-emulate: {name} computes {asked_by(args)} itself; leave the flag out")
    elif not emulate:
        stop(
            f"{asked_by(args)}: [MXFP8/HiF8] is only supported on Ascend950 or higher "
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
