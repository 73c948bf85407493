"""MXFP8: 1x32 blocks for inputs, weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mindspeed_lowp.recipes.base import Role
from mindspeed_lowp.recipes.mx import MXRecipe

DEFER_OPERANDS = ("weight", "all")


@dataclass(frozen=True)
class MXFP8Recipe(MXRecipe):
    """1x32 blocks for every operand.

    fp8_format: "e4m3", or "hybrid" for E5M2 gradients.
    defer_backward_quant: forward quantizes only the axis it needs; backward quantizes the other one again
        from the high-precision tensor. The bits of every result are those of dual-axis quantization.
    defer_operands: what is deferred: "weight", or "all" for the input as well (which then stays alive in
        high precision until backward: two bytes an element in place of one).

    Raises ValueError for other values.
    """

    name: ClassVar[str] = "mxfp8"

    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"
    defer_backward_quant: bool = False
    defer_operands: Literal["weight", "all"] = "weight"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.defer_backward_quant, bool):
            raise ValueError(f"defer_backward_quant={self.defer_backward_quant!r}: expected True or False")
        if self.defer_operands not in DEFER_OPERANDS:
            raise ValueError(
                f"defer_operands={self.defer_operands!r}: expected one of {', '.join(DEFER_OPERANDS)}"
            )

    def defers(self, role: Role) -> bool:
        return self.defer_backward_quant and (role == "weight" or self.defer_operands == "all")
