"""Which checkpoint an empty tracker file is mended to."""

import os
from pathlib import Path

import pytest

from mindspeed_lowp.features.checkpoint_tracker import read_metadata_wrapper


def make(folder: Path, *files: str, at: int) -> None:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (at, at))


def read(tracker: str) -> str:
    return Path(tracker).read_text()


@pytest.mark.parametrize("last", ["metadata.json", "mp_rank_00/model_optim_rng.pt"])
def test_the_checkpoint_that_was_completed_last(tmp_path, monkeypatch, last):
    monkeypatch.setattr("megatron.training.print_rank_0", print)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.touch()
    assert read_metadata_wrapper(read)(str(tracker)) == ""  # there is none

    make(tmp_path / "iter_0000006", "common.pt", "__0_0.distcp", ".metadata", at=6)  # still being written
    make(tmp_path / "iter_0000004_kept", last, at=5)  # a copy
    assert read_metadata_wrapper(read)(str(tracker)) == ""

    make(tmp_path / "iter_0000004", last, at=3)  # of an earlier run, which went further
    make(tmp_path / "iter_0000002", last, at=4)
    (tmp_path / "iter_0000004" / "deleted").touch()  # in the background: changes the folder's own time
    assert read_metadata_wrapper(read)(str(tracker)) == "2"
    assert sorted(path.name for path in tmp_path.glob("latest*")) == [tracker.name]
