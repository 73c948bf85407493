"""`--transformer-impl transformer_engine`, Megatron's default: modules of ours where it is not installed."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from enum import Enum
from typing import Any

from mindspeed_lowp.features.base import MINDSPEED_IS_HOST, Feature
from mindspeed_lowp.features.command_line import stop, typed

# What only Transformer Engine's own kernels do: the argument, and its values (besides none) that ask for none
# of them.
_NEEDS_KERNELS: dict[str, tuple] = {
    "attention_backend": ("auto", "unfused", "local"),
    "batch_invariant_mode": (),
    "context_parallel_size": (1,),
    "cpu_offloading_num_layers": (0,),
    "cross_entropy_fusion_impl": ("native",),
    "cuda_graph_impl": ("none", "local"),
    "experimental_attention_variant": (),
    "fine_grained_activation_offloading": (),
    "fused_residual_rmsnorm": (),
    "heterogeneous_layers_config_encoded_json": (),
    "heterogeneous_layers_config_path": (),
    "hybrid_context_parallel": (),
    "log_max_attention_logit": (),
    "moe_permute_fusion": (),
    "moe_router_fusion": (),
    "qk_clip": (),
    "rl_use_sequence_packing": (),
    "sft": (),
    "symmetric_ar_type": (),
    "te_precision_config_file": (),
    "te_rng_tracker": (),
    "tp_comm_overlap": (),
    "use_te_activation_func": (),
}


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


class TransformerImplFeature(Feature):
    """Supplies the modules that `--transformer-impl transformer_engine` names, where nobody else does.

    Where Transformer Engine is installed its modules stay, and a recipe, which they would not follow, stops
    the run.
    """

    def __init__(self) -> None:
        super().__init__("transformer-impl")

    def is_need_apply(self, args: Namespace) -> bool:
        impl = getattr(args, "transformer_impl", "local")
        return impl == "transformer_engine" and not has_transformer_engine()

    def pre_validate_args(self, args: Namespace) -> None:
        impl = getattr(args, "transformer_impl", "local")
        origin = "" if typed("--transformer-impl") else " (Megatron's default)"
        if self.is_need_apply(args):
            _check_version(f"--transformer-impl {impl}{origin}")
            _check_needs_no_kernels(args)
            _check_delayed_weight_gradients(args)
            return
        if impl == "local":
            _check_local_modules(args)
            return
        if not has_transformer_engine():
            stop(
                f"--transformer-impl {impl} needs Transformer Engine, which is not installed: set "
                "--transformer-impl transformer_engine, for modules that do without, or local"
            )
        if getattr(args, "fp8", None):
            stop(
                f"--transformer-impl {impl}{origin}: --fp8-recipe {args.fp8_recipe} works on Megatron's own "
                "layers: set --transformer-impl local"
            )

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        from mindspeed_lowp.megatron.transformer_engine import transformer_engine_patches

        for name, replacement in transformer_engine_patches().items():
            patch_manager.register_patch(name, replacement)


def _check_local_modules(args: Namespace) -> None:
    """What Megatron asserts of its local modules, in terms of what to type."""
    ranks = getattr(args, "context_parallel_size", 1)
    if ranks > 1 and not MINDSPEED_IS_HOST:  # which has an attention for it
        stop(
            f"--context-parallel-size {ranks}: the attention of --transformer-impl local does not divide a "
            "sequence: leave it out; --sequence-parallel with --tensor-model-parallel-size divides "
            "activations"
        )
    if getattr(args, "delay_wgrad_compute", False) and not MINDSPEED_IS_HOST:
        stop(
            "--delay-wgrad-compute: the modules of --transformer-impl local compute weight gradients with "
            "the rest of backward: set --transformer-impl transformer_engine, or leave it out"
        )


def _check_delayed_weight_gradients(args: Namespace) -> None:
    """What our modules delay: a recipe's products, as a schedule that overlaps experts asks for them."""
    flag = "--delay-wgrad-compute"
    if not getattr(args, "delay_wgrad_compute", False):
        return
    if not getattr(args, "overlap_moe_expert_parallel_comm", False):
        stop(f"{flag} needs --overlap-moe-expert-parallel-comm: add it, or leave {flag} out")
    if not getattr(args, "fp8", None):
        stop(
            f"{flag}: without Transformer Engine only a recipe's weight gradients can be delayed: add "
            f"--fp8-format e4m3 --fp8-recipe mxfp8, or leave {flag} out"
        )
    # Megatron asks for a version of Transformer Engine then.
    if getattr(args, "overlap_grad_reduce", False):
        stop(f"{flag} cannot be used with --overlap-grad-reduce: leave one of the two out")
    if not getattr(args, "gradient_accumulation_fusion", True):
        stop(f"{flag} cannot be used with --no-gradient-accumulation-fusion: leave one of the two out")


def _check_version(flag: str) -> None:
    from mindspeed_lowp.megatron_versions import HAS_REPLACEABLE_TRANSFORMER_ENGINE, VERSION

    if not HAS_REPLACEABLE_TRANSFORMER_ENGINE:
        version = ".".join(map(str, VERSION))
        stop(
            f"{flag}: Transformer Engine is not installed, and modules in its place need Megatron core 0.17 "
            f"(this is {version}): set --transformer-impl local"
        )


def _check_needs_no_kernels(args: Namespace) -> None:
    for argument, harmless in _NEEDS_KERNELS.items():
        value = getattr(args, argument, None)
        shown = value.name if isinstance(value, Enum) else value
        if value and shown not in harmless:
            flag = f"--{argument.replace('_', '-')}{'' if value is True else f' {shown}'}"
            stop(
                f"{flag} needs the kernels of Transformer Engine, which is not installed: leave it out "
                "(the modules of --transformer-impl transformer_engine are here, without them)"
            )
