"""The operators in torch's machinery: opcheck, FakeTensor, torch.compile, and without the C++ library."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_lowp import ops
from mindspeed_lowp.ops import composed, matmul
from tests.ops.data import assert_same_bytes, normal

E4M3 = torch.float8_e4m3fn
LOWP = torch.ops.lowp


def operands():
    """Arguments for every operator, by name; groups are uneven and one is empty."""
    x, w = normal((70, 40)), normal((24, 40), seed=1)
    group_list = torch.tensor([0, 33, 70])
    codes, mxscale, codes2, mxscale2 = ops.dynamic_mx_quant_with_dual_axis(x, dst_type=E4M3)
    weight, weight_scale = ops.dynamic_mx_quant(w, dst_type=E4M3)
    weights, weights_scale = ops.dynamic_mx_quant(normal((3, 40, 24)), axis=-2, dst_type=E4M3)
    a, a_scale = ops.grouped_dynamic_mx_quant(x, group_list, dst_type=E4M3)
    b, b_scale = ops.grouped_dynamic_mx_quant(normal((70, 24)), group_list, dst_type=E4M3)
    gmm = (a.t(), b, b_scale)
    a_scale = a_scale.transpose(0, 1)
    product, mx = (codes, weight.t(), weight_scale.transpose(0, 1), mxscale), (292, 292, [1, 1, 32])
    return {
        "dynamic_mx_quant": (x, 1, 297, "floor", 64, 0, 0.0, 0.0),
        "dynamic_mx_quant_with_dual_axis": (x, 291, "rint", 1, 0.0),
        "grouped_dynamic_mx_quant": (x, group_list, 296, "round", 2, 7.0),
        "dynamic_block_mx_quant": (x, 296, "floor", 2, 7.0),
        "anti_mx_quant": (codes2, mxscale2, 0, 292, torch.bfloat16),
        "cast": (x, 296),
        "dynamic_quant": (x, w[:3].clone(), torch.tensor([0, 33, 70]), 290, "pertoken", 15.0),
        "dynamic_block_quant": (x, 0.5, 1, 1, 128, 0.0),
        "quantize": (x, torch.rand(40), None, 1, 1, True),
        "decode": (codes2.view(torch.uint8), 290, torch.bfloat16),
        "quant_matmul": (*product, torch.randn(24), torch.bfloat16, *mx),
        "grouped_matmul": (
            *(codes, weights, weights_scale, mxscale, None, group_list, 0, 0, torch.bfloat16),
            *mx,
        ),
        "add_quant_matmul_": (torch.zeros(70, 24), *product, *mx),
        "add_quant_gmm_": (torch.zeros(3, 40, 24), *gmm, group_list, a_scale, 0, *mx),
        "quant_dequant_mxfp4": (x, 6.0, 32, "floor"),
    }


def matmul_modes():
    """Arguments for the other modes of the matmuls, by the operator's name and the mode's."""
    m, k, n, groups = 70, 140, 24, 3
    e4m3, hif8 = (292, 292), (290, 290)
    x, w = normal((m, k)).to(E4M3), normal((k, n), seed=1).to(E4M3)
    bias, group_list = torch.randn(n), torch.tensor([0, 33, 70])
    row, column = torch.rand(m), torch.rand(n)
    tiles, blocks, right_blocks = torch.rand(m, 2), torch.rand(1, 2), torch.rand(2, 1)
    x8, w8 = x.view(torch.int8), w.view(torch.int8)
    packed, packed_scale = ops.dynamic_mx_quant(normal((m, k)), dst_type=296)
    packed_w, packed_w_scale = ops.dynamic_mx_quant(normal((n, k)), dst_type=296)
    packed_n, packed_n_scale = ops.dynamic_mx_quant(normal((k, n)), axis=-2, dst_type=296)
    packed_m, packed_m_scale = ops.dynamic_mx_quant(normal((k, m)), axis=-2, dst_type=296)
    fp4 = (296, 296, [1, 1, 32])
    along_k = (packed, packed_w.t(), packed_w_scale.transpose(0, 1), packed_scale)
    along_mn = (packed_m.t(), packed_n, packed_n_scale, packed_m_scale.transpose(0, 1))
    bf16, fp32 = torch.bfloat16, torch.float32
    weights = torch.stack([w] * groups)
    packed_weights = torch.stack([packed_n] * groups), torch.stack([packed_n_scale] * groups)
    packed_weights_t = torch.stack([packed_w] * groups), torch.stack([packed_w_scale] * groups)
    packed_weights_t = packed_weights_t[0].transpose(1, 2), packed_weights_t[1].transpose(1, 2)
    one_each, of_columns = torch.rand(groups), torch.rand(groups, n)
    left, right = normal((m, k)).to(E4M3).t(), normal((m, n)).to(E4M3)  # the groups divide their 70 rows
    total = torch.zeros(groups, k, n)
    uint8 = (left.view(torch.uint8), right.view(torch.uint8))

    def grouped(x, weight, scale, per_token_scale, group_type, kinds, group_sizes, bias=None):
        return (x, weight, scale, per_token_scale, bias, group_list, group_type, 0, bf16, *kinds, group_sizes)

    return {
        "quant_matmul, per-tensor": (x, w, column[:1], row[:1], None, bf16, *e4m3, []),
        "quant_matmul, per-tensor and bias": (x, w, column[:1], row[:1], bias, fp32, *e4m3, []),
        "quant_matmul, per-tensor and columns": (x, w, column, row[:1], None, bf16, *e4m3, []),
        "quant_matmul, rows and per-tensor": (x, w, column[:1], row, None, bf16, *e4m3, []),
        "quant_matmul, rows and columns": (
            *(x.view(torch.uint8), w.view(torch.uint8), column, row, bias, torch.float16, *hif8),
            [],
        ),
        "quant_matmul, int8": (x8, w8, column, row, bias, bf16, 1, 1, []),
        "quant_matmul, tiles": (x, w, right_blocks, tiles, None, fp32, *e4m3, [1, 128, 128]),
        "quant_matmul, int8 tiles": (x8, w8, right_blocks, tiles, bias, bf16, 1, 1, [1, 128, 128]),
        "quant_matmul, blocks": (x, w, right_blocks, blocks, None, bf16, *e4m3, [128, 128, 128]),
        "quant_matmul, batches of tiles": (
            *(x.expand(2, m, k), w, right_blocks, tiles.expand(2, m, 2), None, bf16, *e4m3),
            [1, 128, 128],
        ),
        "quant_matmul, FP4 along K": (*along_k, bias, bf16, *fp4),
        "quant_matmul, FP4 along M and N": (*along_mn, None, fp32, *fp4),
        "grouped_matmul, per-tensor": grouped(x, weights, one_each, one_each[:, None], 0, e4m3, []),
        "grouped_matmul, rows and columns": grouped(x, weights, of_columns, row, 0, e4m3, []),
        "grouped_matmul, tiles": grouped(
            x, weights, right_blocks.expand(groups, 2, 1), tiles, 0, e4m3, [1, 128, 128]
        ),
        "grouped_matmul, FP4 along N": grouped(
            packed, *packed_weights, packed_scale, 0, (296, 296), [1, 1, 32], torch.randn(groups, n)
        ),
        "grouped_matmul, FP4 along K": grouped(
            packed, *packed_weights_t, packed_scale, 0, (296, 296), [1, 1, 32]
        ),
        "grouped_matmul, split k per-tensor": grouped(left, right, one_each, one_each, 2, e4m3, []),
        "grouped_matmul, split k rows and columns": grouped(
            *(left, right, of_columns, torch.rand(groups, k), 2, e4m3),
            [],
        ),
        "grouped_matmul, split k tiles": grouped(
            *(left, right, torch.rand(groups, 1), torch.rand(k, groups), 2, e4m3),
            [1, 128, 128],
        ),
        "grouped_matmul, split k MX": grouped(
            left,
            right,
            torch.ones(1 + groups, n, 2, dtype=torch.uint8),
            torch.ones(k, 1 + groups, 2, dtype=torch.uint8),
            2,
            e4m3,
            [1, 1, 32],
        ),
        "add_quant_matmul_, per-tensor": (
            *(torch.zeros(m, n), x.view(torch.uint8), w.view(torch.uint8), column[:1], row[:1], *hif8),
            [],
        ),
        "add_quant_gmm_, per-tensor": (total, *uint8, one_each, group_list, one_each, 0, *hif8, []),
        "add_quant_gmm_, columns": (total, *uint8, of_columns, group_list, one_each, 0, *hif8, []),
    }


NAMES = list(operands())
CASES = operands() | matmul_modes()


def operator_of(case: str):
    return getattr(LOWP, case.split(",")[0]).default


def clones(arguments):
    """The same, tensors copied with their strides."""
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    arguments = CASES[case]
    checks = ["test_autograd_registration", "test_faketensor"]
    # test_schema compares arguments with allclose, which torch does not have for float8; for those operators,
    # test_only_self_is_modified below looks at the same thing.
    if not any(isinstance(a, torch.Tensor) and a.dtype == E4M3 for a in arguments):
        checks.append("test_schema")
    results = torch.library.opcheck(operator_of(case), arguments, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", CASES)
def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones(case):
    operator, arguments = operator_of(case), clones(CASES[case])
    real = operator(*arguments)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = operator(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    for r, f in zip(*(v if isinstance(v, tuple) else (v,) for v in (real, fake)), strict=True):
        if r is not None:
            assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride())


@pytest.mark.parametrize("case", CASES)
def test_only_self_is_modified_and_no_result_aliases_an_argument(case):
    operator, arguments = operator_of(case), clones(CASES[case])
    before = clones(arguments)
    results = operator(*arguments)
    results = () if results is None else results
    storages = {a.untyped_storage().data_ptr() for a in arguments if isinstance(a, torch.Tensor)}
    for result in results if isinstance(results, tuple) else (results,):
        assert result.untyped_storage().data_ptr() not in storages
    for declared, now, then in zip(operator._schema.arguments, arguments, before, strict=True):
        if declared.alias_info is not None and declared.alias_info.is_write:
            assert not torch.equal(now, then)
        elif isinstance(now, torch.Tensor):
            assert_same_bytes(now, then)


MATMULS = [case for case in CASES if hasattr(composed, case.split(",")[0])]


@pytest.mark.parametrize("case", MATMULS)
def test_the_reference_of_every_matmul_gives_the_same_bits(case):
    arguments, others = clones(CASES[case]), clones(CASES[case])
    actual = operator_of(case)(*arguments)
    expected = getattr(composed, case.split(",")[0])(matmul.REFERENCE, *others)
    if actual is None:
        actual, expected = arguments[0], others[0]
    assert_same_bytes(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_default_dtype_is_of_no_influence(case, dtype):
    operator, arguments = operator_of(case), clones(CASES[case])
    expected = operator(*clones(arguments))
    torch.set_default_dtype(dtype)
    try:
        actual = operator(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, e in zip(*(v if isinstance(v, tuple) else (v,) for v in (actual, expected)), strict=True):
        if a is not None:
            assert_same_bytes(a, e)


@pytest.mark.parametrize("case", CASES)
def test_a_meta_tensor_beside_real_ones_is_refused(case):
    operator, arguments = operator_of(case), CASES[case]
    tensors = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
    for i in tensors if len(tensors) > 1 else ():
        mixed = [a.to("meta") if i == j else a for j, a in enumerate(arguments)]
        with pytest.raises(ValueError, match="must be on one device, but these are on cpu and meta"):
            operator(*mixed)


def test_a_compiled_linear_equals_the_eager_one():
    def linear(x, w):
        a, a_scale = ops.dynamic_mx_quant(x, dst_type=E4M3)
        b, b_scale = ops.dynamic_mx_quant(w, dst_type=E4M3)
        return ops.quant_matmul(
            a,
            b.t(),
            b_scale.transpose(0, 1),
            pertoken_scale=a_scale,
            output_dtype=torch.bfloat16,
            scale_dtype=293,
            pertoken_scale_dtype=293,
            group_sizes=[1, 1, 32],
        )

    x, w = normal((33, 70)), normal((17, 70), seed=1)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert_same_bytes(compiled(x, w), linear(x, w))


def test_without_the_library_the_reference_serves_after_exactly_one_warning():
    """Run in a process that finds no shared library."""
    script = """
import importlib.machinery, warnings
import torch
importlib.machinery.EXTENSION_SUFFIXES.clear()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from mindspeed_lowp import ops
    from mindspeed_lowp.ops import kernels
    x = torch.arange(64).bfloat16()[None]
    for _ in range(2):
        y, mxscale = ops.dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn)
        kinds = {"scale_dtype": 293, "pertoken_scale_dtype": 293, "group_sizes": [1, 1, 32]}
        scale = mxscale.transpose(0, 1)
        out = ops.quant_matmul(y, y.t(), scale, pertoken_scale=mxscale, output_dtype=torch.float32, **kinds)
        print(out.item())
assert not kernels.available() and kernels.supported_levels() == []
print(*[str(w.message) for w in caught if "mindspeed_lowp" in str(w.message)], sep="\\n")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second, *messages = run.stdout.splitlines()
    assert first == second
    assert len(messages) == 1
    assert "no C++ kernels" in messages[0]
    assert "none were built in the source tree" in messages[0] and "`pip install -e .` there" in messages[0]


def test_an_unsupported_level_in_the_environment_stops_the_import():
    run = subprocess.run(
        [sys.executable, "-c", "import mindspeed_lowp.ops"],
        capture_output=True,
        text=True,
        env={"LOWP_CPU_LEVEL": "v9", "PATH": ""},
    )
    assert run.returncode != 0
    assert "LOWP_CPU_LEVEL" in run.stderr
