from __future__ import annotations

import functools
import os
import time

import pytest
import torch

from mindspeed_lowp import runtime
from mindspeed_lowp.runtime.device import host_device


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 1), 0])
def test_cuda_devices_stand_for_the_host(device: object) -> None:
    assert torch.device(host_device(device)) == torch.device("cpu")


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "cpu", None, torch.float32])
def test_everything_else_stays(device: object) -> None:
    assert host_device(device) is device


def check_installation() -> None:
    assert runtime.is_installed() and not runtime.has_accelerator()
    runtime.install()  # once more: nothing happens, and nothing breaks
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0


def test_installation(emulated) -> None:
    assert not runtime.is_installed()  # in this process
    emulated(check_installation)


def check_factories() -> None:
    device = torch.cuda.current_device()
    x = torch.full((2,), 3.0, device="cuda", pin_memory=True)
    for y in (
        torch.ones(2, device=device),
        torch.tensor([1.0, 1.0], device=torch.device("cuda")),
        torch.ones_like(x, device="cuda:0"),
        x.new_ones(2, device=device),
        (x - 2).to(device),
        (x - 2).to(device="cuda", dtype=torch.float64),
        (x - 2).cuda(non_blocking=True),
    ):
        assert y.tolist() == [1.0, 1.0] and y.device.type == "cpu"
    with torch.device("meta"):
        assert torch.empty(3).is_meta
    assert torch.nn.Linear(2, 2).cuda().to("cuda").to_empty(device=device).weight.device.type == "cpu"
    assert x.to("meta").is_meta and x.to(torch.bfloat16).dtype == torch.bfloat16


def test_factories_and_moves(emulated) -> None:
    emulated(check_factories)


def check_types() -> None:
    x = torch.ones(1)
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type(torch.float16).dtype == x.type("torch.cuda.HalfTensor").dtype == torch.float16


def test_types_are_named_after_cuda(emulated) -> None:
    emulated(check_types)


def check_events() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        time.sleep(0.05)
    torch.cuda.current_stream().record_event(end)
    torch.cuda.synchronize()
    assert 50 <= start.elapsed_time(end) < 5000
    assert torch.cuda.max_memory_allocated() > 50 * 2**20


def test_events_measure_time(emulated) -> None:
    emulated(check_events)


def check_single_process_groups(folder: str) -> None:
    import torch.distributed as dist

    def runs() -> bool:
        dist.all_reduce(x := torch.ones(1))
        dist.destroy_process_group()
        return x.item() == 1

    os.environ.pop("MASTER_ADDR", None)
    dist.init_process_group("nccl", rank=0, world_size=1)  # no address needed
    assert runs()
    dist.init_process_group("nccl", f"file://{folder}/store", rank=0, world_size=1)
    assert runs()


def test_one_process_needs_no_address_and_may_have_one(emulated, tmp_path) -> None:
    emulated(functools.partial(check_single_process_groups, str(tmp_path)))
