"""An export that is killed leaves nothing that looks whole; one that runs holds one shard in memory."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_lowp.export import ExportError, writer
from mindspeed_lowp.export.__main__ import main

from .models import CONFIG, llama_weights, load_export, save_folder

FORMAT = ["--format", "mxfp4-pack-quantized"]

# Kills itself when half of the second shard is written.
KILLED = """
import os, signal, sys
from mindspeed_lowp.export import writer
from mindspeed_lowp.export.__main__ import main

save, files = writer._save, []

def save_half(file, tensors):
    save(file, tensors)
    files.append(file)
    if len(files) == 2:
        os.truncate(file, file.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

writer._save = save_half
main(sys.argv[1:])
"""


def python(script, *arguments, **environment):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_export_leaves_the_output_as_it_was(tmp_path):
    folder = save_folder(tmp_path / "model", llama_weights(), shards=3)
    output, partial = tmp_path / "output", tmp_path / "output.partial"
    flags = [*FORMAT, "--load", str(folder), "--output", str(output)]
    assert python(KILLED, *flags).returncode == -signal.SIGKILL
    assert not output.exists()
    assert not (partial / "config.json").exists()  # no program takes it for a model
    with pytest.raises(SystemExit, match=r"output.partial was left by an export that was interrupted"):
        main(flags)
    main([*flags, "--force"])
    before = contents(output)
    assert len(load_export(output)[1]) == 14

    assert python(KILLED, *flags, "--force").returncode == -signal.SIGKILL
    assert contents(output) == before
    main([*flags, "--force"])
    assert contents(output) == before and not partial.exists()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError("no space left")])
def test_an_export_that_fails_cleans_up(tmp_path, monkeypatch, interruption):
    folder = save_folder(tmp_path / "model", llama_weights())

    def fail(file, tensors):
        raise interruption

    monkeypatch.setattr(writer, "_save", fail)
    with pytest.raises(type(interruption) if isinstance(interruption, OSError) else interruption):
        main([*FORMAT, "--load", str(folder), "--output", str(tmp_path / "output")])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_old_output_comes_back_if_the_new_cannot_take_its_name(tmp_path, monkeypatch):
    output, partial = tmp_path / "output", tmp_path / "output.partial"
    for folder in (output, partial):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    rename = type(output).rename

    def refuse(self, target):
        if self == partial:
            raise OSError("busy")
        return rename(self, target)

    monkeypatch.setattr(type(output), "rename", refuse)
    with pytest.raises(OSError, match="busy"):
        writer._replace(partial, output)
    assert contents(output) == {"config.json": b"output"}


def test_what_is_no_export_stays_even_with_force(tmp_path):
    output = tmp_path / "output"
    output.write_text("mine")
    with pytest.raises(ExportError, match="is no earlier export"), writer._whole_folder(output, force=True):
        pass
    assert output.read_text() == "mine"
    folder = save_folder(tmp_path / "model", llama_weights())
    before = contents(folder)
    with pytest.raises(ExportError, match="is no earlier export"), writer._whole_folder(folder, force=True):
        pass
    assert contents(folder) == before


# Prints how much more memory was resident at most with the second model than with the first.
MEASURED = """
import sys
from mindspeed_lowp.export.__main__ import main

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

peaks = []
for model in sys.argv[1:]:
    main(["--format", "mxfp4-pack-quantized", "--load", model, "--output", model + "-exported"])
    peaks.append(peak())
print("growth", peaks[1] - peaks[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_number_of_shards(tmp_path):
    shard = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(1024, 2048).bfloat16() for i in range(8)}
    size = sum(weight.nbytes for weight in shard.values())  # 32 MiB
    for name, shards in {"small": 1, "large": 6}.items():
        folder = save_folder(tmp_path / name, llama_weights(), config=CONFIG)
        index = {"weight_map": dict.fromkeys(llama_weights(), "model.safetensors")}
        for i in range(shards):
            part = {key.replace("layers.", f"layers.1{i}"): weight for key, weight in shard.items()}
            save_file(part, folder / f"{i}.safetensors")
            index["weight_map"] |= dict.fromkeys(part, f"{i}.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    # What is freed goes back at once, as it does with weights of real models: no fragments are counted.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    run = python(MEASURED, tmp_path / "small", tmp_path / "large", **malloc)
    assert run.returncode == 0, run.stderr
    growth = int(run.stdout.rpartition("growth ")[2])
    assert growth < 0.5 * size, f"{growth / size:.2f} shards of {size >> 20} MiB"
