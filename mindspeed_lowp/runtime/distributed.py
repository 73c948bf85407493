"""NCCL process groups, and HCCL ones, become gloo ones.

Gloo has every collective that Megatron calls (reduce-scatter, coalesced and asynchronous ones included),
for every dtype but the float8 ones.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor


def install() -> None:
    """Redirect the creation of process groups, and what NCCL and gloo do differently."""
    wrappers = {
        "init_process_group": _on_gloo,
        "new_group": _on_gloo,
        "isend": _holding_memory,
        "all_to_all_single": _with_plain_sizes,
    }
    for name, wrap in wrappers.items():
        wrapped = wrap(getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)
    # Megatron's names for these collectives are PyTorch's former ones.
    warnings.filterwarnings(
        "ignore",
        r"`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        FutureWarning,
    )


def _holding_memory(isend: Callable[..., Any]) -> Callable[..., Any]:
    """Let a send keep the memory it reads, as NCCL's does by the order of its stream.

    Megatron's interleaved pipeline gives a tensor other memory right after it started sending it.
    """

    @functools.wraps(isend)
    def wrapper(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.detach(), *args, **kwargs)

    return wrapper


def _with_plain_sizes(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Split sizes may be tensors: Megatron moves them to the host only from another device."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, Tensor) else value

    @functools.wraps(all_to_all)
    def wrapper(output: Tensor, input: Tensor, *sizes: Any, **options: Any) -> Any:
        options = {name: plain(value) for name, value in options.items()}
        return all_to_all(output, input, *map(plain, sizes), **options)

    return wrapper


def _on_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(create)

    @functools.wraps(create)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if any(name in (arguments.get("backend") or "") for name in ("nccl", "hccl")):
            arguments["backend"] = "gloo"
        arguments.pop("pg_options", None)  # theirs
        arguments.pop("device_id", None)  # the device that NCCL is to bind to
        meets = arguments.get("store") is not None or arguments.get("init_method") is not None
        if arguments.get("world_size") == 1 and not meets and "MASTER_ADDR" not in os.environ:
            arguments["store"] = dist.HashStore()  # a single process, not started by torchrun
        return create(**arguments)

    return wrapper
