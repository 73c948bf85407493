"""Autograd of a linear layer and of a grouped one, given a recipe."""

from mindspeed_lowp.layers.convert import (
    Choice,
    Conversion,
    ConversionError,
    by_name,
    convert_model,
    is_expert,
    nothing_converted,
    register_holder,
    register_layer,
    unmatched,
)
from mindspeed_lowp.layers.grouped_linear import lowp_grouped_linear
from mindspeed_lowp.layers.linear import lowp_linear
from mindspeed_lowp.layers.mx_linear import MXLinear
from mindspeed_lowp.layers.parallel import TensorParallel
from mindspeed_lowp.layers.quantize import (
    MoETrainingConfig,
    MXLinearConfig,
    grouped_quantize_,
    linear_quantize_,
)
from mindspeed_lowp.layers.weight_cache import (
    StaleWeightError,
    WeightCache,
    drop_reused_weights,
    reuse_quantized_weights,
    reused_bytes,
)
from mindspeed_lowp.layers.weight_grad import DelayedWeightGrads, WeightGrad

__all__ = [
    "Choice",
    "Conversion",
    "ConversionError",
    "DelayedWeightGrads",
    "MXLinear",
    "MXLinearConfig",
    "MoETrainingConfig",
    "StaleWeightError",
    "TensorParallel",
    "WeightCache",
    "WeightGrad",
    "by_name",
    "convert_model",
    "drop_reused_weights",
    "grouped_quantize_",
    "is_expert",
    "linear_quantize_",
    "lowp_grouped_linear",
    "lowp_linear",
    "nothing_converted",
    "register_holder",
    "register_layer",
    "reuse_quantized_weights",
    "reused_bytes",
    "unmatched",
]
