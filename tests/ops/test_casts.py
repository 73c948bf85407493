"""Casts of every 16-bit pattern and of ten million fp32 patterns, against ml_dtypes and en_dtypes."""

import en_dtypes
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E1M2, E2M1, E4M3, E5M2, E8M0, FORMATS, HIF8, INT8, FormatInfo, code_values
from mindspeed_lowp.ops import kernels
from mindspeed_lowp.ops.kernels import casts
from mindspeed_lowp.ops.reference import casts as reference
from tests.ops.data import FLOATS_AND_FP32, assert_same_bytes, cpu_level, normal, wide_range

NAMES = {info: "hifloat8" if info == HIF8 else info.name for info in FORMATS}
EVERY_FORMAT = [pytest.param(info, id=info.name) for info in FORMATS]
ELEMENTS = [pytest.param(info, id=info.name) for info in FORMATS if info != E8M0]
ORACLE = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M1: ml_dtypes.float4_e2m1fn,
    E1M2: en_dtypes.float4_e1m2,
    HIF8: en_dtypes.hifloat8,
    E8M0: ml_dtypes.float8_e8m0fnu,
}
SIXTEEN_BITS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)


def encode(x: Tensor, info: FormatInfo) -> Tensor:
    return getattr(ops, f"cast_{NAMES[info]}")(x)


def decode(codes: Tensor, info: FormatInfo, *dst_type) -> Tensor:
    return getattr(ops, f"decode_{NAMES[info]}")(codes, *dst_type)


def one_a_byte(codes: Tensor, info: FormatInfo) -> np.ndarray:
    codes = codes.view(torch.uint8).numpy()
    return np.stack([codes & 15, codes >> 4], axis=-1).ravel() if info.bits == 4 else codes


def by_the_oracle(x: np.ndarray, info: FormatInfo) -> np.ndarray:
    """The oracle's codes, with the vendor's treatment of what is too large or not finite.

    hicann/amct's cast saturates finite values, keeps Inf and makes 0x80 of NaN. en_dtypes overflows to Inf,
    ml_dtypes to Inf (E5M2) or NaN (E4M3). ml_dtypes makes -0 of NaN in E2M1, the NPU +0. E8M0 is ml_dtypes'.
    """
    with np.errstate(all="ignore"):
        codes = x.astype(ORACLE[info]).view(np.uint8).copy()
    if info == E8M0:
        return codes
    sign = np.signbit(x).astype(np.uint8) << (info.bits - 1)
    largest = code_values(info).index(info.max)
    too_large = np.isfinite(x) & (np.abs(x) > info.max)
    codes[too_large] = (largest | sign)[too_large]
    if info.bits == 4:
        codes[np.isnan(x)] = 0
    return codes


def assert_casts_like_the_oracle(x: Tensor, info: FormatInfo) -> None:
    expected = by_the_oracle(x.float().numpy(), info)
    np.testing.assert_array_equal(one_a_byte(encode(x, info), info), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("info", ORACLE, ids=lambda info: info.name)
def test_every_16_bit_pattern(info, dtype):
    assert_casts_like_the_oracle(SIXTEEN_BITS.view(dtype), info)


@pytest.mark.parametrize("info", ORACLE, ids=lambda info: info.name)
def test_ten_million_fp32_patterns(info):
    """Half of them anywhere, half in and around the format's own range, where casts do more than saturate."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        bits = torch.randint(-(1 << 31), 1 << 31, (1_000_000,), generator=generator).to(torch.int32)
        if info != E8M0:
            spread = info.emax + 6 - np.log2(info.smallest)
            exponent = torch.randint(0, int(spread), (500_000,), generator=generator) + 124
            exponent += int(np.log2(info.smallest))
            bits[::2] = bits[::2] & ~(0xFF << 23) | exponent.to(torch.int32) << 23
        assert_casts_like_the_oracle(bits.view(torch.float32), info)


@pytest.mark.parametrize("info", ORACLE, ids=lambda info: info.name)
def test_halfway_between_any_two_values_and_next_to_it(info):
    values = torch.tensor([v for v in code_values(info) if np.isfinite(v)]).unique()
    middle = (values[:-1] + values[1:]) / 2
    x = torch.cat(
        [middle, middle.nextafter(torch.tensor(torch.inf)), middle.nextafter(torch.tensor(-torch.inf))]
    )
    assert_casts_like_the_oracle(torch.cat([x, x[:1]])[: len(x) // 2 * 2], info)


@pytest.mark.parametrize("info", ORACLE, ids=lambda info: info.name)
def test_every_code_decodes_to_the_oracles_value(info):
    codes = torch.arange(256).to(torch.uint8)
    expected = torch.from_numpy(one_a_byte(codes, info).view(ORACLE[info]).astype(np.float32))
    for dst_type in (torch.float32, torch.bfloat16, torch.float16, 15):
        actual = decode(codes.view(info.dtype), info, dst_type)
        dtype = torch.bfloat16 if dst_type == 15 else dst_type
        torch.testing.assert_close(actual, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(actual.signbit() & ~actual.isnan(), expected.signbit() & ~expected.isnan())


def test_int8_rounds_halves_to_even_and_saturates():
    x = torch.tensor([-0.5, 0.5, 1.5, -2.5, 126.5, 127.5, 300.0, -127.5, -128.6, -1e9, torch.inf, torch.nan])
    expected = [0, 0, 2, -2, 126, 127, 127, -128, -128, -128, 127, 0]
    assert ops.cast_int8(x).tolist() == expected
    every = torch.arange(-128, 128).to(torch.int8)
    assert ops.decode_int8(every).tolist() == list(range(-128, 128))
    assert torch.equal(ops.cast_int8(ops.decode_int8(every, torch.bfloat16)), every)


def test_inf_and_nan():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30])
    assert ops.cast_hifloat8(x).tolist() == [0x6F, 0xEF, 0x80, 0x6E]
    assert ops.cast_e4m3(x).view(torch.uint8).tolist() == [0x7F, 0xFF, 0x7F, 0x7E]
    assert ops.cast_e5m2(x).view(torch.uint8).tolist() == [0x7C, 0xFC, 0x7E, 0x7B]
    assert ops.cast_e2m1(x).tolist() == ops.cast_e1m2(x).tolist() == [0xF7, 0x70]


@pytest.mark.parametrize("info", ELEMENTS)
def test_quantizers_rounding_saturates_inf_and_drops_nan(info):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, -0.0])
    codes = reference.encode(x, info).view(torch.uint8).tolist()
    values = [code_values(info)[code] for code in codes]
    lowest = -128 if info == INT8 else -info.max
    assert values == [info.max, lowest, 0, 0, 0]
    assert codes[2:4] == [0, 0]


@pytest.mark.parametrize("info", EVERY_FORMAT)
def test_values_of_the_format_come_back(info):
    values = torch.tensor([v for v in code_values(info) if np.isfinite(v)])
    values = torch.cat([values, values[:1]])[: (len(values) + 1) // 2 * 2]
    assert torch.equal(decode(encode(values, info), info), values)


@pytest.fixture(params=[cpu_level(level) for level in kernels.LEVELS])
def level(request):
    kernels.use_level(request.param)
    yield request.param
    kernels.use_level(kernels.supported_levels()[0])


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
@pytest.mark.parametrize("info", EVERY_FORMAT)
def test_kernels_equal_the_specification(level, info, dtype):
    samples = [wide_range(shape, dtype) for shape in ((2,), (3, 70), (5, 3, 1026), (0, 4), (4, 0))]
    samples.append(normal((64, 2048), dtype).t())
    samples.append(torch.nn.functional.pad(normal((7, 38), dtype), (1, 3))[:, 1:-1])  # misaligned rows
    if dtype != torch.float32:
        samples.append(SIXTEEN_BITS.view(dtype))
    for x in samples:
        y = casts.cast(x, info.npu_code)
        assert_same_bytes(y, reference.cast(x, info.npu_code))
        for dst_type in (torch.bfloat16, torch.float16, torch.float32):
            actual = casts.decode(y.t() if y.dim() == 2 else y, info.npu_code, dst_type)
            expected = reference.decode(y.t() if y.dim() == 2 else y, info.npu_code, dst_type)
            assert_same_bytes(actual.nan_to_num(0.25), expected.nan_to_num(0.25))


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
@pytest.mark.parametrize("info", EVERY_FORMAT)
def test_threads_change_nothing(info):
    x = normal((1031, 1100))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        y = casts.cast(x, info.npu_code)
        results.append((y, casts.decode(y, info.npu_code, torch.float32)))
    torch.set_num_threads(before)
    assert_same_bytes(results[0][0], results[1][0])
    assert_same_bytes(results[0][1], results[1][1])


def test_what_is_not_supported_is_named():
    with pytest.raises(ValueError, match=r"x has dtype torch.int32; use torch.bfloat16 or"):
        ops.cast_hifloat8(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"x has shape \[2, 3\]; e2m1 needs an even last dimension"):
        ops.cast_e2m1(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"x has shape \[\]; e1m2 needs an even last dimension"):
        ops.cast_e1m2(torch.zeros(()))
    with pytest.raises(ValueError, match=r"codes has dtype torch.float8_e5m2; use torch.float8_e4m3fn"):
        ops.decode_e4m3(torch.zeros(3, dtype=torch.float8_e5m2))
    with pytest.raises(ValueError, match=r"codes has no dimension"):
        ops.decode_e1m2(torch.zeros((), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"dst_type=torch.int8 is not supported; use torch.bfloat16"):
        ops.decode_hifloat8(torch.zeros(3, dtype=torch.uint8), torch.int8)
    assert ops.cast_hifloat8(torch.tensor(2.0)).shape == ()
