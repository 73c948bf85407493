"""What a `torch_dist` checkpoint of Megatron holds, read without Megatron, and whether two hold the same."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

# How the run was started, which need not be the same.
_OF_THE_RUN = ("args", "rerun_state_machine")


def contents(folder: Path) -> dict[str, Any]:
    """Every tensor, whole, and every object, by key: random states, histories, the optimizer's settings."""
    reader = dcp.FileSystemReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
        for key, entry in entries.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    common = torch.load(folder / "common.pt", weights_only=False)
    return state | {f"common.{key}": value for key, value in common.items() if key not in _OF_THE_RUN}


def assert_same(a: Any, b: Any, where: str = "checkpoint") -> None:
    """Equal to the last bit, at any depth."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, io.BytesIO):
        assert_same(*(torch.load(io.BytesIO(x.getvalue()), weights_only=False) for x in (a, b)), where)
    elif hasattr(a, "tolist"):
        assert a.tolist() == b.tolist(), where
    else:
        assert a == b, where
