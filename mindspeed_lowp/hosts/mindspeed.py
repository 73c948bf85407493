"""MindSpeed as the host: our features join its list, before its adaptor reads it or after."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from mindspeed_lowp import runtime
from mindspeed_lowp.features import Feature, create_mindspeed_features
from mindspeed_lowp.features.command_line import stop, typed

# Modules that patch Megatron with the features listed when they are imported: MindSpeed's, MindSpeed-LLM's.
_ADAPTORS = ("mindspeed.megatron_adaptor", "mindspeed_llm.tasks.megatron_adaptor_v2")

_HOOKS = ("pre_validate_args", "post_validate_args", "validate_args")

_features: list[Feature] = []


def register() -> None:
    """Append the features to MindSpeed's list, and let its adaptor patch Megatron with all of them.

    If its adaptor, or MindSpeed-LLM's, has patched Megatron already, ours are applied on top. Calling it
    again changes nothing. Stops the run where the arguments are parsed already: ours would not be among them.
    """
    if _features:
        return
    _check_torch_npu()
    try:
        # Importing the package fills the list with MindSpeed's own features.
        from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
    except ImportError as error:
        stop(f"MindSpeed cannot be imported: {error}. Install what its requirements.txt lists")

    late = any(name in sys.modules for name in _ADAPTORS)
    if late:
        _check_not_too_late()
    _features.extend(create_mindspeed_features())
    for feature in _features:
        for hook in _HOOKS:
            setattr(feature, hook, _of_arguments_only(getattr(feature, hook)))
    MindSpeedFeaturesManager.FEATURES_LIST.extend(_features)
    MindSpeedFeaturesManager.set_features_list = _keeping_ours(MindSpeedFeaturesManager.set_features_list)
    if late:
        _apply(MindSpeedFeaturesManager)
    else:
        import mindspeed.megatron_adaptor  # noqa: F401


def _check_torch_npu() -> None:
    try:
        import torch_npu  # noqa: F401
    except ImportError as error:
        where = "" if runtime.has_accelerator() else "On a machine without an NPU, "
        stop(
            f"MindSpeed is installed and needs torch_npu, which cannot be imported ({error}). {where}emulate "
            "it: set LOWP_EMULATE_NPU=1, or run `python -m mindspeed_lowp.run --emulate-npu SCRIPT ...`"
        )


def _check_not_too_late() -> None:
    parsed = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if parsed is not None:
        stop(
            "`import mindspeed_lowp.adaptor` came after Megatron parsed its arguments, too late for these "
            "features: put it at the top of the script"
        )


def _of_arguments_only(hook: Callable[[Namespace], None]) -> Callable[[Any], None]:
    """MindSpeed runs these hooks on every TransformerConfig as well, which nobody typed."""

    @functools.wraps(hook)
    def on_arguments(args: Any) -> None:
        if isinstance(args, Namespace):
            hook(args)

    return on_arguments


def _keeping_ours(set_features_list: Callable[[list], None]) -> Callable[[list], None]:
    """MindSpeed-LLM puts a list of its own in place of MindSpeed's; ours belong to that, too."""

    @functools.wraps(set_features_list)
    def keeping(features: list) -> None:
        set_features_list([*features, *(feature for feature in _features if feature not in features)])

    return keeping


def _apply(manager: Any) -> None:
    """Patch Megatron with our features, where MindSpeed's own have been applied without them."""
    from mindspeed import args_utils

    if typed("--lowp-config") and not typed("--fp8-format"):
        stop(
            "--lowp-config turns FP8 training on, which MindSpeed's adaptor, imported before "
            "mindspeed_lowp.adaptor, did not know: swap the two imports, or add --fp8-format as well"
        )
    args_utils._MINDSPEED_ARGS = None  # parsed without our options
    args = args_utils.get_mindspeed_args()
    everything = manager.FEATURES_LIST
    manager.FEATURES_LIST = _features
    try:
        manager.apply_features_pre_patches(args)
        manager.apply_features_patches(args)
    finally:
        manager.FEATURES_LIST = everything
