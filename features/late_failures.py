"""What Megatron accepts and fails at later, some of it after hours, or ignores: told at the start."""

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
        modules = getattr(args, "recompute_modules", None)
        if not modules or MINDSPEED_IS_HOST:  # which recomputes by its own functions
            return
        if args.recompute_granularity != "selective":
            stop(
                f"--recompute-modules {' '.join(modules)} has no effect without --recompute-granularity "
                "selective: add it, or leave --recompute-modules out"
            )
        if "mlp" in modules and args.add_bias_linear:
            # An MLP gives its bias to the caller. Returned by the function that recomputes, the parameter
            # becomes a result of that function, whose backward then asks for its own.
            stop(
                "--recompute-modules mlp: Megatron's backward never ends where MLPs have biases: add "
                "--disable-bias-linear, or leave mlp out"
            )
