"""What Megatron accepts and fails at later, some of it after hours: told at the start."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_lowp.features.base import MINDSPEED_IS_HOST, Feature
from mindspeed_lowp.features.command_line import stop


class LateFailuresFeature(Feature):
    """Checks only."""

    def __init__(self) -> None:
        super().__init__("late-failures")

    def is_need_apply(self, args: Namespace) -> bool:
        return False

    def pre_validate_args(self, args: Namespace) -> None:
        if getattr(args, "async_save", None) and getattr(args, "ckpt_format", None) == "torch":
            stop("--async-save cannot be used with --ckpt-format torch: set --ckpt-format torch_dist")
        if (
            getattr(args, "recompute_granularity", None) == "selective"
            and "mlp" in (getattr(args, "recompute_modules", None) or ())
            and args.add_bias_linear
            and not MINDSPEED_IS_HOST  # which recomputes by its own functions
        ):
            # A bias that such a module returns becomes its own result there.
            stop(
                "--recompute-modules mlp: Megatron's backward never ends where MLPs have biases: add "
                "--disable-bias-linear, or leave mlp out"
            )
