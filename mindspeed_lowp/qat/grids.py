"""The values that a format leaves to a tensor: fake quantization moves each element to one of them.

A grid knows no gradients; `straight_through` gives it one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E2M1, E4M3, E8M0_BIAS, MX_BLOCK
from mindspeed_lowp.ops.reference.mxfp4 import SCALE_MODES, block_scale
from mindspeed_lowp.qat.backends import BACKENDS, quant_dequant_mxfp4

ScaleMode = Literal["round", "floor", "ceil"]


class Grid(Protocol):
    """Fake quantization of one format; immutable, and equal to another of the same options."""

    name: ClassVar[str]

    def project(self, x: Tensor, axis: int = -1) -> Tensor:
        """x [...], bf16, fp16 or fp32, on the grid: same shape and dtype. Blocks lie along `axis`."""

    def saturated(self, x: Tensor, axis: int = -1) -> Tensor:
        """Which elements lie beyond the largest code times their block's scale: bool, of x's shape."""


@dataclass(frozen=True)
class MXFP4Grid:
    """E2M1 elements, a power of two as scale for each block.

    block_size: neighbours along the axis that share a scale; a tail is a shorter block.
    scale_factor: what the largest magnitude of a block is mapped to, before its scale becomes a power of two.
    scale_mode: "round" to the nearest power of two (the FakeQuant toolkit's rule; about half of the blocks
        saturate), "floor" (OCP's, for a factor of 6; and MindSpeed's), "ceil" (for a factor of 6 at most,
        nothing saturates).
    backend: see `mindspeed_lowp.qat.backends`; the same bits from each.

    Raises ValueError for what is none of these.
    """

    name: ClassVar[str] = "mxfp4"

    block_size: int = MX_BLOCK
    scale_factor: float = E2M1.max
    scale_mode: ScaleMode = "round"
    backend: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(f"block_size={self.block_size!r}: expected a whole number of at least 1")
        if not 2.0**-100 <= self.scale_factor <= 2.0**100:
            raise ValueError(
                f"scale_factor={self.scale_factor!r}: expected a number greater than 0, such as 6"
            )
        check_choice("scale_mode", self.scale_mode, SCALE_MODES)
        check_choice("backend", self.backend, BACKENDS)

    def project(self, x: Tensor, axis: int = -1) -> Tensor:
        how = (self.block_size, self.scale_factor, self.scale_mode, self.backend)
        if axis in (-1, x.dim() - 1):
            return quant_dequant_mxfp4(x, *how)
        return quant_dequant_mxfp4(x.transpose(axis, -1), *how).transpose(axis, -1).contiguous()

    def saturated(self, x: Tensor, axis: int = -1) -> Tensor:
        def limit(amax: Tensor) -> Tensor:
            return E2M1.max * block_scale(amax, self.scale_factor, self.scale_mode)

        return _beyond(limit, x, axis, self.block_size)


@dataclass(frozen=True)
class MXFP8Grid:
    """E4M3 elements in blocks of 32: what the recipe `mxfp8` multiplies.

    scale_mode: "floor" (OCP's, as in the recipe) or "ceil" (nothing saturates).

    Raises ValueError for another one.
    """

    name: ClassVar[str] = "mxfp8"

    scale_mode: Literal["floor", "ceil"] = "floor"

    def __post_init__(self) -> None:
        check_choice("scale_mode", self.scale_mode, ("floor", "ceil"))

    def project(self, x: Tensor, axis: int = -1) -> Tensor:
        if x.numel() == 0:
            return x.clone()
        axis = axis % x.dim() - x.dim()
        length, rows = x.shape[axis], x
        if length < MX_BLOCK:  # the operator wants a whole block of an fp32 tensor
            rows = F.pad(x, (0, 0) * (-axis - 1) + (0, MX_BLOCK - length))
        codes, scale = ops.dynamic_mx_quant(
            rows, axis=axis, dst_type=E4M3.dtype, scale_alg=1 if self.scale_mode == "ceil" else 0
        )
        values = ops.anti_mx_quant(codes, scale, axis=axis, dst_type=x.dtype)
        return values.narrow(axis, 0, length).contiguous()

    def saturated(self, x: Tensor, axis: int = -1) -> Tensor:
        if self.scale_mode == "ceil":
            return torch.zeros_like(x, dtype=torch.bool)
        return _beyond(_ocp_limit, x, axis, MX_BLOCK)


def check_choice(name: str, value: object, accepted: tuple[str, ...]) -> None:
    """Raise ValueError for an option's value that is not among those accepted."""
    if value not in accepted:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(accepted)}")


def _ocp_limit(amax: Tensor) -> Tensor:
    """E4M3's largest value times 2 ** (floor(log2(amax)) - 8), which is 2 ** -127 at least."""
    field = ((amax.view(torch.int32) >> 23) - E4M3.emax).clamp(min=0)  # of the scale, as E8M0 writes it
    largest = amax.new_full((), E4M3.max).view(torch.int32)
    limit = (largest + ((field - E8M0_BIAS) << 23)).view(torch.float32)
    return torch.where(amax.isfinite(), limit, torch.inf)


def _beyond(limit: Callable[[Tensor], Tensor], x: Tensor, axis: int, block_size: int) -> Tensor:
    """|x| > limit(the largest magnitude of its block). Limits are fp32 numbers that bf16 has as well."""
    sizes = x.detach().transpose(axis, -1).abs()
    if sizes.dtype == torch.float16:  # has too few small ones
        sizes = sizes.float()
    n = sizes.shape[-1]
    missing = -n % block_size
    blocks = (F.pad(sizes, (0, missing)) if missing else sizes).unflatten(-1, (-1, block_size))
    beyond = blocks > limit(blocks.amax(dim=-1, keepdim=True).float()).to(sizes.dtype)
    return beyond.flatten(-2)[..., :n].transpose(axis, -1)
