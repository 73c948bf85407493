"""A run killed while it saves: the checkpoint before, or the one just completed, goes on to the bit."""

import functools
import io
import os
import shutil
import signal
import sys

import pytest
import torch

from ..trainer import MXFP8, succeeded, train

FLAGS = [*MXFP8, "--num-layers", "1", "--train-iters", "5"]
SAVE = ["--save", "checkpoint", "--save-interval", "2"]
TRACKER = "latest_checkpointed_iteration.txt"
HALF = "half a file"
# The n-th file or folder that is opened or made for the checkpoint, and what no such event marks.
MOMENTS = [("torch_dist", moment) for moment in (1, 2, 3, 4, 5, TRACKER)]
MOMENTS += [("torch", moment) for moment in (1, 2, HALF, TRACKER)]


def die(at: int | str, model: torch.nn.Module) -> None:
    """Be killed at this moment of the save after four steps."""
    seen, save = 0, torch.save

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event not in ("open", "os.mkdir", "os.rename"):
            return
        path = str(arguments[0])
        if path.endswith(TRACKER) and arguments[1] == "w" and os.path.exists("checkpoint/iter_0000004"):
            if at == TRACKER:
                os.truncate(path, 0)  # what opening it does first
                os.kill(os.getpid(), signal.SIGKILL)
        elif "iter_0000004" in path:
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    def save_half(state: object, path: object) -> None:
        whole = io.BytesIO()
        save(state, whole)
        with open(path, "wb") as file:
            file.write(whole.getvalue()[: whole.tell() // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    if at == HALF:
        torch.save = lambda state, path: (save_half if "iter_0000004" in str(path) else save)(state, path)


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    """By format: the run that nothing stopped, and a folder with its checkpoint after two steps."""

    @functools.cache
    def run_through(ckpt_format):
        folder = tmp_path_factory.mktemp(ckpt_format)
        [run] = succeeded(train(folder, [*FLAGS, "--ckpt-format", ckpt_format, *SAVE]))
        shutil.rmtree(folder / "checkpoint" / "iter_0000004")
        (folder / "checkpoint" / TRACKER).write_text("2")
        return run, folder / "checkpoint"

    return run_through


@pytest.mark.parametrize(("ckpt_format", "moment"), MOMENTS)
def test_training_goes_on(through, tmp_path, ckpt_format, moment):
    uninterrupted, checkpoint = through(ckpt_format)
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    flags = [*FLAGS, "--ckpt-format", ckpt_format, *SAVE, "--load", "checkpoint"]
    [killed] = train(tmp_path, flags, prepare=functools.partial(die, moment))
    assert killed.exit_code == -signal.SIGKILL
    [resumed] = succeeded(train(tmp_path, flags))
    assert resumed.losses == uninterrupted.losses[4 if moment == TRACKER else 2 :]
    for name, parameter in uninterrupted.last.items():
        assert torch.equal(parameter, resumed.last[name]), name
    if moment in (3, HALF):  # checkpoint 4 was saved over what was left of it
        [again] = succeeded(train(tmp_path, [*flags, "--ckpt-step", "4"]))
        assert again.losses == uninterrupted.losses[4:]
