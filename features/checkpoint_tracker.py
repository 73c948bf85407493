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

    latest = max(tracker.parent.glob("iter_*"), key=_last_change, default=None)
    if latest is None:
        return
    iteration = int(latest.name.removeprefix("iter_"))
    print_rank_0(f"{tracker} is empty: a run was stopped while writing it; the latest checkpoint is {latest}")
    written = tracker.with_suffix(f".{os.getpid()}")  # every rank may come here: each writes the same
    written.write_text(str(iteration))
    written.replace(tracker)


def _last_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
