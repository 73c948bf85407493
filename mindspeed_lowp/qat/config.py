"""The options of fake-quantized layers of plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from mindspeed_lowp.qat.grids import MXFP4Grid, MXFP8Grid, ScaleMode, check_choice
from mindspeed_lowp.qat.quantizer import FakeQuantizer, MXFP4FakeQuantizer


@dataclass(frozen=True)
class MXFP4QATConfig:
    """How a layer fake-quantizes: its weight to MXFP4 always, its input on demand, its bias never.

    quantize_input: fake-quantize the input as well (W4A4; with input_format "mxfp8", W4A8).
    clip_grad: no gradient for elements that saturate.
    scale_factor, block_size, backend, scale_mode: see `MXFP4Grid`.
    input_format: of the input, "mxfp4" by the same rules as the weight or "mxfp8" (blocks of 32, OCP scales).
    learnable_scale_factor: learn the scale factors, one for each weight and each MXFP4 input. The state_dict
        then has these besides the float layer's entries.

    Raises ValueError for a value that is not supported.
    """

    quantize_input: bool = False
    clip_grad: bool = False
    scale_factor: float = 6.0
    block_size: int = 32
    backend: str = "auto"
    scale_mode: ScaleMode = "round"
    input_format: Literal["mxfp4", "mxfp8"] = "mxfp4"
    learnable_scale_factor: bool = False

    def __post_init__(self) -> None:
        MXFP4Grid(self.block_size, self.scale_factor, self.scale_mode, self.backend)  # which checks them
        check_choice("input_format", self.input_format, ("mxfp4", "mxfp8"))
        if self.input_format == "mxfp8" and not self.quantize_input:
            raise ValueError(
                'input_format="mxfp8" has no effect without quantize_input: add quantize_input=True'
            )

    def weight_quantizer(self) -> FakeQuantizer:
        return MXFP4FakeQuantizer(
            self.block_size,
            self.scale_factor,
            self.clip_grad,
            self.backend,
            scale_mode=self.scale_mode,
            learnable_scale_factor=self.learnable_scale_factor,
        )

    def input_quantizer(self) -> nn.Module:
        if not self.quantize_input:
            return nn.Identity()
        if self.input_format == "mxfp8":
            return FakeQuantizer(MXFP8Grid(), self.clip_grad)
        return self.weight_quantizer()
