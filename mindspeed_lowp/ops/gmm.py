"""Products of quantized matrices in groups: of rows, or of the contracted axis.

Values, scales, rounding and memory layout are as in `matmul`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_lowp.formats import E2M1, HIF8, FormatInfo
from mindspeed_lowp.ops import _checks, operands
from mindspeed_lowp.ops.matmul import composed_operator
from mindspeed_lowp.ops.scaling import (
    ADDED,
    GROUPED_MATMUL,
    MX,
    TILES,
    VECTORS,
    Scaling,
    scaling_of,
)


def _fake(
    x,
    weight,
    scale,
    per_token_scale,
    bias,
    group_list,
    group_type,
    group_list_type,
    output_dtype,
    x_dtype,
    weight_dtype,
    group_sizes,
):
    if group_type == 2:
        shape = (group_list.shape[0], x.shape[0], weight.shape[1])
    else:
        shape = (x.shape[0], scale.shape[2] if scaling_of(group_sizes) is MX else weight.shape[2])
    return x.new_empty(shape, dtype=output_dtype)


_grouped_matmul = composed_operator(
    "grouped_matmul(Tensor x, Tensor weight, Tensor scale, Tensor per_token_scale, Tensor? bias,"
    " Tensor group_list, int group_type, int group_list_type, ScalarType output_dtype, int x_dtype,"
    " int weight_dtype, int[] group_sizes) -> Tensor",
    _fake,
)
_add_quant_gmm_ = composed_operator(
    "add_quant_gmm_(Tensor(a!) self, Tensor x1, Tensor x2, Tensor x2_scale, Tensor group_list,"
    " Tensor x1_scale, int group_list_type, int x1_dtype, int x2_dtype, int[] group_sizes) -> ()",
    lambda self, x1, x2, x2_scale, group_list, x1_scale, group_list_type, x1_dtype, x2_dtype, group_sizes: (
        None
    ),
)


@_checks.names_arguments
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    output_dtype: torch.dtype | int | None = None,
    x_dtype: torch.dtype | int | None = None,
    weight_dtype: torch.dtype | int | None = None,
    scale_dtype: torch.dtype | int | None = None,
    per_token_scale_dtype: torch.dtype | int | None = None,
) -> list[Tensor]:
    """One matmul for each group of rows (``group_type=0``) or of the contracted axis (``group_type=2``).

    ``group_type=0`` (forward, input gradient): ``out[group g] = x[group g] @ weight[g]``, with x ``[T, K]``,
    weight ``[G, K, N]`` and the result ``[T, N]``.

    ``group_type=2`` (weight gradient): ``out[g] = x[:, group g] @ weight[group g]``, with x ``[M, T]`` (for
    MX the transposed view of codes from `grouped_dynamic_mx_quant`), weight ``[T, N]`` and the result ``[G,
    M, N]``.

    The scales say how the operands were quantized:

    | group_type | per_token_scale                | scale                                | operands |
    |------------|--------------------------------|--------------------------------------|----------|
    | 0, MX      | ``[T, ceil(K / 64), 2]``, E8M0 | ``[G, ceil(K / 64), N, 2]``, E8M0    | FP8, FP4 |
    | 0          | ``[G]``, ``[G, 1]`` or ``[T]`` | ``[G]``, ``[G, 1]`` or ``[G, N]``    | FP8, HiFloat8 |
    | 0, blocks  | ``[T, ceil(K / 128)]``         | ``[G, ceil(K / 128), ceil(N / 128)]`` | FP8, HiFloat8 |
    | 2, MX      | ``[M, T // 64 + G, 2]``, E8M0  | ``[T // 64 + G, N, 2]``, E8M0        | FP8      |
    | 2          | ``[G]``, ``[G, 1]`` or ``[G, M]`` | ``[G]``, ``[G, 1]`` or ``[G, N]`` | FP8, HiFloat8 |
    | 2, blocks  | ``[M, T // 128 + G]``          | ``[T // 128 + G, ceil(N / 128)]``    | FP8, HiFloat8 |

    Where a shape reads both ways: ``per_token_scale [T]`` with T == G is one for each row; ``[G, 1]`` is one
    for each group; with ``group_type=2``, shapes that fit blocks are blocks. ``[G]`` for scale is never
    anything else.

    With ``group_type=2`` the blocks of K restart at each group; the scales of group g begin at row ``start //
    64 + g`` (``// 128``) and rows between groups are not read.

    Each group's product is that of `quant_matmul`: with one scale on each side the hardware applies the upper
    19 bits of their product.

    Groups may be empty: their result has no rows, or is exactly 0. T may be 0, which torch_npu refuses for
    ``group_type=2`` and is not asked. ``group_list`` may cover less than T; the rows beyond it are not read,
    and are 0 in the result of ``group_type=0`` (the NPU leaves them unwritten).

    Args:
        x, weight: lists of one tensor: E4M3 or E5M2, or uint8 that ``x_dtype`` and ``weight_dtype`` name. FP4
            codes are two a byte, x along K, weight along K (``[G, K / 2, N]``) or N (``[G, K, N / 2]``). K
            must be above 2.
        bias: FP4: a list of one tensor ``[G, N]``, fp32, added to the fp32 sums. Otherwise None.
        scale, per_token_scale: lists of one tensor: scales of weight and of x. E8M0 is uint8 or
            ``torch.float8_e8m0fnu``; the others are fp32.
        group_list: ``[G]``, int64 (or int32): cumulative ends (``group_list_type=0``) or counts (1).
        split_item: required: 2 or 3, which mean the same: one result tensor. (0 and 1, one tensor a group,
            are not part of quantized operands on Ascend 950.)
        group_type: 0 or 2.
        group_list_type: 0 or 1.
        output_dtype: bf16 (15), fp16 (5) or fp32 (6). Required.
        x_dtype, weight_dtype: 290 for HiFloat8, 296 for FP4 E2M1; None for FP8.
        scale_dtype, per_token_scale_dtype: ``torch.float8_e8m0fnu`` or 293 (or None) for E8M0 scales, else
            None.

    Returns:
        A list of one tensor of ``output_dtype``.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_grouped_matmul``; aclnnGroupedMatmulV4 and V5 on Ascend 950 (hicann/ops-transformer), its
    golden and its arch35 kernels. Where a group has one scale for x and a scale for each column of weight,
    that golden multiplies the scales first; the document, the kernel and the golden of the plain matmul
    multiply the sum by scale, then by per_token_scale, and so do we.
    """
    _checks.choice("split_item", split_item, (2, 3))
    _checks.choice("group_type", group_type, (0, 2))
    _checks.choice("group_list_type", group_list_type, (0, 1))
    x, weight = _only("x", x), _only("weight", weight)
    info1 = operands.element_format("x", x, x_dtype)
    info2 = operands.element_format("weight", weight, weight_dtype)
    scale, per_token_scale = _only("scale", scale), _only("per_token_scale", per_token_scale)
    _checks.group_list("group_list", group_list)
    _checks.dims("x", x, 2, 2)
    _checks.dims("weight", weight, 2 if group_type == 2 else 3, 2 if group_type == 2 else 3)
    dtype = _checks.output_dtype("output_dtype", output_dtype)
    scaling = _scaling(x, weight, scale, per_token_scale, group_list, group_type)
    operands.formats(GROUPED_MATMUL[group_type], scaling, "x", info1, "weight", info2)
    left = operands.Side(
        "x",
        x,
        info1,
        "per_token_scale",
        operands.scale("per_token_scale", per_token_scale, per_token_scale_dtype, scaling),
    )
    right = operands.Side(
        "weight", weight, info2, "scale", operands.scale("scale", scale, scale_dtype, scaling)
    )
    check = _check_split_k if group_type == 2 else _check_split_m
    n, per_token_scale, scale = check(scaling, left, right, group_list)
    if bias is not None:
        bias = _check_bias(bias, info1, group_list.shape[0], n)
    return [
        _grouped_matmul(
            x,
            weight,
            scale,
            per_token_scale,
            bias,
            group_list,
            group_type,
            group_list_type,
            dtype,
            info1.npu_code,
            info2.npu_code,
            scaling.group_sizes,
        )
    ]


def _only(argument: str, tensors: Sequence[Tensor] | None) -> Tensor:
    if isinstance(tensors, Tensor) or tensors is None or len(tensors) != 1:
        found = (
            "a tensor" if isinstance(tensors, Tensor) else "None" if tensors is None else f"{len(tensors)}"
        )
        raise ValueError(f"{argument} must be a list of exactly one tensor, got {found}")
    return tensors[0]


def _scaling(
    x: Tensor, weight: Tensor, scale: Tensor, per_token_scale: Tensor, group_list: Tensor, group_type: int
) -> Scaling:
    """What dtype and shapes of the scales say; whether they fit is checked after."""
    if scale.element_size() == 1:
        return MX
    if group_type == 0:
        return TILES if scale.dim() == 3 else VECTORS
    shapes = TILES.split_shapes(x.shape[0], weight.shape[0], weight.shape[1], group_list.shape[0])
    blocks = (per_token_scale.shape, scale.shape) == shapes
    return TILES if blocks else VECTORS


def _check_split_m(
    scaling: Scaling, left: operands.Side, right: operands.Side, group_list: Tensor
) -> tuple[int, Tensor, Tensor]:
    """N and the scales of both sides as the operator takes them."""
    groups = right.x.shape[0]
    _checks.shape("group_list", group_list, (groups,), "[G], one entry for each weight")
    m, k, n = operands.product_shape(scaling, left, right)
    if scaling is not VECTORS:
        operands.scale_shapes(scaling, left, right, m, k, n)
        return n, left.scale, right.scale
    scale = left.scale
    if scale.shape == (groups,) and groups != m:
        scale = scale.unsqueeze(1)
    elif scale.shape != (m,) and scale.shape != (groups, 1):
        raise ValueError(
            f"{left.scale_name} has shape {list(scale.shape)}, expected [{groups}], [{groups}, 1] or [{m}] "
            "([G], [G, 1] or [T])"
        )
    return n, scale, _of_groups(right, groups, n, "N")


def _check_split_k(
    scaling: Scaling, left: operands.Side, right: operands.Side, group_list: Tensor
) -> tuple[int, Tensor, Tensor]:
    """N and the scales of both sides as the operator takes them."""
    (m, k), (rows, n), groups = left.x.shape, right.x.shape, group_list.shape[0]
    if k != rows:
        raise ValueError(f"{right.name} has {rows} rows, {left.name} has {k} columns; both must be T")
    if scaling is VECTORS:
        return n, _of_groups(left, groups, m, "M"), _of_groups(right, groups, n, "N")
    left_shape, right_shape = scaling.split_shapes(m, k, n, groups)
    _checks.shape(left.scale_name, left.scale, left_shape, scaling.split_left)
    _checks.shape(right.scale_name, right.scale, right_shape, scaling.split_right)
    return n, left.scale, right.scale


def _of_groups(side: operands.Side, groups: int, length: int, letter: str) -> Tensor:
    """Scales of each group, ``[G]``, or of each of its rows or columns, ``[G, length]``."""
    scale = side.scale
    if scale.shape == (groups,):
        return scale
    if scale.shape == (groups, 1):
        return scale.squeeze(1)
    if scale.shape != (groups, length):
        raise ValueError(
            f"{side.scale_name} has shape {list(scale.shape)}, expected [{groups}], [{groups}, 1] or "
            f"[{groups}, {length}] ([G], [G, 1] or [G, {letter}])"
        )
    return scale


def _check_bias(bias: Sequence[Tensor], info: FormatInfo, groups: int, n: int) -> Tensor:
    if info is not E2M1:
        raise ValueError(f"bias is not supported with {info.name} operands; leave it out")
    bias = _only("bias", bias)
    _checks.dtype("bias", bias, (torch.float32,))
    _checks.shape("bias", bias, (groups, n), "[G, N]")
    return bias


@_checks.names_arguments
def add_quant_gmm_(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    group_list: Tensor,
    *,
    x1_scale: Tensor | None = None,
    group_list_type: int = 0,
    group_sizes: None = None,
    x1_dtype: torch.dtype | int | None = None,
    x2_dtype: torch.dtype | int | None = None,
    x1_scale_dtype: torch.dtype | int | None = None,
    x2_scale_dtype: torch.dtype | int | None = None,
) -> Tensor:
    """``self[g] += x1[:, group g] @ x2[group g]`` in place: the experts' weight gradients, accumulated in
    fp32.

    An empty group leaves its ``self[g]`` as it is; T may be 0 (torch_npu refuses that and is not asked). Rows
    beyond the groups are not read. ``self`` becomes what
    ``self + grouped_matmul(..., group_type=2, output_dtype=torch.float32)[0]`` is, to the bit, in the modes
    that the hardware has:

    | operands   | x1_scale                      | x2_scale                          |
    |------------|-------------------------------|-----------------------------------|
    | E4M3, E5M2 | ``[M, T // 64 + G, 2]``, E8M0 | ``[T // 64 + G, N, 2]``, E8M0     |
    | HiFloat8   | ``[G]`` or ``[G, 1]``, fp32   | ``[G]``, ``[G, 1]`` or ``[G, N]``, fp32 |

    Args:
        self: ``[G, M, N]``, fp32.
        x1: ``[M, T]``, E4M3 or E5M2 (the transposed view of codes from `grouped_dynamic_mx_quant`), or uint8
            with ``x1_dtype=290``.
        x2: ``[T, N]``, the same.
        x2_scale, x1_scale: as above; E8M0 is uint8 or ``torch.float8_e8m0fnu``. Both are required.
        group_list: ``[G]``, int64 (or int32): cumulative ends (``group_list_type=0``) or counts (1).
        group_list_type: 0 or 1.
        group_sizes: None.
        x1_dtype, x2_dtype: 290 for HiFloat8, else None.
        x1_scale_dtype, x2_scale_dtype: ``torch.float8_e8m0fnu``, 293 or None.

    Returns:
        ``self``.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_add_quant_gmm_``; aclnnQuantGroupedMatmulInplaceAdd and its arch35 kernels, one of which
    applies the upper 19 bits of the product of two scales (hicann/ops-transformer).
    """
    _checks.choice("group_sizes", group_sizes, (None,))
    _checks.choice("group_list_type", group_list_type, (0, 1))
    _checks.accumulator("self", self)
    info1 = operands.element_format("x1", x1, x1_dtype)
    info2 = operands.element_format("x2", x2, x2_dtype)
    scaling = VECTORS if info1 is HIF8 else MX
    operands.formats(ADDED, scaling, "x1", info1, "x2", info2)
    _checks.dims("x1", x1, 2, 2)
    _checks.dims("x2", x2, 2, 2)
    _checks.group_list("group_list", group_list)
    left = operands.Side(
        "x1", x1, info1, "x1_scale", operands.scale("x1_scale", x1_scale, x1_scale_dtype, scaling)
    )
    right = operands.Side(
        "x2", x2, info2, "x2_scale", operands.scale("x2_scale", x2_scale, x2_scale_dtype, scaling)
    )
    n, x1_scale, x2_scale = _check_split_k(scaling, left, right, group_list)
    groups = group_list.shape[0]
    if scaling is VECTORS:
        _checks.shape("x1_scale", x1_scale, (groups,), "[G] or [G, 1], one scale for each group")
    _checks.shape("self", self, (groups, x1.shape[0], n), "[G, M, N]")
    _add_quant_gmm_(
        self,
        x1,
        x2,
        x2_scale,
        group_list,
        x1_scale,
        group_list_type,
        info1.npu_code,
        info2.npu_code,
        scaling.group_sizes,
    )
    return self
