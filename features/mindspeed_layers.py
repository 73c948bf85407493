"""MindSpeed as the host: when its own modules compute by recipes of ours, and what it is told of that.

MindSpeed's FP8 training brings its layers, and says block by block where they compute in FP8. Ours puts
recipes into these layers. Where a run cannot have that, MindSpeed's own recipes stay, unless a flag of ours
asks for more.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.command_line import stop, typed
from mindspeed_lowp.features.layer_selection import recipe_name, select
from mindspeed_lowp.features.lowp_config import read_config
from mindspeed_lowp.mindspeed.patch_points import TESTED, problems
from mindspeed_lowp.recipes import recipe_class, recipe_names

# Flags that MindSpeed's own recipes do not know.
_OUR_FLAGS = (
    "--lowp-filter-fqns",
    "--lowp-moe-fqns",
    "--lowp-config",
    "--lowp-emulate",
    "--lowp-check-reused-weights",
    "--mxfp8-defer-backward-quant",
    "--mxfp8-defer-operands",
    "--fp8-quant-fb-split",
)

# Flags of MindSpeed whose implementations multiply in functions of their own.
_ELSEWHERE = (
    "--use-ascend-mc2",
    "--use-ascend-coc",
    "--tp-2d",
    "--moe-fb-overlap",
    "--moe-alltoall-overlap-comm",
    "--moe-allgather-overlap-comm",
    "--moe-tp-extend-ep",
    "--moe-bmm-mc2",
    "--te-comparison-with-cpu",
    "--te-comparison-with-bf16",
)

# The recipes MindSpeed has. Of these, `delayed` keeps a state that stays MindSpeed's.
_ITS_RECIPES = ("delayed", "tensorwise", "mxfp8", "mxfp8-32x32", "blockwise")


def obstacle(args: Namespace) -> str | None:
    """Why this run's layers keep MindSpeed's own recipes, in terms of flags; None where they get ours."""
    for flag in _ELSEWHERE:
        if getattr(args, flag[2:].replace("-", "_"), None):
            return f"{flag}, which multiplies in functions of its own"
    for name in select(args).recipes:
        if name == "delayed":
            return "--fp8-recipe delayed, whose history is MindSpeed's"
        if name not in recipe_names():
            return f"--fp8-recipe {name}, which is MindSpeed's alone"
    return None


class MindSpeedLayersFeature(Feature):
    """Puts recipes of ours within reach of MindSpeed's layers; the model's conversion hands them out.

    It has to be the last one of ours: what it hides from MindSpeed, the others want to see.
    """

    def __init__(self) -> None:
        super().__init__("mindspeed-layers")

    def is_need_apply(self, args: Namespace) -> bool:
        return _early_format(args) is not None

    def pre_validate_args(self, args: Namespace) -> None:
        if not getattr(args, "fp8", None):
            return
        why = obstacle(args)
        flag = typed(*_OUR_FLAGS)
        if why and flag:
            stop(f"{flag} cannot be used with {why}: leave one of the two out")
        if why is None and args.fp8_recipe not in _ITS_RECIPES:
            # MindSpeed is told of a recipe with such elements that it has; the layers carry the real one.
            args.lowp_recipe = args.fp8_recipe
            args.fp8_recipe = "tensorwise" if args.fp8 == "hif8" else "mxfp8"

    def pre_register_patches(self, patch_manager: Any, args: Namespace) -> None:
        # MindSpeed chooses its layers by --fp8-format alone, which a file or a recipe of one format implies.
        args.fp8_format = _early_format(args)

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        has_experts = bool(getattr(args, "num_experts", None))
        found = list(problems(has_experts))
        if found:
            stop(
                f"this MindSpeed is not the one that mindspeed_lowp knows ({TESTED}): {'; '.join(found)}. "
                "Install that version, or leave `import mindspeed_lowp.adaptor` out"
            )
        from mindspeed_lowp.mindspeed import linear

        wrappers = dict(linear.WRAPPERS)
        if has_experts:
            from mindspeed_lowp.mindspeed import experts

            wrappers |= experts.WRAPPERS
        for name, wrapper in wrappers.items():
            patch_manager.register_patch(name, wrapper)


def _early_format(args: Namespace) -> str | None:
    """The FP8 format of the run, out of what the command line says before Megatron's own parser is there."""
    given = getattr(args, "fp8", None) or getattr(args, "fp8_format", None)
    if given:
        return given
    if getattr(args, "lowp_config", None):
        config = read_config(args.lowp_config)
        name = (config.linear or config.grouped).recipe_name
    elif typed("--fp8-recipe"):
        name = recipe_name(args)
    else:
        return None
    formats = recipe_class(name).formats if name in recipe_names() else ()
    implied = getattr(args, "lowp_config", None) or len(formats) == 1
    return formats[0] if formats and implied else None
