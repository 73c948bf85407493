"""Checks in processes of their own, in which the runtime is installed and Megatron initialized."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mindspeed_lowp import runtime

mp.get_context("forkserver").set_forkserver_preload(["tests.trainer_preload"])


def on_ranks(ranks: int, function: Callable[..., None], folder: Path, *args: Any, **parallel: int) -> None:
    """Call a module's function(*args) on so many ranks, which are one tensor-parallel group.

    parallel: other sizes for `initialize_model_parallel`.
    """
    arguments = (ranks, function, str(folder / "store"), args, parallel)
    mp.start_processes(_enter, arguments, nprocs=ranks, start_method="forkserver")


def _enter(rank: int, ranks: int, function: Callable, store: str, args: tuple, parallel: dict) -> None:
    runtime.install()  # where the process was forked from one that has not done it
    from megatron.core import parallel_state, tensor_parallel

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("nccl", f"file://{store}", rank=rank, world_size=ranks)
    try:
        parallel_state.initialize_model_parallel(**{"tensor_model_parallel_size": ranks, **parallel})
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        function(*args)
    finally:
        dist.destroy_process_group()
