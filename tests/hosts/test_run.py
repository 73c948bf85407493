"""`python -m mindspeed_lowp.run`: a script runs as under python itself, the adaptor in front."""

import os
import subprocess
import sys
from types import ModuleType

import pytest

from mindspeed_lowp import run

SCRIPT = """
import os, sys
import beside
print(__name__, sys.argv[1:], os.path.basename(sys.argv[0]), os.path.samefile(sys.path[0], beside.FOLDER))
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("import os\nFOLDER = os.path.dirname(os.path.abspath(__file__))\n")
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def run_here(monkeypatch):
    """Runs main() in this process, with an adaptor that does nothing."""
    monkeypatch.setitem(sys.modules, "mindspeed_lowp.adaptor", ModuleType("mindspeed_lowp.adaptor"))
    monkeypatch.setattr("sys.path", ["", *sys.path])

    def run_here(*arguments):
        monkeypatch.setattr("sys.argv", ["run.py", *map(str, arguments)])
        run.main()

    yield run_here
    sys.modules.pop("beside", None)


def test_arguments_and_path_are_those_of_the_script(run_here, script, capsys):
    run_here(script, "--help", "-x", "a b")
    assert capsys.readouterr().out == "__main__ ['--help', '-x', 'a b'] train.py True\n"


def test_link_to_a_script_resolves_as_under_python(run_here, script, tmp_path, capsys):
    link = tmp_path / "link.py"
    link.symlink_to(script)
    run_here(link)
    assert capsys.readouterr().out == "__main__ [] link.py True\n"


def test_exit_codes_and_exceptions_pass_through(run_here, script):
    script.write_text("import sys; sys.exit(7)")
    with pytest.raises(SystemExit) as info:
        run_here(script)
    assert info.value.code == 7
    script.write_text("raise KeyError('of the script')")
    with pytest.raises(KeyError, match="of the script"):
        run_here(script)


def test_missing_script(run_here, tmp_path):
    with pytest.raises(SystemExit, match=r"^error: no such script: gone.py \(looked in .*\); usage: "):
        run_here("gone.py", "--flag")
    with pytest.raises(SystemExit, match="no such script"):
        run_here(tmp_path)


def test_usage(run_here, capsys):
    run_here("--help")
    assert capsys.readouterr().out.startswith("usage: python -m mindspeed_lowp.run [--emulate-npu] SCRIPT")
    with pytest.raises(SystemExit) as info:
        run_here()
    assert info.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")


MEGATRON_SCRIPT = """
from megatron.training.arguments import parse_args, validate_args
ADAPTOR
args = validate_args(parse_args(), {})
print("parsed", args.fp8, args.fp8_recipe, args.mxfp8_defer_backward_quant)
"""

FLAGS = (
    "--transformer-impl local --num-layers 1 --hidden-size 32 --num-attention-heads 1 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --mock-data --bf16 --fp8-format e4m3 "
    "--mxfp8-defer-backward-quant"
).split()


def python(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_script_that_imports_megatron_before_the_adaptor(script):
    script.write_text(MEGATRON_SCRIPT.replace("ADAPTOR", "import mindspeed_lowp.adaptor"))
    result = python(script, *FLAGS, "--fp8-recipe", "mxfp8")
    assert result.stdout.splitlines()[-1] == "parsed e4m3 mxfp8 True", result.stderr


def test_mistake_under_torchrun(script):
    script.write_text(MEGATRON_SCRIPT.replace("ADAPTOR", ""))
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "mindspeed_lowp.run"]
    result = python(*launch, script, *FLAGS, "--fp8-recipe", "tensorwise")
    assert result.returncode != 0
    assert "error: --mxfp8-defer-backward-quant works with the recipe mxfp8 only" in result.stderr
    assert "train.py" not in result.stderr.split("error: ")[0]  # no traceback of the script before it


def test_emulated_npu(script, tmp_path):
    script.write_text("import sys, torch_npu; print(sys.argv[1:], torch_npu.npu.get_device_name())")
    result = subprocess.run(
        [sys.executable, "-m", "mindspeed_lowp.run", "--emulate-npu", str(script), "--emulate-npu"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == "['--emulate-npu'] Ascend950PR_9599\n", result.stderr
