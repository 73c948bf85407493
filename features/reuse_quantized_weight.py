"""`--fp8-reuse-quantized-weight`: quantize each weight once per optimizer step, not per micro-batch.

The layers hold what they quantized (see `mindspeed_lowp.layers.weight_cache`); here Megatron is made to say
when it writes weights, for it does so through `.data` and flat buffers, where tensors do not notice.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from mindspeed_lowp.features.base import MINDSPEED_IS_HOST, Feature
from mindspeed_lowp.features.command_line import add_option, stop, typed
from mindspeed_lowp.layers import drop_reused_weights, reused_bytes

_TITLE = "reuse of quantized weights"
_FLAG = "--fp8-reuse-quantized-weight"
_CHECK_FLAG = "--lowp-check-reused-weights"

# All that writes to weights of any layer. Float16Optimizer, DistributedOptimizer and the layer-wise optimizer
# step by the `step` of these classes; train_step may clip weights after the optimizer (--qk-clip).
_WRITES = (
    "megatron.core.optimizer.optimizer.FP32Optimizer.step",
    "megatron.core.optimizer.optimizer.MixedPrecisionOptimizer.step",
    "megatron.core.optimizer.optimizer.ChainedOptimizer.step",
    "megatron.training.training.train_step",
    "megatron.training.checkpointing.load_checkpoint",
)
# All that writes to the weights of one bucket: with --overlap-param-gather started early, awaited in the
# forward pre-hook of the module that owns the weight, so before the weight is quantized.
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_GATHERS = (f"{_BUCKETS}.start_param_sync", f"{_BUCKETS}.finish_param_sync")

_reported = False


def reuse_policy(args: Namespace) -> tuple[bool, bool]:
    """Whether quantized weights are reused, and whether they are checked then."""
    reuse = bool(getattr(args, "fp8_reuse_quantized_weight", False))
    return reuse, bool(getattr(args, "lowp_check_reused_weights", False))


class ReuseQuantizedWeightFeature(Feature):
    """Options, checks, and patches that drop what was quantized; layers get their caches when converted."""

    def __init__(self) -> None:
        super().__init__("fp8-reuse-quantized-weight")

    def register_args(self, parser: ArgumentParser) -> None:
        add_option(
            parser,
            _TITLE,
            _FLAG,
            action="store_true",
            help="Quantize each weight once per optimizer step and axis, not once per micro-batch. Holds its "
            "codes for the whole step (two bytes a parameter with mxfp8); results stay the same to the last "
            "bit.",
        )
        add_option(
            parser,
            _TITLE,
            _CHECK_FLAG,
            action="store_true",
            help=f"With {_FLAG}: quantize nevertheless, compare, and stop at a weight that something wrote "
            "to unseen. For debugging.",
        )

    def pre_validate_args(self, args: Namespace) -> None:
        reuse, check = reuse_policy(args)
        if check and not reuse:
            stop(f"{_CHECK_FLAG} has no effect without {_FLAG}: add {_FLAG}, or leave {_CHECK_FLAG} out")
        if not reuse:
            return
        if not getattr(args, "fp8", None):
            stop(f"{_FLAG} needs FP8 training: add --fp8-format e4m3 --fp8-recipe mxfp8")
        graphs = typed("--enable-cuda-graph", "--external-cuda-graph")
        if getattr(args, "cuda_graph_impl", "none") != "none":
            graphs = "--cuda-graph-impl"
        if graphs and not MINDSPEED_IS_HOST:
            stop(
                f"{_FLAG} cannot be used with {graphs}: a captured graph would take the weights of the step "
                "that it was captured in for ever; leave one of the two out"
            )

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        for name in _WRITES:
            patch_manager.register_patch(name, drop_around_wrapper)
        for name in _GATHERS:
            patch_manager.register_patch(name, drop_after_gather_wrapper)


def drop_around_wrapper(write: Callable[..., Any]) -> Callable[..., Any]:
    """Drop all reused weights before (their memory may be needed) and after something that writes weights."""

    @functools.wraps(write)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _report_once()
        drop_reused_weights()
        try:
            return write(*args, **kwargs)
        finally:
            drop_reused_weights()

    return wrapper


def drop_after_gather_wrapper(sync: Callable[..., Any]) -> Callable[..., Any]:
    """Drop the reused weights of a bucket when its gather starts and when it has ended.

    Megatron's hooks ask for its end at each use of a weight; only once a step there is something to wait for.
    """

    @functools.wraps(sync)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        writes = self.param_gather_handle is not None or not self.param_gather_dispatched
        result = sync(self, *args, **kwargs)
        if writes:
            drop_reused_weights(param for bucket in self.buckets for param in bucket.params_list)
        return result

    return wrapper


def _report_once() -> None:
    """Say before the first optimizer step how much was held, on the first rank."""
    global _reported
    held = reused_bytes()
    if held and not _reported:
        from megatron.training import print_rank_0

        _reported = True
        print_rank_0(f"quantized weights held for reuse until the optimizer step: {held} bytes")
