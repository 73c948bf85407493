"""Runs of the real trainer, each in a process forked from one that has Megatron imported already."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch

from mindspeed_lowp.recipes import Recipe, recipe_class, recipe_names

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"

MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --transformer-impl local
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --eval-iters 0 --eval-interval 1000
    --attention-dropout 0 --hidden-dropout 0 --num-workers 0
""".split()
DEADLINE = 230  # seconds until a run that hangs says where, and is ended
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8".split()
MOE = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear".split()

_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(["tests.trainer_preload"])


@dataclass
class Run:
    """What one rank of a run left: its exit code, everything it printed, and what it computed."""

    exit_code: int
    output: str
    losses: list[float] = field(default_factory=list)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    sharded: set[str] = field(default_factory=set)
    quantized: list[dict[int, int]] = field(default_factory=list)  # weights by axis, in each step


def train(
    folder: Path,
    flags: list[str],
    ranks: int = 1,
    precision: str = "--bf16",
    prepare: Callable[[torch.nn.Module], None] | None = None,
) -> list[Run]:
    """Train with `MODEL` and `flags`, in fp32 where `precision` is empty; what each rank left.

    prepare: gets the model before the first step; a function that can be pickled.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    records = [folder / f"record{rank}.pt" for rank in range(ranks)]
    processes = []
    for rank, record in enumerate(records):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        if ranks > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        all_flags = [*MODEL, *precision.split(), *flags]
        arguments = (record, environment, all_flags, folder, prepare)
        processes.append(_forkserver.Process(target=_run, args=arguments))
        processes[-1].start()
    try:
        for process in processes:
            process.join(timeout=DEADLINE + 10)
            if process.is_alive():
                process.kill()
                process.join()
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started, where it was killed itself
    return [
        Run(
            process.exitcode,
            _output(record).read_text(errors="replace"),
            **(torch.load(record) if record.exists() else {}),
        )
        for process, record in zip(processes, records, strict=True)
    ]


def succeeded(runs: list[Run]) -> list[Run]:
    """The runs, after a look at their exit codes."""
    for run in runs:
        assert run.exit_code == 0, run.output[-4000:]
    return runs


def _output(record: Path) -> Path:
    return record.with_suffix(".log")


def _run(
    record_path: Path, environment: dict[str, str], flags: list[str], folder: Path, prepare: Callable | None
) -> None:
    os.setpgid(0, 0)
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # for the data loaders
    spawn.get_preparation_data = _without_main(spawn.get_preparation_data)
    with open(_output(record_path), "w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        faulthandler.dump_traceback_later(DEADLINE, file=output)
        try:
            _train(record_path, flags, prepare)
        except SystemExit as stop:
            # What the interpreter does at the end of a script.
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(stop.code or 0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def _without_main(get_preparation_data: Callable) -> Callable:
    """Spare the process that Megatron spawns at every save, for a queue, four seconds of imports."""

    def wrapper(name: str) -> dict:
        data = get_preparation_data(name)
        data.pop("init_main_from_path", None)
        return data

    return wrapper


def count_quantized_weights() -> Counter[int]:
    """From now on, how often any recipe quantizes a weight, by axis."""
    counts: Counter[int] = Counter()

    def counted(quantize: Callable) -> Callable:
        def wrapper(self: Recipe, x: torch.Tensor, role: str, axes: Sequence[int]) -> dict:
            if role == "weight":
                counts.update(axes)
            return quantize(self, x, role, axes)

        return wrapper

    recipes = map(recipe_class, recipe_names())
    for recipe in {base for cls in recipes for base in cls.__mro__ if "quantize" in vars(base)}:
        recipe.quantize = counted(recipe.quantize)
    return counts


def _train(record_path: Path, flags: list[str], prepare: Callable | None) -> None:
    from megatron.training import training

    record: dict[str, Any] = {"losses": [], "quantized": []}
    quantized = count_quantized_weights()
    train_step = training.train_step

    def parameters(model: list[torch.nn.Module], value: Callable = torch.Tensor.detach) -> dict:
        return {name: value(p).clone() for name, p in model[0].named_parameters()}

    def recorded(forward: Any, data: Any, model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
        if "first" not in record:
            if prepare is not None:
                prepare(model[0])
            record["first"] = parameters(model)
            named = model[0].named_parameters()
            record["sharded"] = {n for n, p in named if getattr(p, "tensor_model_parallel", False)}
        quantized.clear()
        result = train_step(forward, data, model, *args, **kwargs)
        record["quantized"].append(dict(quantized))
        if "lm loss" in result[0]:  # on the last pipeline stage
            record["losses"].append(float(result[0]["lm loss"]))
        record["last"] = parameters(model)
        record["grads"] = parameters(model, lambda p: p.main_grad)
        return result

    training.train_step = recorded
    sys.argv = [str(SCRIPT), *flags]
    with contextlib.redirect_stdout(os.fdopen(1, "w", buffering=1)):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    torch.save(record, record_path)
