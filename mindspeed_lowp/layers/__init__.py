"""Autograd of a linear layer and of a grouped one, given a recipe."""

from mindspeed_lowp.layers.grouped_linear import lowp_grouped_linear
from mindspeed_lowp.layers.linear import lowp_linear
from mindspeed_lowp.layers.parallel import TensorParallel
from mindspeed_lowp.layers.weight_grad import WeightGrad

__all__ = ["TensorParallel", "WeightGrad", "lowp_grouped_linear", "lowp_linear"]
