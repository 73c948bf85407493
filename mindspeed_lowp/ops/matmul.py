"""Products of quantized matrices, each with scales of its own, and such a product added to a matrix.

Results depend on values and shapes, never on memory layout: transposed views are fine, for codes and for
scales. Products accumulate in fp32 (the order of additions is the device's own; int8 accumulates in
integers), scales and bias act in fp32, and the result is rounded once. A NaN scale makes NaN of every result
that it contributes to.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mindspeed_lowp.formats import HIF8, INT8, FormatInfo
from mindspeed_lowp.ops import _checks, composed, operands
from mindspeed_lowp.ops._library import operator
from mindspeed_lowp.ops.gemm import Decoders
from mindspeed_lowp.ops.kernels import casts as kernels_casts
from mindspeed_lowp.ops.kernels import mx as kernels_mx
from mindspeed_lowp.ops.npu import matmul as npu
from mindspeed_lowp.ops.reference import casts as reference_casts
from mindspeed_lowp.ops.reference import mx as reference_mx
from mindspeed_lowp.ops.scaling import (
    ADDED,
    BLOCKS,
    MX,
    QUANT_MATMUL,
    TILES,
    VECTORS,
    Scaling,
    scaling_of,
)

REFERENCE = Decoders(reference_casts.decode, reference_mx.anti_mx_quant)
KERNELS = Decoders(kernels_casts.decode, kernels_mx.anti_mx_quant)


def composed_operator(schema: str, fake: Callable) -> torch._ops.OpOverload:
    """Register a matmul: on an NPU its own operator, elsewhere the device's decoding and GEMMs."""
    name = schema[: schema.index("(")]
    emulation = getattr(composed, name)
    return operator(
        schema,
        reference=partial(emulation, REFERENCE),
        kernel=partial(emulation, KERNELS),
        npu=getattr(npu, name),
        fake=fake,
    )


def _fake(x1, x2, scale, pertoken_scale, bias, output_dtype, x1_dtype, x2_dtype, group_sizes):
    shape = composed.product_shape(x1, x2, scale, pertoken_scale, scaling_of(group_sizes))
    return x1.new_empty(shape, dtype=output_dtype)


_quant_matmul = composed_operator(
    "quant_matmul(Tensor x1, Tensor x2, Tensor scale, Tensor pertoken_scale, Tensor? bias,"
    " ScalarType output_dtype, int x1_dtype, int x2_dtype, int[] group_sizes) -> Tensor",
    _fake,
)
_add_quant_matmul_ = composed_operator(
    "add_quant_matmul_(Tensor(a!) self, Tensor x1, Tensor x2, Tensor x2_scale, Tensor x1_scale,"
    " int x1_dtype, int x2_dtype, int[] group_sizes) -> ()",
    lambda self, x1, x2, x2_scale, x1_scale, x1_dtype, x2_dtype, group_sizes: None,
)


@_checks.names_arguments
def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | int | None = None,
    x1_dtype: torch.dtype | int | None = None,
    x2_dtype: torch.dtype | int | None = None,
    pertoken_scale_dtype: torch.dtype | int | None = None,
    scale_dtype: torch.dtype | int | None = None,
    group_sizes: Sequence[int] | None = None,
) -> Tensor:
    """``x1 @ x2 (+ bias)`` of quantized operands.

    ``group_sizes`` says how they were quantized, and with it the shapes of the scales; these begin with the
    leading dimensions of their operand, except those of None:

    | group_sizes         | pertoken_scale (of x1)           | scale (of x2)                    |
    |---------------------|----------------------------------|----------------------------------|
    | ``[1, 1, 32]``      | ``M, ceil(K / 64), 2``, E8M0     | ``ceil(K / 64), N, 2``, E8M0     |
    | None                | ``1`` or ``M``, fp32             | ``1`` or ``N``, fp32             |
    | ``[1, 128, 128]``   | ``M, ceil(K / 128)``             | ``ceil(K / 128), ceil(N / 128)`` |
    | ``[128, 128, 128]`` | ``ceil(M / 128), ceil(K / 128)`` | ``ceil(K / 128), ceil(N / 128)`` |

    MX scales (``[1, 1, 32]``) are for FP8 and FP4 operands; the others, which are fp32, for FP8, HiFloat8 and
    (not ``[128, 128, 128]``) int8.

    With None the sums are multiplied by ``scale``, then by ``pertoken_scale``, then the bias is added. But
    with one scale on each side (``[1]``, ``[1]``; not int8) and no bias the hardware multiplies the two first
    and applies the upper 19 bits of their fp32 product (sign, exponent, ten bits of mantissa), and so does
    this.

    With blocks of 128 the products of each block of K are summed, multiplied by the product of their two
    scales, and added up in fp32, block after block.

    Args:
        x1: ``[..., M, K]``, 2 to 6 dimensions: E4M3 or E5M2; int8; or uint8, which is HiFloat8 with
            ``x1_dtype=290`` and FP4 E2M1 with 296.
        x2: ``[..., K, N]``, of the same kind as x1 (E4M3 and E5M2 may be mixed); leading dimensions broadcast
            with those of ``x1``.
            FP4 codes are two a byte, along K (``[M, K / 2]``, ``[K / 2, N]``) or along the other axis (``[M /
            2, K]``, ``[K, N / 2]``); the shapes of the scales tell which. (torch_npu takes the axis that is
            contiguous in memory; the two agree for codes from the quantizers and their transposed views.) K
            must be above 2.
        scale: scales of ``x2``. E8M0 is uint8 or ``torch.float8_e8m0fnu``.
        offset: None.
        pertoken_scale: scales of ``x1``. Required.
        bias: fp32, ``[N]``, or ``[batch, 1, N]`` with one leading dimension; added to the scaled fp32 sum.
            Not with blocks of 128 of FP8 or HiFloat8.
        output_dtype: bf16 (15), fp16 (5) or fp32 (6). Required. int8 operands: bf16 or fp16, with
            ``group_sizes=[1, 128, 128]`` bf16.
        x1_dtype, x2_dtype: 290 or 296 for uint8 operands; None for others (their dtype says it).
        pertoken_scale_dtype, scale_dtype: ``torch.float8_e8m0fnu`` or 293 for E8M0 scales, else None.
        group_sizes: as above.

    Returns:
        ``[..., M, N]`` of ``output_dtype``.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_quant_matmul``; aclnnQuantMatmulV5 (T-T, T-C, K-T, K-C, G-B, B-B and MX on Ascend 950) and
    the goldens of quant_batch_matmul_v3 and _v4, which agree. torch_npu's static scales (int64) and FP8 with
    FP4 are not here.
    """
    if offset is not None:
        raise ValueError("offset is not supported; leave it out")
    info1 = operands.element_format("x1", x1, x1_dtype)
    info2 = operands.element_format("x2", x2, x2_dtype)
    if group_sizes is None and scale.dtype in _checks.E8M0_BYTES:
        raise ValueError(
            f"group_sizes=None is for fp32 scales, and scale has dtype {scale.dtype}; with MX scales, use "
            f"{list(MX.group_sizes)}"
        )
    scaling = operands.by_group_sizes(group_sizes, QUANT_MATMUL)
    operands.formats(QUANT_MATMUL, scaling, "x1", info1, "x2", info2)
    _checks.dims("x1", x1, 2, 6)
    _checks.dims("x2", x2, 2, 6)
    dtype = _checks.output_dtype("output_dtype", output_dtype)
    scale = operands.scale("scale", scale, scale_dtype, scaling)
    pertoken_scale = operands.scale("pertoken_scale", pertoken_scale, pertoken_scale_dtype, scaling)
    if scaling is MX and (scale_dtype is None or pertoken_scale_dtype is None):
        which = "scale_dtype" if scale_dtype is None else "pertoken_scale_dtype"
        raise ValueError(f"{which}=None is not supported with MX scales; use 293 or torch.float8_e8m0fnu")
    left = operands.Side("x1", x1, info1, "pertoken_scale", pertoken_scale)
    right = operands.Side("x2", x2, info2, "scale", scale)
    m, k, n = operands.product_shape(scaling, left, right)
    operands.scale_shapes(scaling, left, right, m, k, n)
    batch = _check_batch(x1, x2)
    if info1 is INT8:
        _check_int8(scaling, m, pertoken_scale, dtype, output_dtype)
    if bias is not None:
        _check_bias(bias, scaling, info1, batch, n)
    return _quant_matmul(
        x1, x2, scale, pertoken_scale, bias, dtype, info1.npu_code, info2.npu_code, scaling.group_sizes
    )


def _check_batch(x1: Tensor, x2: Tensor) -> torch.Size:
    """The leading dimensions of the product."""
    batch1, batch2 = x1.shape[:-2], x2.shape[:-2]
    if batch1 == batch2:
        return batch1
    try:
        return torch.broadcast_shapes(batch1, batch2)
    except RuntimeError:
        raise ValueError(
            f"x2 has leading dimensions {list(batch2)}, which do not broadcast with those of x1, "
            f"{list(batch1)}"
        ) from None


def _check_int8(
    scaling: Scaling, m: int, pertoken_scale: Tensor, dtype: torch.dtype, output_dtype: object
) -> None:
    accepted = (torch.bfloat16,) if scaling is TILES else (torch.bfloat16, torch.float16)
    if dtype not in accepted:
        choices = " or ".join(map(str, accepted))
        raise ValueError(f"output_dtype={output_dtype!r} is not supported for int8 operands; use {choices}")
    if scaling is VECTORS and pertoken_scale.shape[0] != m:
        raise ValueError(
            f"pertoken_scale has shape {list(pertoken_scale.shape)}, expected [{m}] ([M]: int8 operands have "
            "a scale for each row of x1)"
        )


def _check_bias(bias: Tensor, scaling: Scaling, info: FormatInfo, batch: torch.Size, n: int) -> None:
    if scaling in (TILES, BLOCKS) and info is not INT8:
        raise ValueError(f"bias is not supported with {scaling.name} scales of {info.name}; leave it out")
    _checks.dtype("bias", bias, (torch.float32,))
    if bias.dim() == 3:
        if len(batch) != 1:
            raise ValueError(f"bias has 3 dimensions and the result {len(batch) + 2}; use shape [N]")
        _checks.shape("bias", bias, (batch[0], 1, n), "[batch, 1, N]")
    else:
        _checks.shape("bias", bias, (n,), "[N]")


@_checks.names_arguments
def add_quant_matmul_(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    *,
    x1_scale: Tensor | None = None,
    group_sizes: Sequence[int] | None = None,
    x1_dtype: torch.dtype | int | None = None,
    x2_dtype: torch.dtype | int | None = None,
    x1_scale_dtype: torch.dtype | int | None = None,
    x2_scale_dtype: torch.dtype | int | None = None,
) -> Tensor:
    """``self += x1 @ x2`` in place: the weight gradient, accumulated in fp32 (``main_grad``).

    ``self`` becomes what ``self + quant_matmul(..., output_dtype=torch.float32)`` is, to the bit, in the two
    modes that the hardware has:

    | operands    | x1_scale                       | x2_scale                       | group_sizes    |
    |-------------|--------------------------------|--------------------------------|----------------|
    | E4M3, E5M2  | ``[M, ceil(K / 64), 2]``, E8M0 | ``[ceil(K / 64), N, 2]``, E8M0 | ``[1, 1, 32]`` |
    | HiFloat8    | ``[1]``, fp32                  | ``[1]``, fp32                  | None           |

    Args:
        self: ``[M, N]``, fp32.
        x1: ``[M, K]``, E4M3 or E5M2, or uint8 with ``x1_dtype=290``.
        x2: ``[K, N]``, the same.
        x2_scale, x1_scale: as above; E8M0 is uint8 or ``torch.float8_e8m0fnu``. Both are required.
        group_sizes: as above; None is taken as ``[1, 1, 32]`` where scales are E8M0.
        x1_dtype, x2_dtype: 290 for HiFloat8, else None.
        x1_scale_dtype, x2_scale_dtype: ``torch.float8_e8m0fnu``, 293 or None.

    Returns:
        ``self``.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_add_quant_matmul_``; aclnnQuantBatchMatmulInplaceAdd. Its kernel keeps the upper 19 bits of
    the product of two HiFloat8 scales, as `quant_matmul` does; its golden does not, and would not see it
    (relative tolerance 0.001, the bits cut off are below 2 ** -10). We follow the hardware.
    """
    _checks.accumulator("self", self)
    info1 = operands.element_format("x1", x1, x1_dtype)
    info2 = operands.element_format("x2", x2, x2_dtype)
    scaling = operands.by_group_sizes(group_sizes, ADDED, VECTORS if info1 is HIF8 else MX)
    operands.formats(ADDED, scaling, "x1", info1, "x2", info2)
    _checks.dims("x1", x1, 2, 2)
    _checks.dims("x2", x2, 2, 2)
    x1_scale = operands.scale("x1_scale", x1_scale, x1_scale_dtype, scaling)
    x2_scale = operands.scale("x2_scale", x2_scale, x2_scale_dtype, scaling)
    left = operands.Side("x1", x1, info1, "x1_scale", x1_scale)
    right = operands.Side("x2", x2, info2, "x2_scale", x2_scale)
    m, k, n = operands.product_shape(scaling, left, right)
    if scaling is MX:
        operands.scale_shapes(scaling, left, right, m, k, n)
    else:
        _checks.shape("x1_scale", x1_scale, (1,), "one scale for x1")
        _checks.shape("x2_scale", x2_scale, (1,), "one scale for x2")
    _checks.shape("self", self, (m, n), "[M, N]")
    _add_quant_matmul_(self, x1, x2, x2_scale, x1_scale, info1.npu_code, info2.npu_code, scaling.group_sizes)
    return self
