"""A run that died while it wrote latest_checkpointed_iteration.txt can be resumed.

Megatron empties that file and writes it anew, once a checkpoint is complete. Killed in between, it leaves an
empty file, and refuses to load anything from then on.
"""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_lowp.features.base import Feature


class CheckpointTrackerFeature(Feature):
    """Always on: there is nothing to choose."""

    def __init__(self) -> None:
        super().__init__("checkpoint-tracker", optimization_level=0)

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        patch_manager.register_patch("megatron.training.checkpointing.read_metadata", read_metadata_wrapper)


def read_metadata_wrapper(read_metadata: Callable[[str], tuple[int, bool]]) -> Callable[..., Any]:
    """Mend an empty tracker file first: emptied when the latest checkpoint had just become complete."""

    @functools.wraps(read_metadata)
    def wrapper(tracker: str) -> tuple[int, bool]:
        path = Path(tracker)
        if path.is_file() and not path.read_text().strip():
            _mend(path)
        return read_metadata(tracker)

    return wrapper


def _mend(tracker: Path) -> None:
    from megatron.training import print_rank_0

    # Not those that an asynchronous save is still writing, nor copies under other names.
    complete = [
        (when, folder)
        for folder in tracker.parent.glob("iter_*")
        if _number(folder).isdigit() and (when := _completed(folder)) is not None
    ]
    if not complete:
        return
    _, latest = max(complete)
    print_rank_0(f"{tracker} is empty: a run was stopped while writing it; the latest checkpoint is {latest}")
    written = tracker.with_suffix(f".{os.getpid()}")  # every rank may come here: each writes the same
    written.write_text(str(int(_number(latest))))
    written.replace(tracker)


def _number(folder: Path) -> str:
    return folder.name.removeprefix("iter_")


def _completed(folder: Path) -> float | None:
    """When the checkpoint became complete; None when nothing says so.

    `torch_dist` writes metadata.json last. `torch` has no such file, but does not save asynchronously.
    """
    last = folder / "metadata.json"
    files = [last] if last.is_file() else list(folder.glob("mp_rank_*/*.pt"))
    return max((file.stat().st_mtime for file in files), default=None)
