"""The runtime changes the process it is installed in, so the tests use it in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from mindspeed_lowp import runtime

# Where there is an accelerator the runtime stands aside.
collect_ignore_glob = ["test_*.py"] if runtime.has_accelerator() else []


def _install() -> None:
    torch.set_num_threads(1)
    runtime.install()


@pytest.fixture(scope="session")
def emulated() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Calls a module-level function in a process where the runtime is installed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_install) as process:
        yield lambda function: process.submit(function).result()
