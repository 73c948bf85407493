"""What forward keeps for backward of one tensor: a quantized operand, the tensor itself, or nothing.

Everything goes through `ctx.save_for_backward` as a flat row of tensors, so that saved-tensor hooks,
offloading and the memory report see every byte.
"""

from __future__ import annotations

from torch import Tensor

from mindspeed_lowp.recipes import Operand

Kept = Operand | Tensor | None


def pack(kept: Kept) -> tuple[Tensor | None, Tensor | None]:
    """The two saved tensors of one entry; without a scale, the first is in high precision."""
    return tuple(kept) if isinstance(kept, Operand) else (kept, None)


def unpack(data: Tensor | None, scale: Tensor | None) -> Kept:
    """The inverse of `pack`."""
    return data if scale is None else Operand(data, scale)
