"""Compare training runs by their logs: a table in the terminal, and the loss curves as a PNG.

    python scripts/compare_runs.py --plot loss.png bf16=bf16.log mxfp8=mxfp8.log

The first run is the one that the others are compared with. Logs are what Megatron's trainer and
scripts/pretrain_gpt.py print.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

_STEP = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)")
_SAVED = re.compile(r"saved for backward in one micro-batch: (\d+) bytes")


@dataclass
class Run:
    """What a log tells: loss and milliseconds of each logged step, and the bytes kept for backward."""

    name: str
    steps: list[int]
    losses: list[float]
    milliseconds: list[float]
    saved_bytes: int | None


def read_log(name: str, path: Path) -> Run:
    """Parse a log; ends the program where it holds no training steps."""
    text = path.read_text() if path.is_file() else sys.exit(f"{path}: no such file")
    rows = _STEP.findall(text)
    if not rows:
        sys.exit(f"{path}: no training step in this log; did the run stop early?")
    saved = _SAVED.search(text)
    return Run(
        name=name,
        steps=[int(step) for step, _, _ in rows],
        losses=[float(loss) for _, _, loss in rows],
        milliseconds=[float(ms) for _, ms, _ in rows],
        saved_bytes=int(saved[1]) if saved else None,
    )


def print_table(runs: list[Run]) -> None:
    first = runs[0]
    table = Table(title=f"after {first.steps[-1]} steps")
    table.add_column("run")
    for title in ("final loss", f"vs {first.name}", "saved for backward", "of", "ms per step", "of"):
        table.add_column(title, justify="right")
    for run in runs:
        # The first logged interval holds start-up, so the median of the others is the pace.
        pace, base_pace = (statistics.median(r.milliseconds[1:] or r.milliseconds) for r in (run, first))
        saved, share = "-", "-"
        if run.saved_bytes is not None and first.saved_bytes is not None:
            saved, share = f"{run.saved_bytes / 2**20:.2f} MiB", f"{run.saved_bytes / first.saved_bytes:.3f}"
        table.add_row(
            run.name,
            f"{run.losses[-1]:.5f}",
            f"{run.losses[-1] / first.losses[-1] - 1:+.3%}",
            saved,
            share,
            f"{pace:.0f}",
            f"{pace / base_pace:.2f}",
        )
    Console(width=110).print(table)


def write_markdown(runs: list[Run], path: Path) -> None:
    """Final losses and bytes kept for backward, which depend on no machine's speed."""
    first = runs[0]
    lines = [
        f"| run | loss after {first.steps[-1]} steps | against {first.name} | saved for backward | of |",
        "|---|---:|---:|---:|---:|",
    ]
    for run in runs:
        loss, saved = run.losses[-1], run.saved_bytes or 0
        lines.append(
            f"| {run.name} | {loss:.5f} | {loss / first.losses[-1] - 1:+.2%} | {saved / 2**20:.2f} MiB "
            f"| {saved / (first.saved_bytes or 1):.3f} |"
        )
    path.write_text("\n".join(lines) + "\n")


def plot(runs: list[Run], path: Path) -> None:
    """Loss curves above; below, the distance of each from the first, which the curves hide."""
    figure, (curves, distance) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for number, run in enumerate(runs):
        # Runs with equal losses lie on one another: dashes let the lower one show.
        style = {"linestyle": ("-", "-", (0, (4, 4)))[number % 3], "linewidth": 2}
        curves.plot(run.steps, run.losses, label=run.name, **style)
        pairs = zip(run.losses, runs[0].losses, strict=False)
        relative = [100 * (loss / base - 1) for loss, base in pairs]
        distance.plot(run.steps[: len(relative)], relative, **style)
    curves.set_ylabel("lm loss")
    curves.legend()
    curves.grid(alpha=0.3)
    distance.set_ylabel(f"% from {runs[0].name}")
    distance.set_xlabel("step")
    distance.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=LOG")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="where the loss curves go")
    parser.add_argument("--markdown", type=Path, metavar="MD", help="where a table without times goes")
    arguments = parser.parse_args()
    if any("=" not in run for run in arguments.runs):
        parser.error("each run is NAME=LOG, such as bf16=output/bf16.log")
    runs = [read_log(name, Path(path)) for name, path in (run.split("=", 1) for run in arguments.runs)]
    print_table(runs)
    if arguments.markdown:
        write_markdown(runs, arguments.markdown)
        print(f"table: {arguments.markdown}")
    if arguments.plot:
        plot(runs, arguments.plot)
        print(f"loss curves: {arguments.plot}")


if __name__ == "__main__":
    main()
