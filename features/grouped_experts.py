"""Grouped experts without Transformer Engine: `--moe-grouped-gemm` on the local layers, in any precision."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.command_line import stop
from mindspeed_lowp.features.transformer_impl import has_transformer_engine


class GroupedExpertsFeature(Feature):
    """Brings the grouped linears that Megatron expects from Transformer Engine, in bf16 as well as in FP8."""

    def __init__(self) -> None:
        super().__init__("moe-grouped-gemm")

    def is_need_apply(self, args: Namespace) -> bool:
        wanted = getattr(args, "moe_grouped_gemm", False) and getattr(args, "num_experts", None)
        return bool(wanted) and not has_transformer_engine()

    def pre_validate_args(self, args: Namespace) -> None:
        if not self.is_need_apply(args) or not args.add_bias_linear:
            return
        from mindspeed_lowp.megatron_versions import HAS_GROUPED_MLP, VERSION

        if HAS_GROUPED_MLP:
            version = ".".join(map(str, VERSION))
            stop(
                f"--moe-grouped-gemm: grouped experts of Megatron core {version} have no biases: add "
                "--disable-bias-linear"
            )
        # Megatron fuses an expert's bias with neither of these.
        fused = ["--no-bias-dropout-fusion"] if args.bias_dropout_fusion else []
        if args.bias_gelu_fusion and not (args.swiglu or args.quick_geglu):
            fused.append("--no-bias-gelu-fusion")
        if fused:
            stop(
                "--moe-grouped-gemm: grouped experts do not fuse their biases: add --disable-bias-linear, "
                f"or {' '.join(fused)}"
            )

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        from mindspeed_lowp.megatron.own_layers import grouped_experts_patches

        for name, replacement in grouped_experts_patches().items():
            patch_manager.register_patch(name, replacement)
