"""No quantizer allocates more than its results: neither on the CPU's allocator nor beside it, in C++."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mindspeed_lowp import ops
from mindspeed_lowp.ops import kernels
from tests.ops.data import normal

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")

E4M3 = torch.float8_e4m3fn
SCALE = torch.tensor([0.5])


def groups_of(x: Tensor) -> Tensor:
    return torch.tensor([100, 100, len(x)])


QUANTIZERS = {
    "dynamic_mx_quant": lambda x: ops.dynamic_mx_quant(x, dst_type=E4M3),
    "dynamic_mx_quant, axis -2": lambda x: ops.dynamic_mx_quant(x, axis=-2, dst_type=E4M3, scale_alg=1),
    "dynamic_mx_quant, FP4": lambda x: ops.dynamic_mx_quant(x, dst_type=296),
    "dynamic_mx_quant, FP4, axis -2": lambda x: ops.dynamic_mx_quant(x, axis=-2, dst_type=297, block_size=64),
    "dynamic_mx_quant_with_dual_axis": lambda x: ops.dynamic_mx_quant_with_dual_axis(x, dst_type=E4M3),
    "dynamic_mx_quant_with_dual_axis, FP4": lambda x: ops.dynamic_mx_quant_with_dual_axis(x, dst_type=296),
    "dynamic_block_mx_quant": lambda x: ops.dynamic_block_mx_quant(x, dst_type=E4M3),
    "grouped_dynamic_mx_quant": lambda x: ops.grouped_dynamic_mx_quant(x, groups_of(x), dst_type=E4M3),
    "dynamic_quant, pertensor": lambda x: ops.dynamic_quant(x, dst_type=290, quant_mode="pertensor"),
    "dynamic_quant, pertoken": lambda x: ops.dynamic_quant(x, dst_type=E4M3),
    "dynamic_quant, perchannel": lambda x: ops.dynamic_quant(x, dst_type=E4M3, quant_mode="perchannel"),
    "dynamic_block_quant": lambda x: ops.dynamic_block_quant(x, dst_type=E4M3, row_block_size=128),
    "quantize": lambda x: (ops.quantize(x, SCALE, None, 290),),
    "quant_dequant_mxfp4": lambda x: (ops.quant_dequant_mxfp4(x),),
    "cast_hifloat8": lambda x: (ops.cast_hifloat8(x),),
    "cast_e2m1": lambda x: (ops.cast_e2m1(x),),
}


def allocated(run) -> int:
    """Bytes that torch's CPU allocator hands out during ``run()``, whether given back or not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        results = run()
    changes = [
        event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    del results
    return sum(change for change in changes if change > 0)


def test_the_measurement_sees_memory_that_is_given_back():
    x = normal((256, 512), torch.float32)
    assert allocated(lambda: (x + 1).sum()) >= x.nbytes


@pytest.mark.parametrize("name", QUANTIZERS)
def test_no_more_than_the_results_is_allocated(name):
    x = normal((256, 512))
    results = QUANTIZERS[name](x)
    wanted = sum(result.nbytes for result in results)
    assert wanted > 0
    assert wanted <= allocated(lambda: QUANTIZERS[name](x)) <= wanted + 64 * (len(results) + 2)


def resident(which: str) -> int:
    """Bytes of this process in memory now (VmRSS) or at most since the last reset (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(which))


def most_resident(run) -> int:
    """By how much ``run()`` makes the process grow at most."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    results = run()
    grown = resident("VmHWM") - before
    del results
    return grown


@pytest.fixture(scope="module")
def large():
    x = torch.ones(4096, 4096, dtype=torch.bfloat16)
    try:
        seen = most_resident(lambda: x.float().sum())
    except (OSError, StopIteration):
        pytest.skip("this kernel does not tell a process's largest size")
    assert seen >= 2 * x.nbytes * 0.9
    return x


@pytest.mark.parametrize("name", QUANTIZERS)
def test_nor_do_the_kernels_take_memory_of_their_own(name, large):
    """At most 6 MiB beyond the results (stacks, huge pages); half a byte an element would be 8."""
    wanted = sum(result.nbytes for result in QUANTIZERS[name](large))
    assert most_resident(lambda: QUANTIZERS[name](large)) <= wanted + (6 << 20)
