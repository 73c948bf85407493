"""A recipe that notes what it was asked to quantize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mindspeed_lowp.recipes import MXFP8Recipe, Operand


@dataclass(frozen=True)
class RecordingRecipe(MXFP8Recipe):
    """MXFP8, with a log of (role, axes) for each quantization, "role, grouped" where rows are grouped."""

    log: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def quantize(self, x: Tensor, role: str, axes: Sequence[int]) -> dict[int, Operand]:
        if axes:
            self.log.append((role, tuple(axes)))
        return super().quantize(x, role, axes)

    def quantize_groups(
        self, x: Tensor, role: str, group_list: Tensor, axes: Sequence[int]
    ) -> dict[int, Operand]:
        self.log.append((f"{role}, grouped", tuple(axes)))
        return super().quantize_groups(x, role, group_list, axes)
