"""The vendor's goldens of the quantizers with fp32 scales: equal bytes over their cases and a sweep of ours.

Where a golden leaves NaN or an overflow to ml_dtypes' or en_dtypes' cast, its value before the cast is taken
and converted as the vendor's kernels do, saturating and with NaN to +0. Where it rounds to 8 decimals first,
as no kernel and no document does, that is taken out; by the last test, ordinary tensors do not notice.
"""

import csv
import math
from ast import literal_eval
from collections.abc import Callable
from unittest.mock import patch

import en_dtypes
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E4M3, E5M2, HIF8, INT8, FormatInfo, code_values
from tests.ops.data import FLOATS, FLOATS_AND_FP32, normal, wide_range
from tests.ops.test_scaled_quant import saturating_cast
from tests.oracles.vendor import CHECKOUT, INPUT, LARGEST, as_numpy, golden, needs_checkout

pytestmark = needs_checkout

CODE = {INT8: 2, HIF8: 34, E5M2: 35, E4M3: 36}
NAME = {INT8: "int8", HIF8: "hifloat8", E5M2: "float8_e5m2", E4M3: "float8_e4m3fn"}
LIBRARY = {HIF8: en_dtypes, E5M2: ml_dtypes, E4M3: ml_dtypes}
FORMATS = [pytest.param(info, id=info.name) for info in CODE]
MODES = ["pertoken", "perchannel", "pertensor"]
round_ = np.round


def quantizer(name: str) -> Callable:
    return golden(f"quant/{name}/tests/assets/golden.py", f"{name}_golden")


def without_8_decimals():
    return patch.object(np, "round", lambda x, decimals=0: x if decimals == 8 else round_(x, decimals))


def codes_of(run: Callable[[], np.ndarray], info: FormatInfo) -> Tensor:
    """The codes of a golden, those that are not finite by the saturating conversion of what was cast."""
    codes = torch.from_numpy(np.ascontiguousarray(run()).view(np.uint8))
    if info == INT8:
        return codes
    with patch.object(LIBRARY[info], NAME[info], np.float32):
        value = run()
    special = ~torch.tensor(code_values(info)).isfinite()[codes.long()]
    return torch.where(special, saturating_cast(value.astype(np.float32), info), codes)


def assert_equal(actual: Tensor, expected: Tensor, compared: Tensor | None = None) -> None:
    different = actual.view(torch.uint8) != expected
    if compared is not None:
        different &= compared
    assert different.sum() == 0, f"{int(different.sum())} of {different.numel()} codes differ"


def check_dynamic(
    x: Tensor, smooth: Tensor | None, ends: list[int] | None, info: FormatInfo, mode: str
) -> None:
    def run() -> list[np.ndarray]:
        return quantizer("dynamic_quant_v2")(
            as_numpy(x),
            None if smooth is None else as_numpy(smooth),
            None if ends is None else np.array(ends),
            dst_type=CODE[info],
            is_symmetrical=True,
            quant_mode=mode,
            output_dtypes=(NAME[info],),
        )

    y, scale = ops.dynamic_quant(
        x,
        smooth_scales=smooth,
        group_index=None if ends is None else torch.tensor(ends),
        dst_type=info.npu_code,
        quant_mode=mode,
    )
    expected = torch.from_numpy(np.asarray(run()[1])).reshape(scale.shape)
    torch.testing.assert_close(scale, expected, rtol=0, atol=0, equal_nan=True)
    compared = None
    if info == INT8:  # what numpy makes int8 of NaN and of numbers beyond its range is not defined
        each = scale.unsqueeze(-1 if mode == "pertoken" else -2) if mode != "pertensor" else scale
        compared = (each.isfinite() & (each > 1e-37)).expand(x.shape)
    assert_equal(y, codes_of(lambda: run()[0].reshape(x.shape), info), compared)


def check_block(x: Tensor, info: FormatInfo, min_scale: float, block: tuple[int, int]) -> None:
    def run() -> tuple[np.ndarray, np.ndarray]:
        return quantizer("dynamic_block_quant")(
            as_numpy(x),
            min_scale=min_scale,
            dst_type=CODE[info],
            row_block_size=block[0],
            col_block_size=block[1],
        )

    y, scale = our_block(x, info, min_scale, block)
    with without_8_decimals():
        codes, expected = run()
        torch.testing.assert_close(scale, torch.from_numpy(expected), rtol=0, atol=0)
        assert_equal(y, torch.from_numpy(codes.view(np.uint8)))


def our_block(x: Tensor, info: FormatInfo, min_scale: float, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return ops.dynamic_block_quant(
        x,
        min_scale=min_scale,
        round_mode="round" if info == HIF8 else "rint",
        dst_type=info.npu_code,
        row_block_size=block[0],
        col_block_size=block[1],
    )


def check_static(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, info: FormatInfo, axis: int, div_mode: bool
) -> None:
    shape = [-1 if i == axis else 1 for i in range(x.dim())]
    operands = [None if t is None else as_numpy(t).reshape(shape) for t in (scales, zero_points)]

    def run() -> np.ndarray:
        if div_mode:
            return quantizer("quantize")(
                as_numpy(x), *operands, dtype=None, axis=axis, output_dtypes=(NAME[info],)
            )
        return quantizer("ascend_quant_v2")(
            as_numpy(x), *operands, dst_type=CODE[info], axis=axis, output_dtypes=(NAME[info],)
        )

    given = axis if div_mode else axis - x.dim()
    y = ops.quantize(x, scales, zero_points, info.npu_code, given, div_mode)
    compared = x.isfinite() if info == INT8 else None
    with without_8_decimals():
        assert_equal(y, codes_of(run, info), compared)


def cases(name: str) -> list:
    """The operator's own cases of our formats, with symmetric quantization: one row of its lists each."""
    found = []
    for path in sorted((CHECKOUT / f"quant/{name}/tests/st/arch35").glob("*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                attributes = literal_eval(row["attributes"])
                output = literal_eval(row["output_dtypes"])[0]
                if output in NAME.values() and attributes.get("is_symmetrical", True):
                    info = next(info for info in NAME if NAME[info] == output)
                    found.append(pytest.param(row, attributes, info, id=row["testcase_name"]))
    return found


def inputs(row: dict[str, str]) -> list[Tensor | None]:
    """Numbers of the case's shapes, dtypes and ranges; a range may name Inf and NaN besides its limits.

    Tensors longer than LARGEST are cut along the first axes, which no other input of theirs shares.
    """
    shapes, dtypes = literal_eval(row["input_ori_shapes"]), literal_eval(row["input_dtypes"])
    ranges = eval(row["input_data_ranges"], {"inf": math.inf, "nan": math.nan})
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        if shape is None:
            tensors.append(None)
            continue
        shape, values = list(shape), ranges[min(i, len(ranges) - 1)]
        while math.prod(shape) > LARGEST:
            shape[0] = -(-shape[0] // 2)
        finite = [v for v in values if math.isfinite(v)] or [-10, 10]
        x = torch.rand(shape, generator=generator) * (max(finite) - min(finite)) + min(finite)
        chosen = torch.rand(shape, generator=generator)
        for k, v in enumerate(v for v in values if not math.isfinite(v)):
            x[(chosen > 0.001 * k) & (chosen < 0.001 * (k + 1))] = v
        tensors.append(x.to(INPUT.get(dtype, getattr(torch, dtype))))
    return tensors


@pytest.mark.parametrize(("row", "attributes", "info"), [*cases("dynamic_quant"), *cases("dynamic_quant_v2")])
def test_vendor_cases_of_dynamic_quant(row, attributes, info):
    x, smooth, _ = inputs(row)
    check_dynamic(x, smooth, None, info, attributes.get("quant_mode", "pertoken"))


@pytest.mark.parametrize(("row", "attributes", "info"), cases("dynamic_block_quant"))
def test_vendor_cases_of_dynamic_block_quant(row, attributes, info):
    block = (attributes["row_block_size"], attributes["col_block_size"])
    check_block(*inputs(row), info, attributes["min_scale"], block)


@pytest.mark.parametrize(("row", "attributes", "info"), cases("quantize"))
def test_vendor_cases_of_quantize(row, attributes, info):
    x, scales, zero_points = inputs(row)
    zero_points = None if zero_points is None else zero_points.flatten()
    check_static(x, scales.flatten(), zero_points, info, attributes["axis"] % x.dim(), True)


def samples(dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """Ordinary, of every magnitude, with NaN and Inf, and zeros."""
    broken = normal(shape, dtype, seed=2)
    broken.view(-1)[7], broken.view(-1)[-1] = float("nan"), float("-inf")
    few = normal(shape, dtype, seed=3)
    few[:, :1] = float("inf")
    return [normal(shape, dtype), wide_range(shape, dtype), broken, few, torch.zeros(shape, dtype=dtype)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sweep_of_dynamic_quant(dtype, info, mode):
    for shape in ((33, 70), (3, 40, 130), (1, 1), (64, 1)):
        for x in samples(dtype, shape) if math.prod(shape) > 8 else [normal(shape, dtype)]:
            check_dynamic(x, None, None, info, mode)
            n = shape[-2] if mode == "perchannel" else shape[-1]
            if mode != "perchannel" or len(shape) == 2:
                check_dynamic(x, normal((n,), dtype, seed=4), None, info, mode)
    if mode == "pertoken":
        ends = [0, 11, 11, 33]
        check_dynamic(normal((33, 70), dtype), normal((4, 70), dtype, seed=4), ends, info, mode)


@pytest.mark.parametrize("info", FORMATS)
def test_every_bf16_pattern_as_amax(info):
    amax = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = (amax.float()[:, None] * torch.tensor([1.0, -0.97, 0.5, 0.26, -0.01, 0.0])).bfloat16()
    x[:, 0] = amax
    check_dynamic(x, None, None, info, "pertoken")


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("info", FORMATS[1:])  # the golden has no int8
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_sweep_of_dynamic_block_quant(dtype, info, block):
    for shape in ((70, 300), (130, 129), (300, 64)):
        for x in samples(dtype, shape):
            for min_scale in (0.0, 0.3, 100.0):
                check_block(x, info, min_scale, block)


@pytest.mark.parametrize("div_mode", [True, False])
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_sweep_of_quantize(dtype, info, div_mode):
    for shape in ((33, 70), (3, 40, 130)):
        for x in samples(dtype, shape):
            for axis in (len(shape) - 2, len(shape) - 1):
                for n in (1, shape[axis]):
                    scales = normal((n,), torch.float32 if div_mode else dtype, seed=4)
                    for zero_points in (None, normal((n,), scales.dtype, seed=5)):
                        check_static(x, scales, zero_points, info, axis, div_mode)


@pytest.mark.parametrize("info", FORMATS[1:])
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_rounding_to_8_decimals_changes_nothing_in_ordinary_tensors(dtype, info):
    """It moves fp32 quotients by a unit in the last place, which matters only next to a tie, and to 0."""
    x = normal((512, 512), dtype)
    codes, _ = quantizer("dynamic_block_quant")(as_numpy(x), dst_type=CODE[info])
    assert_equal(our_block(x, info, 0.0, (1, 128))[0], torch.from_numpy(codes.view(np.uint8)))
