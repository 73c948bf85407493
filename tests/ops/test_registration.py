"""The operators in torch's machinery: opcheck, FakeTensor, torch.compile, and without the C++ library."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_lowp import ops
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
    product = (codes, weight.t(), weight_scale.transpose(0, 1), mxscale)
    return {
        "dynamic_mx_quant": (x, 1, 297, "floor", 64, 0, 0.0, 0.0),
        "dynamic_mx_quant_with_dual_axis": (x, 291, "rint", 1, 0.0),
        "grouped_dynamic_mx_quant": (x, group_list, 296, "round", 2, 7.0),
        "anti_mx_quant": (codes2, mxscale2, 0, 292, torch.bfloat16),
        "cast": (x, 296),
        "decode": (codes2.view(torch.uint8), 290, torch.bfloat16),
        "quant_matmul": (*product, torch.randn(24), torch.bfloat16),
        "grouped_matmul": (codes, weights, weights_scale, mxscale, group_list, 0, 0, torch.bfloat16),
        "add_quant_matmul_": (torch.zeros(70, 24), *product),
        "add_quant_gmm_": (torch.zeros(3, 40, 24), *gmm, group_list, a_scale, 0),
        "quant_dequant_mxfp4": (x, 6.0, 32),
    }


NAMES = list(operands())


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    arguments = operands()[name]
    checks = ["test_autograd_registration", "test_faketensor"]
    # test_schema compares arguments with allclose, which torch does not have for float8; for those operators,
    # test_only_self_is_modified below looks at the same thing.
    if not any(isinstance(a, torch.Tensor) and a.dtype == E4M3 for a in arguments):
        checks.append("test_schema")
    results = torch.library.opcheck(getattr(LOWP, name).default, arguments, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones(name):
    arguments = operands()[name]
    real = getattr(LOWP, name).default(*arguments)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = getattr(LOWP, name).default(
            *(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments)
        )
    for r, f in zip(*(v if isinstance(v, tuple) else (v,) for v in (real, fake)), strict=True):
        if r is not None:
            assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride())


@pytest.mark.parametrize("name", NAMES)
def test_only_self_is_modified_and_no_result_aliases_an_argument(name):
    operator = getattr(LOWP, name).default
    arguments = operands()[name]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
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


def test_a_compiled_linear_equals_the_eager_one():
    def linear(x, w):
        a, a_scale = ops.dynamic_mx_quant(x, dst_type=E4M3)
        b, b_scale = ops.dynamic_mx_quant(w, dst_type=E4M3)
        return ops.quant_matmul(
            a, b.t(), b_scale.transpose(0, 1), pertoken_scale=a_scale, output_dtype=torch.bfloat16
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
        scale = mxscale.transpose(0, 1)
        out = ops.quant_matmul(y, y.t(), scale, pertoken_scale=mxscale, output_dtype=torch.float32)
        print(out.item())
assert not kernels.available() and kernels.supported_levels() == []
print(*[str(w.message) for w in caught if "mindspeed_lowp" in str(w.message)], sep="\\n")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second, *messages = run.stdout.splitlines()
    assert first == second
    assert len(messages) == 1
    assert "no C++ kernels" in messages[0]
    assert "Install a C++ compiler, then reinstall mindspeed_lowp" in messages[0]


def test_an_unsupported_level_in_the_environment_stops_the_import():
    run = subprocess.run(
        [sys.executable, "-c", "import mindspeed_lowp.ops"],
        capture_output=True,
        text=True,
        env={"LOWP_CPU_LEVEL": "v9", "PATH": ""},
    )
    assert run.returncode != 0
    assert "LOWP_CPU_LEVEL" in run.stderr
