"""The ways in which a matmul's operands are scaled, as data.

| scaling   | scales of x1                       | scales of x2                       | dtype       |
|-----------|------------------------------------|------------------------------------|-------------|
| `MX`      | ``[M, ceil(K / 64), 2]``           | ``[ceil(K / 64), N, 2]``           | uint8, E8M0 |
| `VECTORS` | ``[1]`` or ``[M]``                 | ``[1]`` or ``[N]``                 | fp32        |
| `TILES`   | ``[M, ceil(K / 128)]``             | ``[ceil(K / 128), ceil(N / 128)]`` | fp32        |
| `BLOCKS`  | ``[ceil(M / 128), ceil(K / 128)]`` | ``[ceil(K / 128), ceil(N / 128)]`` | fp32        |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_lowp.formats import E2M1, E4M3, E5M2, HIF8, INT8, MX_BLOCK, FormatInfo


@dataclass(frozen=True, eq=False)
class Scaling:
    """One way of scaling.

    Attributes:
        name: as messages call it.
        group_sizes: elements of M, N and K that share a scale, as torch_npu writes them; empty for
            `VECTORS`.
        scale_rows: elements of K for each row of the scale tensors; 0 where scales do not divide K.
        left, right: the shapes of the scales, as messages write them.
        split_left, split_right: the same where blocks of K restart at each of G groups (T is K).
    """

    name: str
    group_sizes: tuple[int, ...]
    scale_rows: int
    left: str
    right: str
    split_left: str = ""
    split_right: str = ""

    def left_shape(self, m: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of ``[m, k]``; nothing to say for `VECTORS`."""
        if self is VECTORS:
            return ()
        shape = -(-m // self.group_sizes[0]), -(-k // self.scale_rows)
        return (*shape, 2) if self is MX else shape

    def right_shape(self, k: int, n: int) -> tuple[int, ...]:
        """Shape of the scales of ``[k, n]``; nothing to say for `VECTORS`."""
        if self is VECTORS:
            return ()
        shape = -(-k // self.scale_rows), -(-n // self.group_sizes[1])
        return (*shape, 2) if self is MX else shape

    def split_shapes(self, m: int, k: int, n: int, groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of both scales where blocks of K restart at each group, not for `VECTORS`."""
        rows, columns = k // self.scale_rows + groups, -(-n // self.group_sizes[1])
        return ((m, rows, 2), (rows, columns, 2)) if self is MX else ((m, rows), (rows, columns))


_RIGHT = "[..., ceil(K / 128), ceil(N / 128)]"
MX = Scaling(
    "MX",
    (1, 1, MX_BLOCK),
    2 * MX_BLOCK,
    "[..., M, ceil(K / 64), 2]",
    "[..., ceil(K / 64), N, 2]",
    "[M, T // 64 + G, 2]",
    "[T // 64 + G, N, 2]",
)
VECTORS = Scaling("per-tensor or per-token", (), 0, "[1] or [M]", "[1] or [N]")
TILES = Scaling(
    "1x128 block",
    (1, 128, 128),
    128,
    "[..., M, ceil(K / 128)]",
    _RIGHT,
    "[M, T // 128 + G]",
    "[T // 128 + G, ceil(N / 128)]",
)
BLOCKS = Scaling("128x128 block", (128, 128, 128), 128, "[..., ceil(M / 128), ceil(K / 128)]", _RIGHT)

_BY_GROUP_SIZES = {scaling.group_sizes: scaling for scaling in (MX, VECTORS, TILES, BLOCKS)}


def scaling_of(group_sizes: Sequence[int]) -> Scaling | None:
    """The scaling with these group sizes; None where there is none."""
    return _BY_GROUP_SIZES.get(tuple(group_sizes))


_FP8, _FP4, _HIF8, _INT8 = (E4M3, E5M2), (E2M1,), (HIF8,), (INT8,)

#: What an operator takes: for each scaling, kinds of formats; both operands are of one kind.
Modes = Mapping[Scaling, Sequence[tuple[FormatInfo, ...]]]

QUANT_MATMUL: Modes = {
    VECTORS: (_FP8, _HIF8, _INT8),
    MX: (_FP8, _FP4),
    TILES: (_FP8, _HIF8, _INT8),
    BLOCKS: (_FP8, _HIF8),
}
#: `grouped_matmul`, by group type.
GROUPED_MATMUL: dict[int, Modes] = {
    0: {VECTORS: (_FP8, _HIF8), MX: (_FP8, _FP4), TILES: (_FP8, _HIF8)},
    2: {VECTORS: (_FP8, _HIF8), MX: (_FP8,), TILES: (_FP8, _HIF8)},
}
ADDED: Modes = {VECTORS: (_HIF8,), MX: (_FP8,)}
