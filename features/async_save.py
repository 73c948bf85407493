"""`--async-save` with a format that Megatron cannot save so: told at the start, not at the first save."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.command_line import stop


class AsyncSaveFeature(Feature):
    """A check only."""

    def __init__(self) -> None:
        super().__init__("async-save")

    def is_need_apply(self, args: Namespace) -> bool:
        return False

    def pre_validate_args(self, args: Namespace) -> None:
        if getattr(args, "async_save", None) and getattr(args, "ckpt_format", None) == "torch":
            stop("--async-save cannot be used with --ckpt-format torch: set --ckpt-format torch_dist")
