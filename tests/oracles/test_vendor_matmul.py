"""The vendor's golden matmuls, run from a checkout of hicann/ops-nn that OPS_NN_PATH names.

Over the vendor's own case lists (`*_st.csv`) and a sweep of ours, with two kinds of data. Small integers (and
MX scales near 1), whose sums are exact in any order: scales, their truncation to 19 bits, bias and rounding
must then agree to the last byte. And the list's own range of numbers: both results must be within the error
of fp32 accumulation.
"""

import csv
from ast import literal_eval
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E2M1, E4M3, E5M2, HIF8, INT8, FormatInfo
from tests.ops.data import assert_same_bytes
from tests.ops.test_matmul import CAST, DECODE, assert_close_to_exact, blockwise, mx_matmul, names, upper_19
from tests.oracles.vendor import CHECKOUT, INPUT, as_numpy, golden, needs_checkout

pytestmark = needs_checkout

FORMATS = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "hifloat8": HIF8, "float4_e2m1": E2M1, "int8": INT8}
ASSETS = "matmul/quant_batch_matmul_{}/tests/assets"


class Case(NamedTuple):
    """A product, shapes as in the vendor's list: before the transposition of what is transposed."""

    x1: tuple[int, ...]
    x2: tuple[int, ...]
    formats: tuple[FormatInfo, FormatInfo]
    scales: tuple[tuple[int, ...], tuple[int, ...]]  # of x1 and of x2
    kind: str  # dtype of the scales
    bias: tuple[int, ...] | None
    output: str
    transposed: tuple[bool, bool] = (False, False)
    group_size: int = 0
    largest: float = 3.0

    @property
    def group_sizes(self) -> list[int] | None:
        if self.kind == "float8_e8m0":
            return [1, 1, 32]
        sizes = [self.group_size >> shift & 0xFFFF for shift in (32, 16, 0)]
        return sizes if any(sizes) else None


#: Where the arguments stand in the lists: x1, x2, scale of x1, scale of x2, bias.
ORDER = {
    "quant_batch_matmul_v3": (0, 1, 5, 2, 4),
    "quant_batch_matmul_v4": (0, 1, 3, 4, 2),
    "aclnnQuantMatmulV3": (0, 1, None, 2, 4),
    "aclnnQuantMatmulV4": (0, 1, 4, 2, 5),
    "aclnnQuantMatmulV5": (0, 1, 2, 3, 8),
    "torch_npu.npu_quant_matmul": (0, 1, 4, 2, 5),
}
OUTPUT_CODE = {5: "float16", 15: "bfloat16", 6: "float32"}


def read_case(row: dict[str, str]) -> Case | str:
    """The case of a row, or why this package does not have it."""
    order = ORDER[row.get("op_name") or row["api_name"]]
    shapes = literal_eval(row.get("input_ori_shapes") or row["tensor_view_shapes"])
    dtypes = literal_eval(row.get("input_dtypes") or row["tensor_dtypes"])
    attributes = literal_eval(row["attributes"])
    if "output_dtypes" in row:
        output = literal_eval(row["output_dtypes"])
        output = output if isinstance(output, str) else output[0]
    else:
        output = OUTPUT_CODE.get(attributes.get("output_dtype")) or dtypes[-1]

    def pick(values, place):
        return None if place is None else values[place]

    def cut(shape):
        """At most two entries of each leading dimension: the goldens are slow."""
        leading = 0 if shape is None else len(shape) - 2
        return shape if leading < 1 else (*(min(size, 2) for size in shape[:leading]), *shape[leading:])

    x1, x2, scale1, scale2, bias = (pick(shapes, place) for place in order)
    if "float8_e8m0" not in dtypes:
        x1, x2, scale1, scale2 = (cut(shape) for shape in (x1, x2, scale1, scale2))
    kinds = [pick(dtypes, place) for place in order]
    if scale1 is None:
        return "static scales, without one of x1"
    if kinds[0] not in FORMATS or kinds[1] not in FORMATS:
        return f"{kinds[0]} x {kinds[1]}"
    if (kinds[0] == "float4_e2m1") != (kinds[1] == "float4_e2m1"):
        return "FP8 x FP4"
    if kinds[2] != kinds[3]:
        return f"scales {kinds[2]} and {kinds[3]}"
    if bias is not None and kinds[4] != "float32":
        return f"bias {kinds[4]}"
    bounds = eval(row["input_data_ranges"])
    return Case(
        x1,
        x2,
        (FORMATS[kinds[0]], FORMATS[kinds[1]]),
        (scale1, scale2),
        kinds[3],
        bias,
        output,
        tuple(
            bool(attributes.get(a, attributes.get(b)))
            for a, b in (("transpose_x1", "transposeX1"), ("transpose_x2", "transposeX2"))
        ),
        attributes.get("group_size", attributes.get("groupSize", 0)),
        float(max(abs(v) for v in bounds[0])),
    )


def vendor_lists() -> list:
    """The lists' cases, those that this package does not have as skips that say why."""
    cases = {}
    for version in ("v3", "v4"):
        for path in sorted((CHECKOUT / f"matmul/quant_batch_matmul_{version}/tests/st/arch35").glob("*.csv")):
            with path.open() as file:
                cases |= {
                    f"{path.stem}: {row['testcase_name']}": read_case(row) for row in csv.DictReader(file)
                }
    return [
        pytest.param(case, id=name, marks=[pytest.mark.skip(reason=f"not supported: {case}")])
        if isinstance(case, str)
        else pytest.param(case, id=name)
        for name, case in cases.items()
    ]


def operand(shape: tuple[int, ...], info: FormatInfo, integers: bool, largest: float, seed: int) -> Tensor:
    """Codes; FP4 two a byte along the last axis."""
    generator = torch.Generator().manual_seed(seed)
    if integers:
        x = torch.randint(-2, 3, shape, generator=generator).float()
    else:
        x = (torch.rand(shape, generator=generator) * 2 - 1) * largest
    return (ops.cast_e2m1 if info is E2M1 else CAST[info])(x)


def scale_tensor(shape: tuple[int, ...], kind: str, integers: bool, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "float8_e8m0":
        return torch.randint(126, 129, shape, generator=generator, dtype=torch.uint8)
    return (torch.rand(shape, generator=generator) * 2 - 1) * 5


def codes_as_numpy(x: Tensor, info: FormatInfo) -> np.ndarray:
    import en_dtypes

    if info is E2M1:
        pairs = torch.stack([x & 0xF, x >> 4], dim=-1).flatten(-2)
        return pairs.contiguous().numpy().view(en_dtypes.float4_e2m1)
    oracles = {
        E4M3: ml_dtypes.float8_e4m3fn,
        E5M2: ml_dtypes.float8_e5m2,
        HIF8: en_dtypes.hifloat8,
        INT8: np.int8,
    }
    return x.contiguous().view(torch.uint8).numpy().view(oracles[info])


def scales_as_numpy(x: Tensor) -> np.ndarray:
    import en_dtypes

    return x.contiguous().numpy().view(en_dtypes.float8_e8m0 if x.dtype == torch.uint8 else np.float32)


def turn(x: Tensor, first: int = -2) -> Tensor:
    return x.transpose(first, first + 1)


def both_results(case: Case, integers: bool) -> tuple[Tensor, Tensor, tuple]:
    """Ours, the golden's, and what `assert_close_to_exact` needs to judge them."""
    info1, info2 = case.formats
    x1 = operand(case.x1, info1, integers, case.largest, 0)
    x2 = operand(case.x2, info2, integers, case.largest, 1)
    scale1, scale2 = (scale_tensor(s, case.kind, integers, 2 + i) for i, s in enumerate(case.scales))
    bias = None if case.bias is None else torch.randn(case.bias, generator=torch.Generator().manual_seed(4))
    expected = run_golden(case, x1, x2, scale1, scale2, bias)

    mx, blocks = case.kind == "float8_e8m0", case.group_sizes not in (None, [1, 1, 32])
    if case.transposed[0]:
        x1 = turn(x1)
        scale1 = turn(scale1, -3) if mx else turn(scale1) if blocks else scale1
    if case.transposed[1]:
        x2 = turn(x2)
        scale2 = turn(scale2, -3) if mx else turn(scale2) if blocks else scale2
    arguments = {"bias": bias, "output_dtype": INPUT[case.output], **names(info1, info2)}
    if mx:
        actual = mx_matmul(x1, scale1, x2, scale2, **arguments)
        return actual, expected, (*mx_values(x1, scale1, x2, scale2, info1, info2), 1.0)
    actual = ops.quant_matmul(
        x1, x2, scale2, pertoken_scale=scale1, group_sizes=case.group_sizes, **arguments
    )
    a, b = DECODE[info1](x1).double(), DECODE[info2](x2).double()
    if blocks:
        return actual, expected, (*blockwise(a, b, scale1, scale2, case.group_sizes[0]), 1.0)
    both = scale1.double()[:, None] * scale2.double()
    if both.numel() == 1 and bias is None and info1 is not INT8:
        both = torch.from_numpy(upper_19((scale1 * scale2).numpy())).double()
    return actual, expected, (a, b, both)


def mx_values(x1, scale1, x2, scale2, info1, info2) -> tuple[Tensor, Tensor]:
    """Exact values of operands whose FP4 codes, if any, are packed along K."""
    a = ops.anti_mx_quant(x1.contiguous(), scale1, dst_type=6, src_type=info1.npu_code)
    b = ops.anti_mx_quant(
        x2.transpose(-1, -2).contiguous(), scale2.transpose(-2, -3), dst_type=6, src_type=info2.npu_code
    )
    return a.double(), b.double().transpose(-1, -2)


def run_golden(case: Case, x1, x2, scale1, scale2, bias) -> Tensor:
    info1, info2 = case.formats
    operands = codes_as_numpy(x1, info1), codes_as_numpy(x2, info2)
    m, n = (x1.shape[-1] if case.transposed[0] else x1.shape[-2]), case.x2[-2 if case.transposed[1] else -1]
    shape = (*np.broadcast_shapes(case.x1[:-2], case.x2[:-2]), case.x1[-1] if case.transposed[0] else m, n)
    arguments = {
        "transpose_x1": case.transposed[0],
        "transpose_x2": case.transposed[1],
        "dtype": 1,
        "group_size": case.group_size,
        "output_dtypes": [case.output],
        "output_ori_shapes": (shape,),
    }
    scale1, scale2 = scales_as_numpy(scale1), scales_as_numpy(scale2)
    bias = None if bias is None else bias.numpy()
    if info1 is INT8 and case.group_size:
        compute = golden(f"{ASSETS.format('v4')}/qbmmv4_kernel_golden.py", "qbmmv4_kernel_compute")
        (result,) = compute(*operands, bias, scale1, scale2, **arguments)
    else:
        compute = golden(f"{ASSETS.format('v3')}/qbmmv3_kernel_golden.py", "qbmmv3_kernel_compute")
        (result,) = compute(*operands, scale2, None, bias, scale1, **arguments)
    return from_numpy(result)


def from_numpy(x: np.ndarray) -> Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x))


def check(case: Case) -> None:
    actual, expected, _ = both_results(case, integers=True)
    assert_same_bytes(actual + 0.0, expected + 0.0)  # the sign of a sum of zeros is that of their order
    actual, expected, exact = both_results(case, integers=False)
    bias = (
        0.0
        if case.bias is None
        else torch.randn(case.bias, generator=torch.Generator().manual_seed(4)).double()
    )
    a, b, scale = exact
    for result in (actual, expected):
        assert_close_to_exact(result, a, b, bias, scale)


@pytest.mark.parametrize("case", vendor_lists())
def test_vendor_cases(case):
    check(case)


def sweep() -> list:
    cases = {}
    pairs = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (HIF8, HIF8)]
    for m, k, n in ((64, 64, 64), (33, 130, 17), (1, 1, 1), (5, 320, 40)):
        for pair in pairs:
            formats = " x ".join(info.name for info in pair)
            for output in INPUT:
                for bias in (None, (n,)):
                    for scales in (((1,), (1,)), ((1,), (n,)), ((m,), (1,)), ((m,), (n,))):
                        name = f"{formats} {m}x{k}x{n} {scales} {output} {'bias' if bias else ''}"
                        cases[name] = Case((m, k), (k, n), pair, scales, "float32", bias, output)
                    if HIF8 not in pair:
                        pairs_of = -(-k // 64)
                        scales = ((m, pairs_of, 2), (pairs_of, n, 2))
                        name = f"{formats} {m}x{k}x{n} MX {output} {'bias' if bias else ''}"
                        cases[name] = Case((m, k), (k, n), pair, scales, "float8_e8m0", bias, output)
                for rows in (1, 128):
                    scales = ((-(-m // rows), -(-k // 128)), (-(-k // 128), -(-n // 128)))
                    size = rows << 32 | 128 << 16 | 128
                    name = f"{formats} {m}x{k}x{n} {rows}x128 {output}"
                    cases[name] = Case(
                        (m, k), (k, n), pair, scales, "float32", None, output, (False, False), size
                    )
    return [pytest.param(case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize("case", sweep())
def test_sweep(case):
    check(case)


# ---- added to a matrix ----


def add_golden(x1, x2, scale1, scale2, total, info: FormatInfo) -> Tensor:
    add = golden(
        "matmul/quant_batch_matmul_inplace_add/tests/assets/golden.py",
        "quant_batch_matmul_inplace_add_golden",
    )
    (result,) = add(
        codes_as_numpy(x1, info),
        codes_as_numpy(x2, info),
        scales_as_numpy(scale2),
        as_numpy(total),
        scales_as_numpy(scale1),
        output_dtypes=["float32"],
    )
    return torch.from_numpy(result)


@pytest.mark.parametrize("info", [E4M3, E5M2], ids=lambda info: info.name)
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 192, 17)], ids=str)
def test_add_quant_matmul(shape, info):
    """The golden does not undo the interleaving of x2's scales: it gets them as [K / 32, N]."""
    m, k, n = shape
    for integers in (True, False):
        a, b = operand((m, k), info, integers, 3.0, 0), operand((k, n), info, integers, 3.0, 1)
        scale1 = scale_tensor((m, -(-k // 64), 2), "float8_e8m0", integers, 2)
        scale2 = scale_tensor((-(-k // 64), n, 2), "float8_e8m0", integers, 3)
        total = torch.randint(-9, 9, (m, n)).float() if integers else torch.randn(m, n)
        flat = scale2.transpose(1, 2).reshape(-1, n)
        expected = add_golden(a, b, scale1, flat, total, info)
        actual = ops.add_quant_matmul_(total.clone(), a, b, scale2, x1_scale=scale1)
        if integers:
            assert_same_bytes(actual, expected)
        for result in (actual, expected):
            assert_close_to_exact(result, *mx_values(a, scale1, b, scale2, info, info), total.double())


@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 192, 17), (1, 1, 1)], ids=str)
def test_add_quant_matmul_of_hifloat8(shape):
    """The golden multiplies by the whole product of the scales, the kernel and we by its upper 19 bits: with
    scales of few bits they agree to the byte, with others within the vendor's tolerance."""
    m, k, n = shape
    a, b = operand((m, k), HIF8, True, 3.0, 0), operand((k, n), HIF8, True, 3.0, 1)
    total = torch.randint(-9, 9, (m, n)).float()
    pair = {"x1_dtype": 290, "x2_dtype": 290}
    for scale1, scale2, whole in ((1.25, 0.75, True), (1.2345678, 0.7654321, False)):
        scale1, scale2 = torch.tensor([scale1]), torch.tensor([scale2])
        expected = add_golden(a, b, scale1, scale2, total, HIF8)
        actual = ops.add_quant_matmul_(total.clone(), a, b, scale2, x1_scale=scale1, **pair)
        if whole:
            assert_same_bytes(actual, expected)
        else:
            torch.testing.assert_close(actual - total, expected - total, rtol=1e-3, atol=1e-3)
