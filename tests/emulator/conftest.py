"""Installing the emulator changes the process for good, so the tests install it in processes of their own.

The operators by themselves are plain functions, tested in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import pytest
import torch

from mindspeed_lowp import emulator, runtime

# Where there is a real one, the emulator stands aside.
collect_ignore_glob = ["test_*.py"] if runtime.has_accelerator() or find_spec("torch_npu") else []


def _install() -> None:
    torch.set_num_threads(1)
    emulator.install()


@pytest.fixture(scope="session")
def emulated() -> Iterator[Callable[..., None]]:
    """Calls a module-level function in a process where the emulator is installed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_install) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()
