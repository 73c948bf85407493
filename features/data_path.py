"""Missing datasets, told in terms of the flag that names them, before any model is built."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.command_line import nearest, stop

_SUFFIXES = (".idx", ".bin")
_REMOTE = ("s3://", "msc://")
_SPLITS = ("train", "valid", "test")


class DataPathFeature(Feature):
    """Checks the files of every dataset that this rank is told to read."""

    def __init__(self) -> None:
        super().__init__("data-path")

    def is_need_apply(self, args: Namespace) -> bool:
        return False  # checks only

    def pre_validate_args(self, args: Namespace) -> None:
        if getattr(args, "sft", False) or getattr(args, "dataloader_type", None) == "external":
            return  # other files than Megatron's indexed datasets
        blends = list(_blends(args))
        if not blends and not getattr(args, "mock_data", True):  # a host may have other sources
            stop("no dataset: add --data-path PREFIX, or --mock-data to train on made-up tokens")
        for flag, words in blends:
            if not words:
                stop(f"{flag}: names no dataset")
            for prefix in _prefixes(flag, words):
                if not prefix.startswith(_REMOTE):
                    _check_dataset(flag, prefix, words)


def _blends(args: Namespace) -> Iterator[tuple[str, list[str]]]:
    """Each flag that names datasets, with the weights and prefixes that it gives or that its file holds."""
    for name in ("data_path", *(f"{split}_data_path" for split in _SPLITS)):
        words = getattr(args, name, None)
        if words:
            yield "--" + name.replace("_", "-"), words
    if getattr(args, "data_args_path", None):
        flag = f"--data-args-path {args.data_args_path}"
        yield flag, _read(flag, args.data_args_path).split()
    if getattr(args, "per_split_data_args_path", None):
        flag = f"--per-split-data-args-path {args.per_split_data_args_path}"
        yield from _blends_per_split(flag, _read(flag, args.per_split_data_args_path))


def _blends_per_split(flag: str, text: str) -> Iterator[tuple[str, list[str]]]:
    try:
        blends = json.loads(text)
    except json.JSONDecodeError as error:
        stop(f"{flag}: not a JSON file ({error})")
    if not isinstance(blends, dict):
        stop(f"{flag}: expected a JSON object with an entry for each of {', '.join(_SPLITS)}")
    missing = [split for split in _SPLITS if split not in blends]
    if missing:
        stop(f"{flag}: needs an entry for each of {', '.join(_SPLITS)}; missing: {', '.join(missing)}")
    for split in _SPLITS:
        words = blends[split]
        if words:
            yield f"{flag} ({split})", words.split() if isinstance(words, str) else [str(w) for w in words]


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        stop(f"{flag}: {error.strerror}")
    except UnicodeDecodeError:
        stop(f"{flag}: not a text file")


def _prefixes(flag: str, words: list[str]) -> list[str]:
    """The prefixes in a blend, which Megatron reads as `weight prefix weight prefix ...` where it can."""
    weighted = [_is_number(word) for word in words[::2]]
    if len(words) % 2 or not any(weighted):
        return [word.strip() for word in words]
    if not all(weighted):
        stop(f"{flag} {' '.join(words)}: give a weight before each prefix, or before none")
    return [word.strip() for word in words[1::2]]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_dataset(flag: str, prefix: str, words: list[str]) -> None:
    missing = [prefix + suffix for suffix in _SUFFIXES if not Path(prefix + suffix).is_file()]
    if missing:
        stop(f"{flag}: dataset {prefix}: no file {' and no file '.join(missing)}; {_advice(prefix, words)}")


def _advice(prefix: str, words: list[str]) -> str:
    """What the user may have meant."""
    path = Path(prefix)
    if _is_number(prefix) and len(words) > 1:
        return f"{prefix} is read as a prefix, since weights need a prefix after each: {' '.join(words)}"
    if path.suffix in _SUFFIXES and path.is_file():
        return f"give the prefix without {path.suffix}: {prefix.removesuffix(path.suffix)}"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent.absolute()}"
    pairs = {file.stem for file in path.parent.glob("*.idx") if file.with_suffix(".bin").is_file()}
    if not pairs:
        return f"there is no dataset (an .idx with its .bin) in {path.parent.absolute()}"
    close = nearest(path.name, pairs) or sorted(pairs)[:3]
    return f"the nearest in {path.parent.absolute()}: {', '.join(close)}"
