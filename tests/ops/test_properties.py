"""What must hold for any input: properties of the quantizers and casts, over inputs that hypothesis draws."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E1M2, E2M1, E4M3, E5M2, INT8
from tests.ops.data import assert_same_bytes

settings.register_profile("lowp", derandomize=True, max_examples=10, deadline=None, database=None)
settings.load_profile("lowp")

FP32 = torch.float32
ROWS, COLUMNS = 64, 96  # two and three blocks
MX = [
    pytest.param(
        {"dst_type": info.npu_code, "scale_alg": alg, "round_mode": mode}, id=f"{info.name}-{alg}-{mode}"
    )
    for info, alg, mode in [
        *((info, alg, "rint") for info in (E4M3, E5M2) for alg in (0, 1)),
        *((info, 0, mode) for info in (E2M1, E1M2) for mode in ("rint", "round", "floor")),
        (E2M1, 2, "rint"),
    ]
]
OCP = [p for p in MX if p.values[0]["scale_alg"] == 0 and p.values[0]["round_mode"] == "rint"]
SYMMETRIC = [p for p in MX if p.values[0]["round_mode"] != "floor"]
CASTS = {
    "hifloat8": (ops.cast_hifloat8, ops.decode_hifloat8),
    "e4m3": (ops.cast_e4m3, ops.decode_e4m3),
    "e5m2": (ops.cast_e5m2, ops.decode_e5m2),
    "e2m1": (ops.cast_e2m1, ops.decode_e2m1),
    "e1m2": (ops.cast_e1m2, ops.decode_e1m2),
    "int8": (ops.cast_int8, ops.decode_int8),
    "e8m0": (ops.cast_e8m0, ops.decode_e8m0),
}


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "wider": lambda x: torch.nn.functional.pad(x, (3, 6))[:, 3:-6],
    "strided": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@st.composite
def matrices(draw, rows=ROWS, columns=COLUMNS, lowest=0, highest=254, dtype=None) -> Tensor:
    """Finite numbers whose exponents lie in a band that is drawn as well, from one binade to all of them."""
    raw = torch.frombuffer(bytearray(draw(st.binary(min_size=512, max_size=512))), dtype=torch.int16).int()
    # Few bytes drawn, many numbers: each is the sum of two of them.
    first = torch.arange(rows * columns) % 251
    second = torch.arange(rows * columns) // 7 % 256
    bits = (raw[first] * 31 + raw[second]).view(rows, columns)
    dtype = dtype or draw(st.sampled_from([torch.bfloat16, torch.float16, FP32]))
    if dtype == torch.float16:
        lowest, highest = max(lowest, 102), min(highest, 142)
    start, width = draw(st.integers(lowest, highest)), draw(st.sampled_from([1, 3, 12, 300]))
    exponent = (start + (bits >> 7 & 0xFF) % width).clamp(max=highest)
    return (bits & 0x807F | exponent << 7).to(torch.int16).view(torch.bfloat16).to(dtype)


def values(y: Tensor, mxscale: Tensor, axis: int, how: dict) -> Tensor:
    return ops.anti_mx_quant(y, mxscale, axis=axis, dst_type=FP32, src_type=how["dst_type"])


def assert_all_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_same_bytes(a, e)


# ---- idempotence ----


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("how", OCP)
@given(x=matrices())
def test_quantizing_a_dequantized_tensor_reproduces_it(how, axis, x):
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, **how)
    again = ops.dynamic_mx_quant(values(y, mxscale, axis, how), axis=axis, **how)
    assert_all_same(again, (y, mxscale))


@pytest.mark.parametrize("how", OCP)
@given(x=matrices(dtype=torch.bfloat16, lowest=20, highest=250))
def test_so_does_quantizing_tiles_again(how, x):
    y, scale1, scale2 = ops.dynamic_block_mx_quant(x, **how)
    dequantized = values(y, scale1, -1, how)
    assert_same_bytes(values(y, scale2, -2, how), dequantized)
    assert_all_same(ops.dynamic_block_mx_quant(dequantized.bfloat16(), **how), (y, scale1, scale2))


@pytest.mark.parametrize("name", CASTS)
@given(x=matrices(rows=2))
def test_casting_a_decoded_code_gives_the_code(name, x):
    cast, decode = CASTS[name]
    codes = cast(x)
    assert_same_bytes(cast(decode(codes)), codes)


# ---- signs and order ----


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("how", SYMMETRIC)
@given(x=matrices())
def test_values_of_the_negative_are_the_negative_values(how, axis, x):
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, **how)
    negative, same_scale = ops.dynamic_mx_quant(-x, axis=axis, **how)
    assert_same_bytes(same_scale, mxscale)
    assert torch.equal(values(negative, mxscale, axis, how), -values(y, mxscale, axis, how))


@pytest.mark.parametrize("name", [name for name in CASTS if name != "e8m0"])
@given(x=matrices(rows=2))
def test_casts_are_symmetric(name, x):
    cast, decode = CASTS[name]
    if name == "int8":
        x = x.clamp(-INT8.max, INT8.max)  # which has one more negative number
    assert torch.equal(decode(cast(-x)), -decode(cast(x)))


@given(x=matrices())
def test_fake_quantization_is_symmetric(x):
    assert torch.equal(ops.quant_dequant_mxfp4(-x), -ops.quant_dequant_mxfp4(x))


@pytest.mark.parametrize("name", CASTS)
@given(x=matrices(rows=2))
def test_casts_are_monotonic(name, x):
    cast, decode = CASTS[name]
    x = (x.abs() + 2.0**-130 if name == "e8m0" else x).flatten().sort().values
    x = x[x.isfinite()]
    decoded = decode(cast(x[: len(x) // 2 * 2]))
    decoded = decoded[decoded.isfinite()]  # E8M0's NaN, from 2 ** 127.5 on
    assert (decoded.diff() >= 0).all()


SCALED = {
    **{
        f"dynamic_quant {mode} {code}": lambda x, mode=mode, code=code: ops.dynamic_quant(
            x, dst_type=code, quant_mode=mode
        )
        for mode in ("pertensor", "pertoken", "perchannel")
        for code in (1, 290, 291, 292)
    },
    **{
        f"dynamic_block_quant {rows} {code}": lambda x, rows=rows, code=code: ops.dynamic_block_quant(
            x, dst_type=code, row_block_size=rows, round_mode="round" if code == 290 else "rint"
        )
        for rows in (1, 128)
        for code in (1, 290, 291, 292)
    },
}


def decoded(codes: Tensor) -> Tensor:
    return ops.decode_hifloat8(codes) if codes.dtype == torch.uint8 else codes.float()


@pytest.mark.parametrize("name", SCALED)
@given(x=matrices(dtype=torch.bfloat16, highest=250))
def test_quantizers_with_fp32_scales_are_symmetric_and_depend_on_no_layout(name, x):
    codes, scale = SCALED[name](x)
    negative, same_scale = SCALED[name](-x)
    assert_same_bytes(same_scale, scale)
    assert torch.equal(decoded(negative), -decoded(codes))
    for view in LAYOUTS.values():
        assert_all_same(SCALED[name](view(x)), (codes, scale))


@pytest.mark.parametrize("code", [1, 290, 291, 292])
@given(x=matrices(dtype=torch.bfloat16), rows=st.permutations(range(ROWS)))
def test_scales_of_tokens_go_with_their_rows(code, x, rows):
    codes, scale = ops.dynamic_quant(x, dst_type=code)
    assert_all_same(ops.dynamic_quant(x[rows], dst_type=code), (codes[rows], scale[rows]))
    codes, scale = ops.dynamic_quant(x.t(), dst_type=code, quant_mode="perchannel")
    assert_all_same(
        ops.dynamic_quant(x[rows].t(), dst_type=code, quant_mode="perchannel"),
        (codes[:, rows].contiguous(), scale[rows]),
    )


# ---- powers of two ----


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("how", MX)
@given(x=matrices(lowest=80, highest=170, dtype=torch.bfloat16), k=st.integers(-60, 60))
def test_a_power_of_two_moves_the_scales_and_nothing_else(how, axis, x, k):
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, **how)
    moved, moved_scale = ops.dynamic_mx_quant(x * 2.0**k, axis=axis, **how)
    inside = scales_of_blocks(mxscale, axis).int()
    assert ((inside + k >= 1) & (inside + k <= 254) & (inside >= 1)).all()
    assert_same_bytes(moved, y)
    assert torch.equal(scales_of_blocks(moved_scale, axis).int(), inside + k)


def scales_of_blocks(mxscale: Tensor, axis: int) -> Tensor:
    """Without padding: 3 blocks along the last axis, 2 along the other."""
    return mxscale.flatten(1)[:, : COLUMNS // 32] if axis == -1 else mxscale


@given(x=matrices(lowest=110, highest=160, dtype=torch.bfloat16), k=st.integers(-10, 60))
def test_fake_quantization_commutes_with_powers_of_two(x, k):
    assert_same_bytes(ops.quant_dequant_mxfp4(x * 2.0**k), ops.quant_dequant_mxfp4(x) * 2.0**k)


# ---- independence of blocks, rows and groups ----


@pytest.mark.parametrize("how", MX)
@given(x=matrices(), order=st.permutations(range(COLUMNS // 32)), rows=st.permutations(range(ROWS)))
def test_permuted_blocks_and_rows_give_permuted_results(how, x, order, rows):
    def permuted(t: Tensor) -> Tensor:
        return t[rows].unflatten(1, (len(order), -1))[:, order].flatten(1)

    for axis in (-1, -2):
        turn = (lambda t: t) if axis == -1 or how["dst_type"] in (E2M1.npu_code, E1M2.npu_code) else Tensor.t
        if axis == -2 and turn is not Tensor.t:
            continue  # FP4 codes are packed along the last axis
        y, mxscale = ops.dynamic_mx_quant(turn(x), axis=axis, **how)
        z, other = ops.dynamic_mx_quant(turn(permuted(x)), axis=axis, **how)
        assert_same_bytes(turn(z).contiguous(), permuted(turn(y)).contiguous())
        if axis == -2:
            mxscale, other = mxscale.transpose(0, 1), other.transpose(0, 1)
        blocks = COLUMNS // 32
        assert_same_bytes(other.flatten(1)[:, :blocks], permuted(mxscale.flatten(1)[:, :blocks]))


@pytest.mark.parametrize("how", MX)
@given(
    x=matrices(rows=150, dtype=torch.bfloat16),
    counts=st.lists(st.integers(0, 70), min_size=2, max_size=4),
    data=st.data(),
)
def test_permuted_groups_give_permuted_results(how, x, counts, data):
    total = sum(counts)
    assume(0 < total <= len(x))
    groups = list(x[:total].split(counts))
    order = data.draw(st.permutations(range(len(counts))))

    def quantized(which: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        sizes = [counts[i] for i in which]
        ends = torch.tensor(sizes).cumsum(0)
        y, mxscale = ops.grouped_dynamic_mx_quant(torch.cat([groups[i] for i in which]), ends, **how)
        starts = (ends - torch.tensor(sizes)).tolist()
        scales = [
            mxscale[s // 64 + g :][: -(-n // 64)] for g, (s, n) in enumerate(zip(starts, sizes, strict=True))
        ]
        return dict(zip(which, zip(y.split(sizes), scales, strict=True), strict=True))

    there, back = quantized(order), quantized(sorted(order))
    for group in order:
        assert_all_same(there[group], back[group])


# ---- padding and memory layout ----


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("how", OCP)
@given(x=matrices(rows=96, dtype=torch.bfloat16), poison=st.integers(0, 255))
def test_padding_of_scales_never_reaches_a_result(how, axis, x, poison):
    """Three blocks on each axis; the fourth scale byte is padding."""
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, **how)
    poisoned = mxscale.clone()
    (poisoned.flatten(1)[:, 3:] if axis == -1 else poisoned[-1, :, 1]).fill_(poison)
    assert_same_bytes(values(y, poisoned, axis, how), values(y, mxscale, axis, how))
    if how["dst_type"] in (E4M3.npu_code, E5M2.npu_code):
        b, b_scale = (y.t(), poisoned.transpose(0, 1)) if axis == -1 else (y, poisoned)
        a, a_scale = (y, poisoned) if axis == -1 else (y.t(), poisoned.transpose(0, 1))
        clean = mxscale, mxscale.transpose(0, 1)
        clean = clean if axis == -1 else clean[::-1]
        common = {
            "output_dtype": torch.bfloat16,
            "group_sizes": [1, 1, 32],
            "scale_dtype": 293,
            "pertoken_scale_dtype": 293,
        }
        actual = ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, **common)
        expected = ops.quant_matmul(a, b, clean[1], pertoken_scale=clean[0], **common)
        assert_same_bytes(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("how", [p for p in OCP if p.values[0]["dst_type"] in (E4M3.npu_code, E5M2.npu_code)])
@given(
    x=matrices(rows=150, columns=34, dtype=torch.bfloat16),
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    poison=st.integers(0, 255),
)
def test_scale_rows_between_groups_never_reach_a_result(how, x, counts, poison):
    total = sum(counts)
    assume(0 < total <= len(x))
    ends = torch.tensor(counts).cumsum(0)
    y, mxscale = ops.grouped_dynamic_mx_quant(x[:total], ends, **how)
    poisoned = torch.full_like(mxscale, poison)
    for g, (end, n) in enumerate(zip(ends.tolist(), counts, strict=True)):
        first = (end - n) // 64 + g
        used = slice(first, first + -(-n // 64))
        poisoned[used] = mxscale[used]
        if n % 64 and n % 64 <= 32:
            poisoned[used.stop - 1, :, 1] = poison
    expected = ops.grouped_anti_mx_quant(y, mxscale, ends, dst_type=FP32)
    assert_same_bytes(ops.grouped_anti_mx_quant(y, poisoned, ends, dst_type=FP32), expected)
    how = {"group_list": ends, "split_item": 3, "group_type": 2, "output_dtype": torch.bfloat16}
    clean, product = (
        ops.grouped_matmul([y.t()], [y], scale=[s], per_token_scale=[s.transpose(0, 1)], **how)[0]
        for s in (mxscale, poisoned)
    )
    assert_same_bytes(product.nan_to_num(), clean.nan_to_num())


GROUPS = torch.tensor([10, 10, 64])
OPERATORS = {
    "dynamic_mx_quant, last axis": lambda x, how: ops.dynamic_mx_quant(x, **how),
    "dynamic_mx_quant, second last": lambda x, how: ops.dynamic_mx_quant(x, axis=-2, **how),
    "with_dual_axis": lambda x, how: ops.dynamic_mx_quant_with_dual_axis(x, **how),
    "grouped": lambda x, how: ops.grouped_dynamic_mx_quant(x, GROUPS, **how),
    "quant_dequant_mxfp4": lambda x, how: (ops.quant_dequant_mxfp4(x),),
    **{name: lambda x, how, cast=cast: (cast(x),) for name, (cast, _) in CASTS.items()},
}


@pytest.mark.parametrize("operator", OPERATORS)
@given(
    x=matrices(dtype=torch.bfloat16),
    how=st.sampled_from([p.values[0] for p in MX]),
    layout=st.sampled_from(sorted(LAYOUTS)),
)
def test_memory_layout_changes_nothing(operator, x, how, layout):
    view = LAYOUTS[layout](x)
    expected = OPERATORS[operator](x, how)
    before = view.clone()
    assert_all_same(OPERATORS[operator](view, how), expected)
    assert_same_bytes(view, before)


# ---- what is broken is seen, there alone ----

BAD = st.sampled_from([float("nan"), float("inf"), float("-inf")])


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("how", MX)
@given(x=matrices(highest=252), bad=BAD, row=st.integers(0, ROWS - 1), column=st.integers(0, COLUMNS - 1))
def test_nan_and_inf_give_nan_in_their_block_alone(how, axis, x, bad, row, column):
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, **how)
    expected = values(y, mxscale, axis, how)
    assert expected.isfinite().all()
    x[row, column] = bad
    if axis == -1:
        expected[row, column // 32 * 32 :][:32] = torch.nan
    else:
        expected[row // 32 * 32 :, column][:32] = torch.nan
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, **how)
    actual = values(y, mxscale, axis, how)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bytes(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("code", [1, 290, 291, 292])
@given(x=matrices(dtype=torch.bfloat16, lowest=20, highest=250), bad=BAD, row=st.integers(0, ROWS - 1))
def test_nan_and_inf_give_nan_in_their_token_alone(code, x, bad, row):
    def products(x: Tensor) -> Tensor:
        codes, scale = ops.dynamic_quant(x, dst_type=code)
        return decoded(codes) * scale[:, None]

    expected = products(x)
    assert expected.isfinite().all()
    x[row, 5] = bad
    expected[row] = torch.nan
    actual = products(x)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bytes(actual.nan_to_num(), expected.nan_to_num())


@given(x=matrices(highest=252), bad=BAD, row=st.integers(0, ROWS - 1), column=st.integers(0, COLUMNS - 1))
def test_fake_quantization_gives_nan_in_their_block_alone(x, bad, row, column):
    expected = ops.quant_dequant_mxfp4(x)
    assert expected.isfinite().all()
    x[row, column] = bad
    expected[row, column // 32 * 32 :][:32] = torch.nan
    actual = ops.quant_dequant_mxfp4(x)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bytes(actual.nan_to_num(), expected.nan_to_num())
