"""`--lowp-quantized-all-gather`: under sequence parallelism, inputs travel quantized."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from mindspeed_lowp.features.base import MINDSPEED_IS_HOST, Feature
from mindspeed_lowp.features.command_line import add_option, stop
from mindspeed_lowp.features.layer_selection import TITLE

_FLAG = "--lowp-quantized-all-gather"


class QuantizedAllGatherFeature(Feature):
    """Option and checks; layers are told when they are converted."""

    def __init__(self) -> None:
        super().__init__("lowp-quantized-all-gather")

    def register_args(self, parser: ArgumentParser) -> None:
        add_option(
            parser,
            TITLE,
            _FLAG,
            action="store_true",
            help="With --sequence-parallel, quantize the input of a column-parallel linear before it is "
            "gathered for forward: about half the bytes of bf16 travel, and the results are the same to the "
            "last bit.",
        )

    def is_need_apply(self, args: Namespace) -> bool:
        return False

    def pre_validate_args(self, args: Namespace) -> None:
        if not getattr(args, "lowp_quantized_all_gather", False):
            return
        if not getattr(args, "fp8", None):
            stop(f"{_FLAG} has no effect without FP8 training: add --fp8-format e4m3 --fp8-recipe mxfp8")
        if MINDSPEED_IS_HOST:
            stop(f"{_FLAG}: MindSpeed's own linears gather their input themselves; leave it out")
        if not args.sequence_parallel or args.tensor_model_parallel_size == 1:
            stop(
                f"{_FLAG} has no effect without --sequence-parallel and --tensor-model-parallel-size 2 or "
                f"more: add them, or leave {_FLAG} out"
            )
