"""Which implementation runs, and what is said where the one asked for is not there."""

import os
import subprocess
import sys

import pytest
import torch

from mindspeed_lowp.ops import kernels
from mindspeed_lowp.ops.npu import mxfp4 as npu
from mindspeed_lowp.qat import mxfp4_fake_quant, mxfp4_quant_dequant
from tests.ops.data import wide_range
from tests.ops.test_mxfp4 import assert_same
from tests.qat.toolkit import toolkit

# What importing the FakeQuant toolkit's package does, on a device that is there.
PACKAGE = """
import torch
from tests.qat.toolkit import toolkit

calls = []

def compiled(flat, inv_scale_factor_scale=1.0):
    assert flat.dim() == 1 and flat.dtype == torch.float32 and flat.is_contiguous() and flat.numel() % 32 == 0
    calls.append(inv_scale_factor_scale)
    return toolkit(flat.view(-1, 32), scale_factor=6.0 / inv_scale_factor_scale).view(-1)

library = torch.library.Library("amct", "FRAGMENT")
library.define("quant_dequant_mxfp4(Tensor x, float inv_scale_factor_scale=1.0) -> Tensor")
library.impl("quant_dequant_mxfp4", compiled, "CompositeExplicitAutograd")
"""


@pytest.fixture
def environment(monkeypatch):
    """Sets MXFP4_ASCENDC_PATH for this test, with nothing remembered from another one."""

    def environment(path):
        npu._search.cache_clear()
        if path is None:
            monkeypatch.delenv("MXFP4_ASCENDC_PATH", raising=False)
        else:
            monkeypatch.setenv("MXFP4_ASCENDC_PATH", str(path))

    yield environment
    npu._search.cache_clear()
    module = sys.modules.pop("mxfp4", None)
    if module is not None and hasattr(module, "library"):
        module.library._destroy()


def package(folder, source=PACKAGE):
    (folder / "mxfp4").mkdir(parents=True)
    (folder / "mxfp4" / "__init__.py").write_text(source)


@pytest.mark.parametrize("below", ["", "python"])
def test_the_compiled_operator_is_found_and_called_by_its_contract(tmp_path, environment, below):
    package(tmp_path / below)
    environment(tmp_path)
    search_path = list(sys.path)
    for shape in ((2, 33), (3, 17), (4, 48, 33), (70,)):
        x = wide_range(shape, torch.bfloat16)
        assert_same(mxfp4_quant_dequant(x, backend="npu"), toolkit(x))
        assert_same(mxfp4_quant_dequant(x, scale_factor=4.0, backend="npu"), toolkit(x, scale_factor=4.0))
    assert mxfp4_quant_dequant(torch.ones(0, 5), backend="npu").shape == (0, 5)
    import mxfp4

    assert mxfp4.calls == [1.0, 1.5] * 4
    assert sys.path == search_path
    # What an NPU's `auto` runs.
    x = wide_range((5, 70), torch.float32)
    assert_same(npu.quant_dequant_mxfp4(x, 6.0, 32), toolkit(x))
    assert_same(npu.quant_dequant_mxfp4(x, 6.0, 16), toolkit(x, 16))
    assert len(mxfp4.calls) == 9
    x = x.requires_grad_()
    mxfp4_fake_quant(x, backend="npu").sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("how", [{"block_size": 16}, {"scale_mode": "floor"}])
def test_what_the_compiled_operator_cannot_do(tmp_path, environment, how):
    package(tmp_path)
    environment(tmp_path)
    with pytest.raises(
        RuntimeError, match=r'backend="npu": (block_size=16|scale_mode=\'floor\'); .* "torch"'
    ):
        mxfp4_quant_dequant(torch.ones(4), backend="npu", **how)


def test_it_is_not_there(tmp_path, environment):
    x = torch.ones(4)
    for path, reason in (
        (None, "MXFP4_ASCENDC_PATH is not set"),
        (tmp_path, f"MXFP4_ASCENDC_PATH={tmp_path} holds no folder mxfp4"),
    ):
        environment(path)
        with pytest.raises(RuntimeError) as info:
            mxfp4_quant_dequant(x, backend="npu")
        message = str(info.value)
        assert reason in message
        assert "bash build.sh" in message and "set MXFP4_ASCENDC_PATH" in message and '"torch"' in message
        assert torch.equal(npu.quant_dequant_mxfp4(x, 6.0, 32), toolkit(x))  # an NPU's `auto`


def test_failure_is_remembered_and_told_once(tmp_path, environment):
    package(tmp_path, "open('imported', 'a').write('x'); raise OSError('libascendcl.so: cannot open')")
    environment(tmp_path)
    os.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"importing mxfp4 .* failed \(OSError: libascendcl.so"):
        npu.quant_dequant_mxfp4(torch.ones(4), 6.0, 32)
    with pytest.raises(RuntimeError, match="cannot open"):
        mxfp4_quant_dequant(torch.ones(4), backend="npu")
    assert (tmp_path / "imported").read_text() == "x"


def test_a_package_that_registers_nothing(tmp_path, environment):
    package(tmp_path, "")
    environment(tmp_path)
    with pytest.raises(RuntimeError, match="registered no operator"):
        mxfp4_quant_dequant(torch.ones(4), backend="npu")


def test_a_tensor_the_compiled_operator_has_no_kernel_for(environment):
    environment(None)
    library = torch.library.Library("amct", "FRAGMENT")
    try:
        library.define("quant_dequant_mxfp4(Tensor x, float inv_scale_factor_scale=1.0) -> Tensor")
        with pytest.raises(RuntimeError, match='backend="npu": the compiled operator takes no tensor on cpu'):
            mxfp4_quant_dequant(torch.ones(4), backend="npu")
    finally:
        library._destroy()


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
def test_auto_on_a_cpu_is_native(monkeypatch):
    from mindspeed_lowp.ops.reference import mxfp4 as reference

    monkeypatch.setattr(reference, "quant_dequant_mxfp4", None)
    for backend in ("auto", "native"):
        mxfp4_quant_dequant(torch.ones(4), backend=backend)


def test_without_the_cpp_library():
    code = """
import importlib.machinery
import torch
importlib.machinery.EXTENSION_SUFFIXES.clear()
from mindspeed_lowp.qat import mxfp4_quant_dequant
x = torch.randn(3, 70)
assert torch.equal(mxfp4_quant_dequant(x), mxfp4_quant_dequant(x, backend="torch"))
try:
    mxfp4_quant_dequant(x, backend="native")
except RuntimeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 'backend="native": the C++ kernels were not built: install a C++ compiler' in result.stdout
