"""The state of an optimizer goes back into one of its kind, and flat buffers into the modules they came from.

By default Megatron's distributed optimizer saves flat buffers, which hold the parameters in the order of the
model's modules. Modules with the same parameters in another order can load them as well: each parameter gets
others' values.
"""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.command_line import stop

# The arguments that decide upon the parameters in a buffer and their order.
_ORDER = (
    "transformer_impl",
    "moe_grouped_gemm",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)


class OptimizerOrderFeature(Feature):
    """Always on: there is nothing to choose."""

    def __init__(self) -> None:
        super().__init__("optimizer-order", optimization_level=0)

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        name = "megatron.training.checkpointing._load_base_checkpoint"
        patch_manager.register_patch(name, load_base_checkpoint_wrapper)


def load_base_checkpoint_wrapper(load: Callable[..., Any]) -> Callable[..., Any]:
    """Look at what the checkpoint says of itself, before its tensors are loaded."""
    signature = inspect.signature(load)

    @functools.wraps(load)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        import torch

        result = load(*args, **kwargs)
        called = signature.bind(*args, **kwargs).arguments
        # Megatron's first look is for arguments to take over, before the processes know each other.
        if result[0] and called.get("rank0") and torch.distributed.is_initialized():
            check_order(result[0], called["args"])
        return result

    return wrapper


def check_order(state: dict, args: Namespace) -> None:
    """Stop where the optimizer's state would be loaded, and is in another order.

    state: what a checkpoint has besides tensors.
    args: the arguments of this run.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    saved, kind = state.get("args"), (state.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if (
        saved is None
        or args.finetune
        or args.no_load_optim
        or not hasattr(saved, "use_distributed_optimizer")
    ):
        return
    before, now = _difference(saved, args, ("use_distributed_optimizer",))
    if before:
        stop(
            f"{now}: the optimizer's state in this checkpoint can only be loaded {before}. Do that; or leave "
            "the optimizer's state behind with --no-load-optim"
        )
    if kind is None or kind in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return
    before, now = _difference(saved, args, _ORDER)
    if before:
        stop(
            f"{now}: the optimizer's state in this checkpoint can only be loaded {before}. Do that; or do it "
            "once, with --save and --dist-ckpt-optim-fully-reshardable, for a checkpoint that does not "
            "depend on it; or leave the optimizer's state behind with --no-load-optim"
        )


def _difference(saved: Namespace, args: Namespace, arguments: Sequence[str]) -> tuple[str, str]:
    """The first of the arguments that differs, as typed then and now; two empty strings if none does."""
    for argument in arguments:
        before, now = _typed(saved, argument), _typed(args, argument)
        if before != now:
            return before, now
    return "", ""


def _typed(args: Namespace, argument: str) -> str:
    """The argument as a user types it: `with --flag value`, or `without --flag`."""
    value, flag = getattr(args, argument, None), f"--{argument.replace('_', '-')}"
    if not value:
        return f"without {flag}"
    return f"with {flag}" if value is True else f"with {flag} {value}"
