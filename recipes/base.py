"""What a recipe is: the choice of format, scaling and axes for the three GEMMs of a linear layer.

| GEMM                       | left            | right           |
|----------------------------|-----------------|-----------------|
| fprop   `y = x wᵀ`         | x, axis -1      | w, axis -1      |
| dgrad   `dx = g w`         | g, axis -1      | w, axis -2      |
| wgrad   `dw = gᵀ x`        | g, axis -2      | x, axis -2      |

Each operand is quantized along the axis that its GEMM contracts, so every tensor of a layer is needed twice.
A recipe is an immutable object which a *layer* carries; nothing looks one up while tensors flow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_lowp.formats import E4M3, E5M2, HIF8, FormatInfo

Role = Literal["input", "weight", "grad"]

# The tensors that are divided over the ranks of a process group, and that group.
Divided = Mapping[Role, dist.ProcessGroup]
NOT_DIVIDED: Divided = MappingProxyType({})

# The elements of inputs and weights, and of gradients.
_ELEMENTS = {"e4m3": (E4M3, E4M3), "hybrid": (E4M3, E5M2), "hif8": (HIF8, HIF8)}


def format_hint(wrong: str, accepted: Sequence[str]) -> str:
    """What to add to a message about a format that is none of a recipe's."""
    return "; for E5M2 gradients, hybrid" if wrong == "e5m2" and "hybrid" in accepted else ""


class Operand(NamedTuple):
    """A quantized matrix, or a stack of them: codes and the scales that belong to them.

    The scales' dimensions tell what they are for: one more than the data's, MX blocks in pairs; as many,
    tiles; fewer, one scale a matrix.
    """

    data: Tensor
    scale: Tensor

    @property
    def mT(self) -> Operand:
        """The transposed matrix, as views: data [..., M, N] -> [..., N, M], scale dimensions alike."""
        if self.scale.dim() > self.data.dim():
            return Operand(self.data.mT, self.scale.transpose(-3, -2))
        return Operand(self.data.mT, self.scale.mT if self.scale.dim() == self.data.dim() else self.scale)


class Recipe(ABC):
    """How a linear layer quantizes. Subclasses are frozen dataclasses, one recipe a file.

    name: what `--fp8-recipe` calls it.
    formats: the values of its option `fp8_format`.
    either_side: whether inputs and gradients are quantized alike: either may be the left one in wgrad.
    row_alignment: rows of two parts of a tensor that are a multiple of it can be quantized along the rows
        apart and concatenated, data and scales alike.
    divided: the tensors that are parts of larger ones, for recipes whose scales are those of the whole ones.
    """

    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    either_side: ClassVar[bool] = True
    row_alignment: ClassVar[int]
    divided: ClassVar[Divided] = NOT_DIVIDED  # `for_layer` gives a layer's recipe its own

    fp8_format: str

    def __post_init__(self) -> None:
        if self.fp8_format not in self.formats:
            raise ValueError(
                f"fp8_format={self.fp8_format!r}: {self.name} takes one of {', '.join(self.formats)}"
                f"{format_hint(self.fp8_format, self.formats)}"
            )

    def element(self, role: Role) -> FormatInfo:
        """The format of this tensor's elements."""
        return _ELEMENTS[self.fp8_format][role == "grad"]

    @property
    def scaling(self) -> Recipe:
        """The recipe that scales and multiplies: this one, unless it prepares tensors for another."""
        return self

    def for_layer(self, divided: Divided = NOT_DIVIDED) -> Recipe:
        """The recipe for one layer: itself, unless it keeps something that each layer needs for its own.

        divided: the tensors of which this process has one part, a shard of a tensor-parallel layer. Scales of
            whole tensors have to come from all parts, for every rank to quantize alike.
        """
        return self

    def defers(self, role: Role) -> bool:
        """Whether forward leaves the second axis of this tensor to backward, which quantizes it again."""
        return False

    def clips(self, role: Role) -> bool:
        """Whether this tensor gets no gradient where it is `saturated`."""
        return False

    def saturated(self, x: Tensor, role: Role) -> Tensor:
        """Which elements of x are beyond their format's range: bool, of x's shape. For roles that clip."""
        raise NotImplementedError

    @abstractmethod
    def one_copy_serves_both_axes(self, role: Role) -> bool:
        """Whether the codes of this tensor are the same along both axes, so that they are computed once."""

    @abstractmethod
    def quantize(self, x: Tensor, role: Role, axes: Sequence[int]) -> dict[int, Operand]:
        """Quantize x [..., M, N] along each of `axes` (-1, -2, or both in one pass); keyed by axis.

        A weight may be quantized once and taken again until the optimizer has changed it, so until then its
        operands must depend on nothing else that changes.
        """

    @abstractmethod
    def quantize_groups(
        self, x: Tensor, role: Role, group_list: Tensor, axes: Sequence[int]
    ) -> dict[int, Operand]:
        """The same for x [T, N] whose rows belong to groups: no scale is shared by two of them.

        group_list [E]: cumulative row counts, the last one equal to T.
        """

    @abstractmethod
    def slice_group(self, x: Operand, group: int, start: int, end: int) -> Operand:
        """The rows [start, end) of group `group`, out of what `quantize_groups` gave."""

    @abstractmethod
    def matmul(
        self, left: Operand, right: Operand, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """left [M, K] @ right [K, N] (+ bias [N]), accumulated in fp32 -> [M, N] of out_dtype."""

    @abstractmethod
    def matmul_add_(self, acc: Tensor, left: Operand, right: Operand) -> None:
        """acc [M, N] fp32 += left [M, K] @ right [K, N], in one operator."""

    @abstractmethod
    def grouped_matmul(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        """Group e's rows of left [T, K] @ right[e], right [E, K, N] -> [T, N] of out_dtype."""

    @abstractmethod
    def grouped_wgrad(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        """left [M, T] @ right [T, N] contracted within each group -> [E, M, N] of out_dtype.

        left is the gradient's transpose or, with `either_side`, the input's.
        A group without rows gives zeros. Both operands come from `quantize_groups`.
        """

    @abstractmethod
    def grouped_wgrad_add_(self, acc: Tensor, left: Operand, right: Operand, group_list: Tensor) -> None:
        """acc [E, M, N] fp32 += what `grouped_wgrad` gives, in one operator."""
