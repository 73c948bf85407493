"""Runs that ask for Transformer Engine's layers where Megatron's own ones are to be used."""

from __future__ import annotations

import importlib.util
from argparse import Namespace

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.command_line import stop, typed


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


class TransformerImplFeature(Feature):
    """Stops where `--transformer-impl` names layers that are not installed or that cannot be quantized."""

    def __init__(self) -> None:
        super().__init__("transformer-impl")

    def is_need_apply(self, args: Namespace) -> bool:
        return False  # checks only

    def pre_validate_args(self, args: Namespace) -> None:
        impl = getattr(args, "transformer_impl", "local")
        if impl == "local":
            return
        origin = "" if typed("--transformer-impl") else " (Megatron's default)"
        if not has_transformer_engine():
            stop(
                f"--transformer-impl {impl}{origin} needs Transformer Engine, which is not installed: "
                "set --transformer-impl local"
            )
        if getattr(args, "fp8", None):
            stop(
                f"--transformer-impl {impl}{origin}: --fp8-recipe {args.fp8_recipe} works on Megatron's own "
                "layers: set --transformer-impl local"
            )
