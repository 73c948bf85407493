"""The features: one a file, each with its options, its checks and the patches that carry it out.

Features work under either host (see `mindspeed_lowp.hosts`) and are the only ones, with the hosts, to know of
command-line arguments.
"""

from __future__ import annotations

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.checkpoint_precision import CheckpointPrecisionFeature
from mindspeed_lowp.features.checkpoint_tracker import CheckpointTrackerFeature
from mindspeed_lowp.features.data_path import DataPathFeature
from mindspeed_lowp.features.delayed_scaling import DelayedScalingFeature
from mindspeed_lowp.features.expert_norm_names import ExpertNormNamesFeature
from mindspeed_lowp.features.expert_resharding import ExpertReshardingFeature
from mindspeed_lowp.features.fp8_training import FP8TrainingFeature
from mindspeed_lowp.features.grouped_experts import GroupedExpertsFeature
from mindspeed_lowp.features.late_failures import LateFailuresFeature
from mindspeed_lowp.features.layer_selection import LayerSelectionFeature
from mindspeed_lowp.features.mindspeed_layers import MindSpeedLayersFeature
from mindspeed_lowp.features.mxfp8_defer_backward_quant import MXFP8DeferBackwardQuantFeature
from mindspeed_lowp.features.optimizer_order import OptimizerOrderFeature
from mindspeed_lowp.features.qat import QATFeature
from mindspeed_lowp.features.quantized_all_gather import QuantizedAllGatherFeature
from mindspeed_lowp.features.reuse_quantized_weight import ReuseQuantizedWeightFeature
from mindspeed_lowp.features.transformer_impl import TransformerImplFeature

__all__ = ["Feature", "create_bare_megatron_features", "create_features", "create_mindspeed_features"]


def create_features() -> list[Feature]:
    """The features every host gets, in the order of their checks: the most specific flag speaks first."""
    return [
        LayerSelectionFeature(),
        MXFP8DeferBackwardQuantFeature(),
        ReuseQuantizedWeightFeature(),
        QuantizedAllGatherFeature(),
        FP8TrainingFeature(),
        DelayedScalingFeature(),
        QATFeature(),
        DataPathFeature(),
        LateFailuresFeature(),
        CheckpointPrecisionFeature(),
        CheckpointTrackerFeature(),
    ]


def create_bare_megatron_features() -> list[Feature]:
    """The same, with those that stand in for what MindSpeed brings itself, or that it has no part in."""
    return [
        *create_features(),
        TransformerImplFeature(),
        GroupedExpertsFeature(),
        ExpertNormNamesFeature(),
        ExpertReshardingFeature(),
        OptimizerOrderFeature(),
    ]


def create_mindspeed_features() -> list[Feature]:
    """The same, with the one that reaches MindSpeed's own layers."""
    return [*create_features(), MindSpeedLayersFeature()]
