"""How a weight becomes packed codes and scales, in the layout of the compressed-tensors library.

A weight [N, K] is stored as pairs of E2M1 codes, ``weight_packed`` [N, K/2] uint8, the first in the low half
of a byte, or as E4M3 codes, ``weight`` [N, K]; both with the E8M0 scales ``weight_scale`` [N, K/32] uint8,
biased by 127. Blocks have 32 elements along K, and K is a multiple of 32.

Source: compressed-tensors 0.16 to 0.20, `compressors/mxfp4`, `compressors/mxfp8`, `compressors/mx_utils`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.export.checkpoint import ExportError
from mindspeed_lowp.formats import E2M1, E4M3, MX_BLOCK, FormatInfo


class Packing(ABC):
    """A format of compressed-tensors.

    Attributes:
        name: of the format there.
        preset: of the scheme there: weights only.
        codes: last part of the name of the tensor that holds the codes.
        element: their format.
        scale_modes: the rules that a scale may follow.
    """

    name: ClassVar[str]
    preset: ClassVar[str]
    codes: ClassVar[str]
    element: ClassVar[FormatInfo]
    scale_modes: ClassVar[tuple[str, ...]]

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """The tensors stored for a weight [N, K] in bf16, fp16 or fp32, by the last part of their names.

        Raises:
            ValueError: `check_shape` would refuse, or a value is not finite, or overflows in the format.
        """
        check_shape(weight.shape)
        # fp16 would round small values on the way.
        weight = weight.float() if weight.dtype == torch.float16 else weight
        if not weight.isfinite().all():
            raise ValueError("has NaN or Inf")
        codes, scale = self.quantize(weight)
        blocks = weight.shape[1] // MX_BLOCK  # the operator pads an odd number
        return {self.codes: codes, "weight_scale": scale.flatten(1)[:, :blocks].contiguous()}

    @abstractmethod
    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales in the layout of `ops.dynamic_mx_quant`, of what the model computed with."""

    def packed_bytes(self, shape: Sequence[int]) -> int:
        """The size of what `pack` returns for a weight of this shape."""
        elements = math.prod(shape)
        return elements * self.element.bits // 8 + elements // MX_BLOCK


@dataclass(frozen=True)
class MXFP8(Packing):
    """E4M3 weights: what the recipe ``mxfp8`` multiplies, and the training scheme ``w8a16-mxfp8``.

    Attributes:
        scale_mode: "floor" (OCP's, the recipe's) or "ceil" (nothing saturates).
    """

    name: ClassVar[str] = "mxfp8-quantized"
    preset: ClassVar[str] = "MXFP8A16"
    codes: ClassVar[str] = "weight"
    element: ClassVar[FormatInfo] = E4M3
    scale_modes: ClassVar[tuple[str, ...]] = ("floor", "ceil")

    scale_mode: str = "floor"

    def __post_init__(self) -> None:
        _check_scale_mode(self, self.scale_mode)

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        scale_alg = 1 if self.scale_mode == "ceil" else 0
        return ops.dynamic_mx_quant(weight, axis=-1, dst_type=self.element.npu_code, scale_alg=scale_alg)


@dataclass(frozen=True)
class MXFP4(Packing):
    """E2M1 weights that decode to ``mxfp4_quant_dequant(weight)``, to the bit.

    The quantize-dequantize operator is the one place that knows the rules of scales and codes; what it
    returns is quantized once more, by OCP's rule, which loses nothing whatever those rules were. For if c s
    is the largest magnitude of a block, c a code and s its scale, OCP's scale is s where c is 4 or 6, s / 2
    for 2 and 3, s / 4 for 1 and 1.5, s / 8 for 0.5; and the codes up to 3, 1.5 and 0.5, times 2, 4 and 8, are
    codes again. For the same reason blocks of a multiple of 32 can be stored in blocks of 32.

    Attributes:
        scale_mode, scale_factor, block_size: of the fake quantization that the model was trained with.
    """

    name: ClassVar[str] = "mxfp4-pack-quantized"
    preset: ClassVar[str] = "MXFP4A16"
    codes: ClassVar[str] = "weight_packed"
    element: ClassVar[FormatInfo] = E2M1
    scale_modes: ClassVar[tuple[str, ...]] = ("round", "floor", "ceil")

    scale_mode: str = "round"
    scale_factor: float = E2M1.max
    block_size: int = MX_BLOCK

    def __post_init__(self) -> None:
        _check_scale_mode(self, self.scale_mode)
        if not 2.0**-100 <= self.scale_factor <= 2.0**100:
            raise ExportError(f"--scale-factor {self.scale_factor}: give a number greater than 0, such as 6")
        if self.block_size <= 0 or self.block_size % MX_BLOCK:
            raise ExportError(
                f"--block-size {self.block_size}: {self.name} stores a scale for each {MX_BLOCK} elements;"
                f" only what was trained with blocks of {MX_BLOCK}, or a multiple, can be exported"
            )

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        how = (self.scale_factor, self.block_size, self.scale_mode)
        values = torch.ops.lowp.quant_dequant_mxfp4(weight, *how)
        codes, scale = ops.dynamic_mx_quant(values, axis=-1, dst_type=self.element.npu_code)
        stored = ops.anti_mx_quant(codes, scale, src_type=self.element.npu_code, dst_type=values.dtype)
        if not torch.equal(stored, values):
            raise ValueError("has values too large for the format")
        return codes, scale


def check_shape(shape: Sequence[int]) -> None:
    """Raises ValueError, with the rest of a sentence about the weight, if the formats cannot hold it."""
    if len(shape) != 2:
        raise ValueError(f"has {len(shape)} dimensions; the format holds matrices")
    if shape[1] % MX_BLOCK:
        raise ValueError(f"has rows of {shape[1]} elements; the format holds multiples of {MX_BLOCK}")


def _check_scale_mode(packing: Packing, scale_mode: str) -> None:
    if scale_mode not in packing.scale_modes:
        raise ExportError(
            f"--scale-mode {scale_mode}: the scales of {packing.name} are {' or '.join(packing.scale_modes)}"
        )
