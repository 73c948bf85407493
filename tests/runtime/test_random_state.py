from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


def check_two_generators() -> None:
    torch.manual_seed(1)
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(torch.cuda.get_rng_state(), device)

    list(DataLoader(range(8), batch_size=2))
    assert torch.equal(torch.get_rng_state(), host)
    list(DataLoader(range(8), batch_size=2, shuffle=True))
    assert not torch.equal(torch.get_rng_state(), host)
    second = torch.rand(4, device="cuda")

    torch.cuda.manual_seed(1)
    assert torch.equal(torch.rand(8, device="cuda"), torch.cat([first, second]))
    torch.cuda.set_rng_state(device)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    assert torch.cuda.initial_seed() == 1


def test_host_draws_leave_the_device_generator_alone(emulated) -> None:
    emulated(check_two_generators)


def check_tracker() -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker

    initialize_rng_tracker(force_reset=True)
    tracker = get_cuda_rng_tracker()
    tracker.add("mine", 7)
    torch.cuda.manual_seed(1)
    expected = torch.Generator().manual_seed(7)
    for _ in range(2):  # each fork goes on where the last one stopped
        with tracker.fork("mine"):
            assert torch.equal(torch.rand(32), torch.rand(32, generator=expected))
    assert torch.equal(torch.rand(32), torch.rand(32, generator=torch.Generator().manual_seed(1)))


def test_tracker_of_megatron(emulated) -> None:
    emulated(check_tracker)


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5) * x


def check_recomputation() -> None:
    from megatron.core.tensor_parallel.random import CheckpointFunction, initialize_rng_tracker

    initialize_rng_tracker(force_reset=True)

    def gradient(function) -> torch.Tensor:
        torch.cuda.manual_seed(3)
        x = torch.ones(1000, requires_grad=True)
        y = function(x)
        torch.rand(5)  # what comes between forward and backward
        y.sum().backward()
        return x.grad

    expected = gradient(dropped)
    assert 400 < (expected == 4.0).sum() < 600
    assert torch.equal(gradient(lambda x: CheckpointFunction.apply(dropped, False, x)), expected)
    for reentrant in (True, False):
        assert torch.equal(gradient(lambda x, r=reentrant: checkpoint(dropped, x, use_reentrant=r)), expected)


def test_recomputation_replays_dropout(emulated) -> None:
    emulated(check_recomputation)
