"""Delayed scaling: the history of magnitudes goes on with each training step."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from mindspeed_lowp.features.base import MINDSPEED_IS_HOST, Feature
from mindspeed_lowp.features.recipe_options import takes


class DelayedScalingFeature(Feature):
    """Patches only: `--fp8-recipe delayed` and its options are those of FP8 training."""

    def __init__(self) -> None:
        super().__init__("delayed-scaling")

    def is_need_apply(self, args: Namespace) -> bool:
        if MINDSPEED_IS_HOST:
            return False  # it has a history of its own
        # A file may name the recipe, too; a step without such layers has nothing to do.
        recipe, file = getattr(args, "fp8_recipe", None), getattr(args, "lowp_config", None)
        return bool(file) or takes(recipe, "amax_history_len")

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        patch_manager.register_patch("megatron.training.training.train_step", train_step_wrapper)


def train_step_wrapper(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Let the magnitudes seen in a step decide the scales of the next ones, once its optimizer is through."""

    @functools.wraps(train_step)
    def wrapper(forward_step_func: Any, data_iterator: Any, model: list, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.parallel_state import get_amax_reduction_group
        from megatron.training import get_args

        from mindspeed_lowp.megatron.delayed_scaling import begin_step, end_step

        begin_step(model)
        result = train_step(forward_step_func, data_iterator, model, *args, **kwargs)
        tp_only = getattr(get_args(), "tp_only_amax_red", False)
        end_step(model, get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=tp_only))
        return result

    return wrapper
