"""Train a small GPT divided over processes in every way, by every recipe, and compare with the undivided run.

    python scripts/compare_parallelism.py --output output/parallelism

All runs start from one bf16 checkpoint, dense or with experts, and see the same batches. Writes dense.md and
moe.md: for each way and recipe how far the last loss is from that of the same recipe undivided, FAILED where
that is too far, or that the run is refused, and in what words; exits with 1 if anything FAILED. Runs that
finished are kept in results.json and not repeated. All 266, of up to four processes, take the better part
of an hour on two cores. Of the tests it borrows how they run the trainer.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.parallelism import EXPERTS, MODEL, RECIPES, WAYS, Way
from tests.trainer import Run, train

# Where only the order of sums differs bf16 strays by 2e-4, and recipes, whose codes jump with it, by 7e-4.
SAME, NEAR = 1e-3, 1e-2


class Comparison:
    """The runs of one output folder, each done once."""

    def __init__(self, output: Path, steps: int) -> None:
        self.output, self.steps = output, steps
        self.results_path = output / "results.json"
        self.results = json.loads(self.results_path.read_text()) if self.results_path.exists() else {}
        output.mkdir(parents=True, exist_ok=True)

    def run(self, model: str, way: str, recipe: str) -> dict:
        key = f"{model}/{way}/{recipe}/{self.steps}"
        if key not in self.results:
            runs = self._train(model, WAYS[way], RECIPES[recipe].split())
            failed = next((run for run in runs if run.exit_code != 0), None)
            losses = next((run.losses for run in runs if run.losses), [])
            refusal = re.search("^error: (.*)", failed.output, re.MULTILINE) if failed else None
            self.results[key] = {
                "losses": losses,
                "saved": [_saved_bytes(run) for run in runs],
                "failure": failed and failed.output[-2000:],
                "refusal": refusal and refusal[1],
            }
            kept = {k: r for k, r in self.results.items() if r["refusal"] or not r["failure"]}
            self.results_path.write_text(json.dumps(kept, indent=1))
            outcome = ("refused" if refusal else "FAILED") if failed else losses[-1]
            print(f"{key}: {outcome}", flush=True)
        return self.results[key]

    def _train(self, model: str, way: Way, recipe: list[str]) -> list[Run]:
        flags = [*MODEL, *(EXPERTS if model == "moe" else []), *way.flags.split(), *recipe]
        checkpoint = self._checkpoint(model)
        folder = Path(tempfile.mkdtemp(prefix="lowp-parallelism-"))
        flags += ["--train-iters", str(self.steps), "--load", str(checkpoint), "--finetune"]
        try:
            return train(folder, flags, ranks=way.ranks)
        finally:
            shutil.rmtree(folder)

    def _checkpoint(self, model: str) -> Path:
        """Where all runs start: one step of the undivided model in bf16."""
        checkpoint = (self.output / f"checkpoint-{model}").resolve()
        if not (checkpoint / "latest_checkpointed_iteration.txt").exists():
            flags = [*MODEL, *(EXPERTS if model == "moe" else []), "--train-iters", "1"]
            flags += ["--save", str(checkpoint), "--save-interval", "1"]
            with tempfile.TemporaryDirectory(prefix="lowp-parallelism-") as folder:
                [run] = train(Path(folder), flags)
            if run.exit_code != 0:
                sys.exit(run.output[-4000:])
        return checkpoint


def _saved_bytes(run: Run) -> int | None:
    _, found, rest = run.output.partition("saved for backward in one micro-batch: ")
    return int(rest.split()[0]) if found else None


def cell(way: Way, recipe: str, result: dict, undivided: dict) -> str:
    if recipe in way.refused:
        return "refused" if result["refusal"] else "FAILED: trained"
    if result["failure"] is not None or not result["losses"]:
        return "FAILED"
    if way == WAYS["undivided"]:
        return f"{result['losses'][-1]:.5f}"
    distance = result["losses"][-1] / undivided["losses"][-1] - 1
    passed = abs(distance) <= (NEAR if way.regroups else SAME)
    return "equal" if distance == 0 else f"{distance:+.3%}" + ("" if passed else " FAILED")


def table(comparison: Comparison, model: str) -> str:
    ways = {name: way for name, way in WAYS.items() if model in way.models}
    runs = {name: {recipe: comparison.run(model, name, recipe) for recipe in RECIPES} for name in ways}
    head = ["| | " + " | ".join(RECIPES) + " |", "|---|" + "---:|" * len(RECIPES)]

    def row(name: str, cells: Iterable[str]) -> str:
        return f"| {name} | {' | '.join(cells)} |"

    losses = [
        row(name, (cell(way, r, result, runs["undivided"][r]) for r, result in runs[name].items()))
        for name, way in ways.items()
    ]
    refusals = {
        f"* {name}: `{result['refusal']}`"
        for name in ways
        for result in runs[name].values()
        if result["refusal"]
    }
    kept = []
    for name in ways:
        saved = [result["saved"][0] for result in runs[name].values()]
        if None not in saved and "recomputation" not in name:
            kept.append(row(name, (f"{size / 2**20:.2f}" for size in saved)))
    parts = [
        [*head, *losses],
        ["Refused:", "", *sorted(refusals)],
        ["MiB kept for backward by the first rank in one micro-batch:", "", *head, *kept],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("output/parallelism"), help="folder of results (%(default)s)")
    add("--steps", type=int, default=20, help="training steps of each run (%(default)s)")
    add("--models", nargs="+", choices=("dense", "moe"), default=["dense", "moe"], help="(both)")
    arguments = parser.parse_args()
    comparison = Comparison(arguments.output, arguments.steps)
    failed = False
    for model in arguments.models:
        text = table(comparison, model)
        (arguments.output / f"{model}.md").write_text(text)
        print(text)
        failed |= "FAILED" in text
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
