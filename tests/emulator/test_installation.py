"""What code written for Ascend finds: `torch_npu`, `torch.npu`, devices, and what it is told is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


def check_torch_npu() -> None:
    import torch_npu
    from torch_npu.npu import _lazy_call
    from torch_npu.utils import collect_env

    from mindspeed_lowp import emulator, ops

    emulator.install()  # once more: nothing happens
    assert sys.modules["torch_npu"] is torch_npu and emulator.is_installed()
    assert torch_npu.npu is torch.npu
    codes = torch_npu.hifloat8, torch_npu.float8_e8m0fnu, torch_npu.float4_e2m1fn_x2
    assert codes == (290, 293, 296)
    assert torch_npu.npu_dynamic_mx_quant is ops.dynamic_mx_quant
    assert torch.qint8 in torch_npu.unsupported_dtype
    assert os.path.isfile(torch_npu.__file__)
    called = []
    _lazy_call(lambda: called.append(1))
    assert called == [1] and isinstance(collect_env.get_cann_version(), str)
    assert torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options().hccl_config == {}


def test_torch_npu(emulated):
    emulated(check_torch_npu)


def check_device() -> None:
    assert torch.npu.is_available() and torch.npu.device_count() == 1
    assert type(torch.npu.current_device()) is int
    device = torch.device("npu", 0)
    assert device.type == "npu" and torch.get_device_module("npu") is torch.npu
    for x in (
        torch.ones(2, device="npu"),
        torch.ones(2, device=device),
        torch.ones(2).npu(),
        torch.ones(2).to("npu:0"),
        torch.nn.Linear(1, 2).npu().to(device).weight,
        torch.tensor([1, 2], device=torch.npu.current_device()),
    ):
        assert x.device.type == "cpu" and len(x) == 2
    assert torch.equal(torch.npu.FloatTensor([1.5]), torch.tensor([1.5]))
    with torch.npu.stream(torch.npu.Stream()):
        torch.npu.current_stream().wait_stream(torch.npu.default_stream())
    torch.npu.synchronize()
    assert torch.npu.memory_allocated() > 0


def test_device(emulated):
    emulated(check_device)


def check_random_state() -> None:
    torch.npu.manual_seed(3)
    state = torch.npu.get_rng_state()
    first = torch.rand(3, device="npu")
    torch.cuda.set_rng_state(state)  # the same device by its other name
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.npu.default_generators[0].set_state(state)
    assert torch.equal(torch.rand(3), first)


def test_random_state_is_that_of_the_emulated_device(emulated):
    emulated(check_random_state)


def check_backward() -> None:
    x = torch.ones(3, device="npu", requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    acc = torch.ones(2, 2)
    acc.addmm_(torch.full((2, 1), 3.0).bfloat16(), torch.ones(1, 2).bfloat16())
    assert acc.eq(4).all() and acc.dtype == torch.float32
    torch.distributed.init_process_group("hccl", rank=0, world_size=1)
    torch.distributed.barrier()
    group = torch.distributed.new_group([0], backend="hccl")
    total = torch.ones(2)
    torch.distributed.all_reduce(total, group=group)
    assert torch.distributed.get_backend() == "gloo" and total.eq(1).all()
    torch.distributed.destroy_process_group()


def test_backward_sums_and_process_groups(emulated):
    emulated(check_backward)


def check_name() -> None:
    import torch_npu

    from mindspeed_lowp import emulator
    from mindspeed_lowp.ops.hardware import is_ascend950_or_newer, npu_name

    assert is_ascend950_or_newer(torch_npu.npu.get_device_name()) and npu_name().startswith("Ascend950")
    emulator.set_device_name("Ascend910B3")
    assert torch_npu.npu.get_device_name(0) == npu_name() == "Ascend910B3"
    emulator.install("Ascend950PR_9599")
    assert torch.npu.get_device_name() == "Ascend950PR_9599"


def test_name_of_the_device_can_be_set(emulated):
    emulated(check_name)


def check_missing() -> None:
    import torch_npu
    import torchair

    assert hasattr(torch_npu, "npu_moe_token_permute") and not hasattr(torch_npu, "npu_ffn")
    for module, name in (
        (torch_npu, "npu_ffn"),
        (torch_npu.npu, "set_aicore_num"),
        (torch_npu.utils, "register_asd_hook"),
        (torchair, "get_npu_backend"),
    ):
        with pytest.raises(NotImplementedError, match=rf"^{module.__name__}\.{name} is not emulated"):
            getattr(module, name)
    with pytest.raises(ImportError, match="npu_ffn"):
        from torch_npu import npu_ffn  # noqa: F401


def test_what_is_missing_says_its_name(emulated):
    emulated(check_missing)


def check_transfer() -> None:
    import torch_npu
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    assert torch.cuda.get_device_name() == torch_npu.npu.get_device_name()
    assert torch.cuda.FloatTensor([2]).dtype == torch.float32

    @torch.jit.script
    def untouched(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert not isinstance(untouched, torch.jit.ScriptFunction)


def test_transfer_to_npu(emulated):
    emulated(check_transfer)


def check_torchair() -> None:
    import torchair
    from torchair import register_fx_node_ge_converter
    from torchair.ge import DataType, Tensor, TensorSpec  # noqa: F401

    def converter():
        return 1

    assert register_fx_node_ge_converter("some operator")(converter) is converter
    assert torchair.ge.Tensor is Tensor


def test_torchair(emulated):
    emulated(check_torchair)


def check_profiler(folder: str) -> None:
    import torch_npu

    profiler = torch_npu.profiler
    config = profiler._ExperimentalConfig(
        aic_metrics=profiler.AiCMetrics.PipeUtilization, profiler_level=profiler.ProfilerLevel.Level1
    )
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        schedule=profiler.schedule(wait=0, warmup=0, active=1, repeat=1, skip_first=1),
        on_trace_ready=profiler.tensorboard_trace_handler(folder),
        experimental_config=config,
    ) as profile:
        for _ in range(3):
            torch.ones(8) @ torch.ones(8)
            profile.step()
    assert os.listdir(folder)


def test_profiler(emulated, tmp_path):
    emulated(check_profiler, str(tmp_path))


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments, *(("-c", code) if code else ())],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


ASK = "import mindspeed_lowp, sys, torch; print('torch_npu' in sys.modules and torch.npu.get_device_name())"


@pytest.mark.parametrize(
    ("value", "answer"),
    [("1", "Ascend950PR_9599"), ("Ascend910B3", "Ascend910B3"), ("0", "False"), ("", "False")],
)
def test_environment_variable(value, answer):
    result = run(ASK, LOWP_EMULATE_NPU=value)
    assert result.stdout.strip() == answer, result.stderr


def test_never_over_a_real_one(tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so')")
    search = {"PYTHONPATH": str(tmp_path)}
    result = run("from mindspeed_lowp import emulator; emulator.install()", **search)
    assert "RuntimeError: torch_npu is installed here, and the emulator would hide it" in result.stderr
    script = tmp_path / "train.py"
    script.write_text("")
    result = run("", "-m", "mindspeed_lowp.run", "--emulate-npu", str(script), **search)
    assert result.returncode == 1 and result.stderr.startswith("error: --emulate-npu: torch_npu is installed")
