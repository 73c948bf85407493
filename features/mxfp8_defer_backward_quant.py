"""`--mxfp8-defer-backward-quant`: backward quantizes again instead of keeping a second quantized copy."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.command_line import add_option, stop
from mindspeed_lowp.features.layer_selection import select
from mindspeed_lowp.features.recipe_options import defer_policy, takes
from mindspeed_lowp.recipes import recipe_class, recipe_names
from mindspeed_lowp.recipes.mxfp8 import DEFER_OPERANDS

_TITLE = "MXFP8 deferred backward quantization"


class MXFP8DeferBackwardQuantFeature(Feature):
    """Options and checks only: the policy becomes part of the recipe that the layers carry."""

    def __init__(self) -> None:
        super().__init__("mxfp8-defer-backward-quant")

    def register_args(self, parser: ArgumentParser) -> None:
        add_option(
            parser,
            _TITLE,
            "--mxfp8-defer-backward-quant",
            action="store_true",
            help="Forward quantizes only the axis it needs; backward quantizes the other one again. Frees "
            "one byte a parameter from forward to backward; results stay the same to the last bit.",
        )
        add_option(
            parser,
            _TITLE,
            "--mxfp8-defer-operands",
            choices=list(DEFER_OPERANDS),
            default=None,  # `weight`; None tells that the flag was left out
            help="What --mxfp8-defer-backward-quant applies to: `weight` (default) keeps the input's second "
            "axis at one byte an element; `all` keeps the input itself and quantizes it in backward.",
        )
        add_option(
            parser,
            _TITLE,
            "--fp8-quant-fb-split",
            action="store_true",
            help="Older name of --mxfp8-defer-backward-quant --mxfp8-defer-operands all.",
        )

    def pre_validate_args(self, args: Namespace) -> None:
        split = getattr(args, "fp8_quant_fb_split", False)
        operands = getattr(args, "mxfp8_defer_operands", None)
        deferred, _ = defer_policy(args)
        if not deferred:
            if operands:
                stop(
                    f"--mxfp8-defer-operands {operands} has no effect without --mxfp8-defer-backward-quant: "
                    "add --mxfp8-defer-backward-quant, or leave --mxfp8-defer-operands out"
                )
            return

        flag = "--fp8-quant-fb-split" if split else "--mxfp8-defer-backward-quant"
        if split and operands == "weight":
            stop(
                f"{flag} means --mxfp8-defer-operands all and contradicts --mxfp8-defer-operands weight: "
                "for `weight`, type --mxfp8-defer-backward-quant in its place"
            )
        if not getattr(args, "fp8", None):
            stop(f"{flag} needs FP8 training: add --fp8-format e4m3 --fp8-recipe mxfp8")
        recipes = select(args).recipes
        if any(takes(name, "defer_backward_quant") for name in recipes):
            return
        message = f"{flag} works with the recipe mxfp8 only, not with {' and '.join(recipes)}"
        if all(_has_one_copy(name) for name in recipes):
            stop(
                f"{message}: one copy of a weight serves both axes there, nothing to defer; leave {flag} out"
            )
        stop(f"{message}: set --fp8-recipe mxfp8")


def _has_one_copy(recipe: str) -> bool:
    return recipe in recipe_names() and recipe_class(recipe)().one_copy_serves_both_axes("weight")
