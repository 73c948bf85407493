"""nn.Linear with fake-quantized operands."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_lowp.qat.config import MXFP4QATConfig


class MXFP4QATLinear(nn.Linear):
    """`F.linear(Q(x), Q(weight), bias)`, weights in high precision underneath.

    Each forward fake-quantizes the weight as it is; the optimizer goes on changing the weight itself. There
    is no other state, so that the state_dict is nn.Linear's (but for learnable scale factors).

    config: None takes the defaults of `MXFP4QATConfig`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: MXFP4QATConfig | None = None,
        **options,
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self._set(config)

    def _set(self, config: MXFP4QATConfig | None) -> None:
        self.config = config or MXFP4QATConfig()
        self.weight_quantizer = self.config.weight_quantizer().to(self.weight.device)
        self.input_quantizer = self.config.input_quantizer().to(self.weight.device)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: MXFP4QATConfig | None = None) -> MXFP4QATLinear:
        """A fake-quantized layer with the very Parameters of `linear`, which optimizers may hold already."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, config, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer._set(config)  # on the weight's device
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.input_quantizer(input), self.weight_quantizer(self.weight), self.bias)
