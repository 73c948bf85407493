"""One line about each loaded checkpoint: the precision it was trained in, and the one it goes on in."""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.layer_selection import select


class CheckpointPrecisionFeature(Feature):
    """Parameters are saved in high precision, so a checkpoint continues in any recipe, and in none."""

    def __init__(self) -> None:
        super().__init__("checkpoint-precision", optimization_level=0)

    def validate_args(self, args: Namespace) -> None:
        # Saved with all arguments in every checkpoint.
        recipes = select(args).recipes if getattr(args, "fp8", None) else []
        args.lowp_precision = _precision(args, recipes)

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        name = "megatron.training.checkpointing._load_base_checkpoint"
        patch_manager.register_patch(name, load_base_checkpoint_wrapper)


def precision(args: Namespace) -> str:
    """What a checkpoint with these arguments was trained in, be it this project's or Transformer Engine's."""
    saved = getattr(args, "lowp_precision", None)
    return saved or _precision(args, [args.fp8_recipe] if getattr(args, "fp8", None) else [])


def _precision(args: Namespace, recipes: list[str]) -> str:
    if recipes:
        return f"{' and '.join(recipes)} ({args.fp8})"
    for name in ("fp4", "bf16", "fp16"):
        if getattr(args, name, None):
            return name
    return "fp32"


def load_base_checkpoint_wrapper(load: Callable[..., Any]) -> Callable[..., Any]:
    """Say what was loaded; not of the look at a checkpoint's arguments that comes first (`rank0`)."""
    signature = inspect.signature(load)

    @functools.wraps(load)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args, print_rank_0

        result = load(*args, **kwargs)
        state = result[0]
        if state and "args" in state and not signature.bind(*args, **kwargs).arguments.get("rank0"):
            before, now = precision(state["args"]), precision(get_args())
            print_rank_0(f"the checkpoint was trained in {before}; it continues in {now}")
        return result

    return wrapper
