"""Imports go one way through the packages, and command-line arguments stay on the far side of them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each package may import those before it; `qat` stands beside `layers` (and takes one thing from it, of
# which both are in need), `runtime` and `emulator` aside.
ORDER = [
    "formats",
    "ops",
    "recipes",
    "layers",
    "megatron",
    "mindspeed",
    "features",
    "hosts",
    "adaptor",
    "run",
]
VERSIONS = "megatron_versions"  # knows Megatron only
MAY_IMPORT = {name: set(ORDER[:position]) for position, name in enumerate(ORDER)}
MAY_IMPORT["qat"] = MAY_IMPORT["layers"] | {"layers"}
for name in ("megatron", "features", "hosts"):
    MAY_IMPORT[name] |= {"qat", VERSIONS}
MAY_IMPORT[VERSIONS] = set()
MAY_IMPORT["runtime"] = {"ops", VERSIONS}
MAY_IMPORT["emulator"] = {"formats", "ops", "runtime"}
for package in ("hosts", "adaptor", "run"):
    MAY_IMPORT[package] |= {"runtime", "emulator"}
MAY_IMPORT["export"] = {"formats", "ops"}  # a program of its own

IGNORANT_OF_FLAGS = [
    "formats",
    "ops",
    "recipes",
    "layers",
    "qat",
    "megatron",
    "runtime",
    "emulator",
    VERSIONS,
]
AT_THE_TOP = {"features": ROOT / "features", "recipes": ROOT / "recipes"}


def sources(package: str) -> list[Path]:
    folder = AT_THE_TOP.get(package, ROOT / "mindspeed_lowp" / package)
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def package_name(package: str, path: Path) -> str:
    """The package that a relative import in this file starts from."""
    folder = AT_THE_TOP.get(package, ROOT / "mindspeed_lowp" / package)
    inside = path.relative_to(folder).parent.parts if folder.is_dir() else ()
    return ".".join(["mindspeed_lowp", *([package] if folder.is_dir() else []), *inside])


def imported_modules(tree: ast.AST, package: str, path: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                start = package_name(package, path).split(".")
                base = ".".join(filter(None, [*start[: len(start) - node.level + 1], base]))
            if base == "mindspeed_lowp":
                yield from (f"mindspeed_lowp.{alias.name}" for alias in node.names)
            else:
                yield base


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_one_way(package):
    wrong = []
    for path in sources(package):
        for module in imported_modules(ast.parse(path.read_text()), package, path):
            if module.split(".")[0] == "mindspeed_lowp":
                imported = [*module.split("."), ""][1]
                if imported != package and imported not in MAY_IMPORT[package]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


@pytest.mark.parametrize("package", IGNORANT_OF_FLAGS)
def test_only_features_and_hosts_read_arguments(package):
    wrong = []
    for path in sources(package):
        tree = ast.parse(path.read_text())
        modules = set(imported_modules(tree, package, path))
        names = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for forbidden in modules & {"argparse"} | (names | attributes) & {"argv", "get_args"}:
            wrong.append(f"{path.relative_to(ROOT)} uses {forbidden}")
    assert not wrong


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import mindspeed_lowp.ops.gemm", "mindspeed_lowp.ops.gemm"),
        ("from mindspeed_lowp import layers", "mindspeed_lowp.layers"),
        ("from mindspeed_lowp.megatron import convert_chunks", "mindspeed_lowp.megatron"),
        ("from .base import Recipe", "mindspeed_lowp.recipes.base"),
        ("from .. import hosts", "mindspeed_lowp.hosts"),
        ("def f():\n    from mindspeed_lowp import run", "mindspeed_lowp.run"),
    ],
)
def test_every_form_of_import_is_seen(source, expected):
    path = ROOT / "recipes" / "mxfp8.py"
    assert list(imported_modules(ast.parse(source), "recipes", path)) == [expected]
