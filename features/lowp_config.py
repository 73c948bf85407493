"""torchtitan's TOML file, as far as it speaks of low precision: `--lowp-config`.

    [model]
    converters = ["npu_gmm", "quantize.linear.mx", "quantize.grouped_mm.mx"]

    [quantize.linear.mx]
    recipe_name = "mxfp8"
    filter_fqns = ["output", "router.gate"]

    [quantize.grouped_mm.mx]
    recipe_name = "hif8"
    fqns = ["experts"]

A section takes effect when `converters` lists it. The other keys of [model] and all other sections describe
torchtitan's own model and run, and are not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from mindspeed_lowp.features.command_line import nearest, stop
from mindspeed_lowp.recipes import recipe_class

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LINEAR, GROUPED = "quantize.linear.mx", "quantize.grouped_mm.mx"
NAMES_KEY = {LINEAR: "filter_fqns", GROUPED: "fqns"}
_GROUPED_NEEDS = "npu_gmm"
_FOREIGN = ("quantize.linear.float8", "quantize.grouped_mm.float8")  # torchtitan's own, for other hardware


@dataclass(frozen=True)
class Section:
    """One kind of layers: `filter_fqns` or `fqns` are the names, an unlisted kind has no section."""

    recipe_name: str = "mxfp8"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class LowpConfig:
    """What the file says; notes are for the log."""

    linear: Section | None
    grouped: Section | None
    notes: tuple[str, ...]


def read_config(path: str) -> LowpConfig:
    """Read and check the file; stops the run at what it does not understand."""
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        stop(f"--lowp-config {path}: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        stop(f"--lowp-config {path}: not a TOML file: {error}")
    return _Reader(path).config(document)


class _Reader:
    """Checks one file, and names it in what it has to say."""

    def __init__(self, path: str) -> None:
        self.path = path

    def stop(self, message: str) -> NoReturn:
        stop(f"--lowp-config {self.path}: {message}")

    def config(self, document: dict[str, Any]) -> LowpConfig:
        converters = self.converters(document)
        sections = dict(self.quantize_sections(document))
        notes = [
            f"[model] converters: {name!r} changes nothing here"
            for name in converters
            if name not in (LINEAR, GROUPED, _GROUPED_NEEDS)
        ]
        notes += [
            f"[{name}] has no effect: converters does not list {name!r}"
            for name in sections
            if name not in converters
        ]
        linear, grouped = (
            self.section(name, sections.get(name, {})) if name in converters else None
            for name in (LINEAR, GROUPED)
        )
        return LowpConfig(linear, grouped, tuple(f"{self.path}: {note}" for note in notes))

    def converters(self, document: dict[str, Any]) -> list[str]:
        where = "[model] converters"
        model = self.table(document, "model")
        if "converters" not in model:
            close = nearest("converters", model, count=1)
            hint = f" (did you mean it by {close[0]}?)" if close else ""
            self.stop(f'{where} is missing{hint}: write e.g. converters = ["{LINEAR}"]')
        converters = self.strings(where, model["converters"])
        for name in converters:
            if name.startswith("quantize") and name not in (LINEAR, GROUPED):
                self.stop(f"{where}: no converter {name!r} here; accepted: {LINEAR}, {GROUPED}")
        if LINEAR not in converters and GROUPED not in converters:
            self.stop(f"{where} lists neither {LINEAR!r} nor {GROUPED!r}: nothing would be quantized")
        if GROUPED in converters and _GROUPED_NEEDS not in converters[: converters.index(GROUPED)]:
            ordered = [name for name in converters if name not in (_GROUPED_NEEDS, GROUPED)]
            written = ", ".join(f'"{name}"' for name in [_GROUPED_NEEDS, *ordered, GROUPED])
            self.stop(
                f'{where}: "{_GROUPED_NEEDS}" must come before "{GROUPED}": write converters = [{written}]'
            )
        return converters

    def quantize_sections(self, document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The two sections that matter, as far as they are there."""
        for kind, formats in self.table(document, "quantize").items():
            for name, section in self.table({kind: formats}, kind, "quantize.").items():
                name = f"quantize.{kind}.{name}"
                if name in _FOREIGN:
                    continue
                if name not in NAMES_KEY:
                    close = nearest(name, NAMES_KEY, count=1)
                    hint = f"; did you mean [{close[0]}]?" if close else ""
                    self.stop(f"no section [{name}] is known{hint}")
                yield name, self.table({name: section}, name)

    def section(self, name: str, section: dict[str, Any]) -> Section:
        names_key = NAMES_KEY[name]
        accepted = ("recipe_name", names_key)
        for key in section:
            if key not in accepted:
                close = nearest(key, accepted, count=1)
                hint = f"did you mean {close[0]}? " if close else ""
                self.stop(f"[{name}] {key}: no such key; {hint}accepted: {', '.join(accepted)}")
        recipe = section.get("recipe_name", Section.recipe_name)
        if not isinstance(recipe, str):
            self.stop(f'[{name}] recipe_name = {recipe!r}: expected a string such as "mxfp8"')
        try:
            recipe_class(recipe)
        except ValueError as error:
            self.stop(f"[{name}] recipe_name: {error}")
        names = self.strings(f"[{name}] {names_key}", section.get(names_key, []))
        return Section(recipe, tuple(names))

    def table(self, parent: dict[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
        value = parent.get(key, {})
        if not isinstance(value, dict):
            self.stop(f"{prefix}{key} = {value!r}: expected a section [{prefix}{key}]")
        return value

    def strings(self, where: str, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.stop(f'{where} = {value!r}: expected a list of strings such as ["output"]')
        return value
