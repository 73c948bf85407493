"""Products of MXFP8 operands: the MX modes of torch_npu's quantized matmul operators.

In all of them the operands' values are exact, products accumulate in fp32 (the order of additions is the
device's own), and the sum is rounded once. Results depend on values and shapes, never on memory layout:
transposed views are fine, for codes and for scales. A NaN scale (0xFF) makes NaN of every result that its
block contributes to.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mindspeed_lowp.ops import _checks, composed, layout
from mindspeed_lowp.ops._library import operator
from mindspeed_lowp.ops.kernels import mx as kernels
from mindspeed_lowp.ops.npu import matmul as npu
from mindspeed_lowp.ops.reference import mx as reference


def _composed(schema: str, fake: Callable) -> torch._ops.OpOverload:
    """Register a matmul: on an NPU its own operator, elsewhere the device's dequantization and a GEMM."""
    name = schema[: schema.index("(")]
    emulation = getattr(composed, name)
    return operator(
        schema,
        reference=partial(emulation, reference.anti_mx_quant),
        kernel=partial(emulation, kernels.anti_mx_quant),
        npu=getattr(npu, name),
        fake=fake,
    )


def _fake_quant_matmul(x1, x2, scale, pertoken_scale, bias, output_dtype):
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return x1.new_empty((*batch, x1.shape[-2], x2.shape[-1]), dtype=output_dtype)


def _fake_grouped_matmul(
    x, weight, scale, per_token_scale, group_list, group_type, group_list_type, output_dtype
):
    shape = (x.shape[0], weight.shape[-1])
    if group_type == 2:
        shape = (group_list.shape[0], *shape)
    return x.new_empty(shape, dtype=output_dtype)


_quant_matmul = _composed(
    "quant_matmul(Tensor x1, Tensor x2, Tensor scale, Tensor pertoken_scale, Tensor? bias,"
    " ScalarType output_dtype) -> Tensor",
    _fake_quant_matmul,
)
_grouped_matmul = _composed(
    "grouped_matmul(Tensor x, Tensor weight, Tensor scale, Tensor per_token_scale, Tensor group_list,"
    " int group_type, int group_list_type, ScalarType output_dtype) -> Tensor",
    _fake_grouped_matmul,
)
_add_quant_matmul_ = _composed(
    "add_quant_matmul_(Tensor(a!) self, Tensor x1, Tensor x2, Tensor x2_scale, Tensor x1_scale) -> ()",
    lambda self, x1, x2, x2_scale, x1_scale: None,
)
_add_quant_gmm_ = _composed(
    "add_quant_gmm_(Tensor(a!) self, Tensor x1, Tensor x2, Tensor x2_scale, Tensor group_list,"
    " Tensor x1_scale, int group_list_type) -> ()",
    lambda self, x1, x2, x2_scale, group_list, x1_scale, group_list_type: None,
)


def _pairs(k: int) -> int:
    return -(-k // layout.PAIR)


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | int | None = None,
    x1_dtype: None = None,
    x2_dtype: None = None,
    pertoken_scale_dtype: torch.dtype | int | None = None,
    scale_dtype: torch.dtype | int | None = None,
    group_sizes: Sequence[int] | None = None,
) -> Tensor:
    """``x1 @ x2 (+ bias)`` of MXFP8 operands, both quantized along K.

    Args:
        x1: ``[..., M, K]``, E4M3 or E5M2, 2 to 6 dimensions.
        x2: ``[..., K, N]``, E4M3 or E5M2; leading dimensions broadcast with those of ``x1``.
        scale: scales of ``x2``, ``[..., ceil(K / 64), N, 2]``, uint8 or ``torch.float8_e8m0fnu``.
        offset: None.
        pertoken_scale: scales of ``x1``, ``[..., M, ceil(K / 64), 2]``. Required.
        bias: fp32, ``[N]``, or ``[batch, 1, N]`` with one leading dimension; added to the fp32 sum.
        output_dtype: bf16 (15), fp16 (5) or fp32 (6). Required.
        x1_dtype, x2_dtype: None (FP8 tensors carry their dtype).
        pertoken_scale_dtype, scale_dtype: ``torch.float8_e8m0fnu``, 293 or None.
        group_sizes: ``[1, 1, 32]`` or None.

    Returns:
        ``[..., M, N]`` of ``output_dtype``.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_quant_matmul``; aclnnQuantMatmulV5 (MX), golden of quant_batch_matmul_v3.
    """
    _checks.choice("offset", offset, (None,))
    _checks.choice("x1_dtype", x1_dtype, (None,))
    _checks.choice("x2_dtype", x2_dtype, (None,))
    _checks.group_sizes(group_sizes)
    _checks.elements("x1", x1)
    _checks.elements("x2", x2)
    _checks.dims("x1", x1, 2, 6)
    _checks.dims("x2", x2, 2, 6)
    dtype = _checks.output_dtype("output_dtype", output_dtype)
    scale = _checks.scales("scale", scale, "scale_dtype", scale_dtype)
    pertoken_scale = _checks.scales(
        "pertoken_scale", pertoken_scale, "pertoken_scale_dtype", pertoken_scale_dtype
    )
    *batch1, m, k = x1.shape
    *batch2, k2, n = x2.shape
    if k != k2:
        raise ValueError(f"x2 has {k2} rows, x1 has {k} columns; both are K and must be equal")
    _checks.shape("pertoken_scale", pertoken_scale, (*batch1, m, _pairs(k), 2), "[..., M, ceil(K / 64), 2]")
    _checks.shape("scale", scale, (*batch2, _pairs(k), n, 2), "[..., ceil(K / 64), N, 2]")
    if batch1 != batch2:
        try:
            torch.broadcast_shapes(batch1, batch2)
        except RuntimeError:
            raise ValueError(
                f"x2 has leading dimensions {batch2}, which do not broadcast with those of x1, {batch1}"
            ) from None
    if bias is not None:
        _checks.dtype("bias", bias, (torch.float32,))
        if bias.dim() == 3:
            if max(len(batch1), len(batch2)) != 1:
                raise ValueError(
                    f"bias has 3 dimensions and the result {max(x1.dim(), x2.dim())}; use shape [N]"
                )
            _checks.shape("bias", bias, (max(*batch1, *batch2), 1, n), "[batch, 1, N]")
        else:
            _checks.shape("bias", bias, (n,), "[N]")
    return _quant_matmul(x1, x2, scale, pertoken_scale, bias, dtype)


def _only(argument: str, tensors: Sequence[Tensor] | None) -> Tensor:
    if isinstance(tensors, Tensor) or tensors is None or len(tensors) != 1:
        found = (
            "a tensor" if isinstance(tensors, Tensor) else "None" if tensors is None else f"{len(tensors)}"
        )
        raise ValueError(f"{argument} must be a list of exactly one tensor, got {found}")
    return tensors[0]


def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: None = None,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    output_dtype: torch.dtype | int | None = None,
    scale_dtype: torch.dtype | int | None = None,
    per_token_scale_dtype: torch.dtype | int | None = None,
) -> list[Tensor]:
    """One matmul for each group of rows (``group_type=0``) or of the contracted axis (``group_type=2``).

    ``group_type=0`` (forward, input gradient): ``out[group g] = x[group g] @ weight[g]``, with x ``[T, K]``,
    weight ``[G, K, N]``, scale ``[G, ceil(K / 64), N, 2]``, per_token_scale ``[T, ceil(K / 64), 2]``, result
    ``[T, N]``.

    ``group_type=2`` (weight gradient): ``out[g] = x[:, group g] @ weight[group g]``, with x ``[M, T]`` (the
    transposed view of codes from `grouped_dynamic_mx_quant`), weight ``[T, N]`` (from the same), scale ``[T
    // 64 + G, N, 2]``, per_token_scale ``[M, T // 64 + G, 2]`` (``mxscale.transpose(0, 1)``), result ``[G, M,
    // N]``.

    Groups may be empty: their result has no rows, or is exactly 0. ``group_list`` may cover less than T; the
    rows beyond it are not read, and are 0 in the result of ``group_type=0`` (the NPU leaves them unwritten).

    Args:
        x, weight: lists of one tensor, E4M3 or E5M2.
        bias: None.
        scale, per_token_scale: lists of one tensor, uint8 or ``torch.float8_e8m0fnu``: scales of weight and
            of x.
        group_list: ``[G]``, int64 (or int32): cumulative ends (``group_list_type=0``) or counts (1).
        split_item: 2 or 3, which mean the same: one result tensor. (0 and 1, one tensor a group, are not part
            of MX.)
        group_type: 0 or 2.
        group_list_type: 0 or 1.
        output_dtype: bf16 (15), fp16 (5) or fp32 (6). Required.
        scale_dtype, per_token_scale_dtype: ``torch.float8_e8m0fnu``, 293 or None.

    Returns:
        A list of one tensor of ``output_dtype``.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_grouped_matmul``; aclnnGroupedMatmulV5 (MX on Ascend 950, hicann/ops-transformer).
    """
    _checks.choice("bias", bias, (None,))
    _checks.choice("split_item", split_item, (2, 3))
    _checks.choice("group_type", group_type, (0, 2))
    _checks.choice("group_list_type", group_list_type, (0, 1))
    x, weight = _only("x", x), _only("weight", weight)
    _checks.elements("x", x)
    _checks.elements("weight", weight)
    dtype = _checks.output_dtype("output_dtype", output_dtype)
    scale = _checks.scales("scale", _only("scale", scale), "scale_dtype", scale_dtype)
    per_token_scale = _checks.scales(
        "per_token_scale",
        _only("per_token_scale", per_token_scale),
        "per_token_scale_dtype",
        per_token_scale_dtype,
    )
    _checks.group_list("group_list", group_list)
    _checks.dims("x", x, 2, 2)
    if group_type == 2:
        _checks.dims("weight", weight, 2, 2)
        _check_split_k(
            "x", x, "weight", weight, "per_token_scale", per_token_scale, "scale", scale, group_list
        )
    else:
        _checks.dims("weight", weight, 3, 3)
        (rows, k), (groups, k2, n) = x.shape, weight.shape
        if k != k2:
            raise ValueError(f"weight has shape {list(weight.shape)} [G, K, N], but x has K={k} columns")
        _checks.shape("group_list", group_list, (groups,), "[G], one entry for each weight")
        _checks.shape("per_token_scale", per_token_scale, (rows, _pairs(k), 2), "[T, ceil(K / 64), 2]")
        _checks.shape("scale", scale, (groups, _pairs(k), n, 2), "[G, ceil(K / 64), N, 2]")
    return [
        _grouped_matmul(x, weight, scale, per_token_scale, group_list, group_type, group_list_type, dtype)
    ]


def _check_split_k(
    name1: str,
    x1: Tensor,
    name2: str,
    x2: Tensor,
    scale1_name: str,
    scale1: Tensor,
    scale2_name: str,
    scale2: Tensor,
    group_list: Tensor,
) -> None:
    if x1.shape[1] != x2.shape[0]:
        raise ValueError(f"{name2} has {x2.shape[0]} rows, {name1} has {x1.shape[1]} columns; both must be T")
    rows = x2.shape[0] // layout.PAIR + group_list.shape[0]
    _checks.shape(scale1_name, scale1, (x1.shape[0], rows, 2), "[M, T // 64 + G, 2]")
    _checks.shape(scale2_name, scale2, (rows, x2.shape[1], 2), "[T // 64 + G, N, 2]")


def add_quant_matmul_(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    *,
    x1_scale: Tensor | None = None,
    group_sizes: Sequence[int] | None = None,
    x1_dtype: None = None,
    x2_dtype: None = None,
    x1_scale_dtype: torch.dtype | int | None = None,
    x2_scale_dtype: torch.dtype | int | None = None,
) -> Tensor:
    """``self += x1 @ x2`` in place: the weight gradient, accumulated in fp32 (``main_grad``).

    Args:
        self: ``[M, N]``, fp32.
        x1: ``[M, K]``, E4M3 or E5M2.
        x2: ``[K, N]``, E4M3 or E5M2.
        x2_scale: ``[ceil(K / 64), N, 2]``, uint8 or ``torch.float8_e8m0fnu``.
        x1_scale: ``[M, ceil(K / 64), 2]``. Required.
        group_sizes: ``[1, 1, 32]`` or None.
        x1_dtype, x2_dtype: None.
        x1_scale_dtype, x2_scale_dtype: ``torch.float8_e8m0fnu``, 293 or None.

    Returns:
        ``self``.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_add_quant_matmul_``; aclnnQuantBatchMatmulInplaceAdd and its golden.
    """
    x1_scale, x2_scale = _check_add(
        self, x1, x2, x1_scale, x2_scale, group_sizes, x1_dtype, x2_dtype, x1_scale_dtype, x2_scale_dtype
    )
    (m, k), (k2, n) = x1.shape, x2.shape
    if k != k2:
        raise ValueError(f"x2 has {k2} rows, x1 has {k} columns; both are K and must be equal")
    _checks.shape("self", self, (m, n), "[M, N]")
    _checks.shape("x1_scale", x1_scale, (m, _pairs(k), 2), "[M, ceil(K / 64), 2]")
    _checks.shape("x2_scale", x2_scale, (_pairs(k), n, 2), "[ceil(K / 64), N, 2]")
    _add_quant_matmul_(self, x1, x2, x2_scale, x1_scale)
    return self


def add_quant_gmm_(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    group_list: Tensor,
    *,
    x1_scale: Tensor | None = None,
    group_list_type: int = 0,
    group_sizes: Sequence[int] | None = None,
    x1_dtype: None = None,
    x2_dtype: None = None,
    x1_scale_dtype: torch.dtype | int | None = None,
    x2_scale_dtype: torch.dtype | int | None = None,
) -> Tensor:
    """``self[g] += x1[:, group g] @ x2[group g]`` in place: the experts' weight gradients, accumulated in
    fp32.

    An empty group leaves its ``self[g]`` as it is. Rows beyond the groups are not read.

    Args:
        self: ``[G, M, N]``, fp32.
        x1: ``[M, T]``, the transposed view of codes from `grouped_dynamic_mx_quant`.
        x2: ``[T, N]``, from the same.
        x2_scale: ``[T // 64 + G, N, 2]``, uint8 or ``torch.float8_e8m0fnu``.
        group_list: ``[G]``, int64 (or int32): cumulative ends (``group_list_type=0``) or counts (1).
        x1_scale: ``[M, T // 64 + G, 2]``. Required.
        group_list_type: 0 or 1.
        group_sizes: ``[1, 1, 32]`` or None.
        x1_dtype, x2_dtype: None.
        x1_scale_dtype, x2_scale_dtype: ``torch.float8_e8m0fnu``, 293 or None.

    Returns:
        ``self``.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_add_quant_gmm_``; aclnnQuantGroupedMatmulInplaceAdd (hicann/ops-transformer).
    """
    x1_scale, x2_scale = _check_add(
        self, x1, x2, x1_scale, x2_scale, group_sizes, x1_dtype, x2_dtype, x1_scale_dtype, x2_scale_dtype
    )
    _checks.choice("group_list_type", group_list_type, (0, 1))
    _checks.group_list("group_list", group_list)
    _check_split_k("x1", x1, "x2", x2, "x1_scale", x1_scale, "x2_scale", x2_scale, group_list)
    _checks.shape("self", self, (group_list.shape[0], x1.shape[0], x2.shape[1]), "[G, M, N]")
    _add_quant_gmm_(self, x1, x2, x2_scale, group_list, x1_scale, group_list_type)
    return self


def _check_add(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x1_scale: Tensor | None,
    x2_scale: Tensor,
    group_sizes: Sequence[int] | None,
    x1_dtype: None,
    x2_dtype: None,
    x1_scale_dtype: torch.dtype | int | None,
    x2_scale_dtype: torch.dtype | int | None,
) -> tuple[Tensor, Tensor]:
    """What `add_quant_matmul_` and `add_quant_gmm_` check alike; the scales as uint8."""
    _checks.group_sizes(group_sizes)
    _checks.choice("x1_dtype", x1_dtype, (None,))
    _checks.choice("x2_dtype", x2_dtype, (None,))
    _checks.dtype("self", self, (torch.float32,))
    for name, x in (("x1", x1), ("x2", x2)):
        _checks.elements(name, x)
        _checks.dims(name, x, 2, 2)
    return (
        _checks.scales("x1_scale", x1_scale, "x1_scale_dtype", x1_scale_dtype),
        _checks.scales("x2_scale", x2_scale, "x2_scale_dtype", x2_scale_dtype),
    )
