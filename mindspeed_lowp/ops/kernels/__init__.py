"""The C++ kernels of `csrc`, called through ctypes. Where they were not built, importing this warns once.

`LOWP_CPU_LEVEL` (``v4``: AVX-512, ``v3``: AVX2, ``base``) forces a level; by default the CPU's highest is
used. `LOWP_KERNELS` names another build of the library to load instead of the installed one (a sanitizer's,
see scripts/sanitize_kernels.sh). One module for each family of operators.
"""

import ctypes
import os
import warnings
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

LEVELS = ("v4", "v3", "base")

#: Input types as the library numbers them (csrc/kernels.h).
INPUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def _load() -> ctypes.CDLL | None:
    if named := os.environ.get("LOWP_KERNELS"):
        return ctypes.CDLL(named)
    reason, remedy = "no C++ compiler was found at installation", "install one, then reinstall mindspeed_lowp"
    package = Path(__file__).parents[2]
    if (package / "csrc").is_dir():
        reason = f"none were built in the source tree {package.parent}, which it is imported from"
        remedy = "run `pip install -e .` there, with a C++ compiler, or work outside of it"
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).parent.with_name("_kernels" + suffix)
        if not path.exists():
            continue
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            reason, remedy = str(error), "reinstall mindspeed_lowp on this machine"
    warnings.warn(
        f"mindspeed_lowp has no C++ kernels ({reason}): quantization on the CPU uses PyTorch and is "
        f"slow. To mend it, {remedy}.",
        stacklevel=2,
    )
    return None


_library = _load()


def available() -> bool:
    """Whether the library was found. If not, no kernel may be called."""
    return _library is not None


def function(name: str, arguments: list[type], result: type | None = None) -> Callable:
    """The library's function of that name; a stand-in that must not be called where there is no library."""
    if not available():
        return lambda *_: NotImplemented
    found = getattr(_library, name)
    found.argtypes, found.restype = arguments, result
    return found


_supports = function("lowp_supports", [ctypes.c_char_p], INT)
_use = function("lowp_use", [ctypes.c_char_p])


def supported_levels() -> list[str]:
    """The levels that were built and that this CPU can run, best first."""
    return [level for level in LEVELS if available() and _supports(level.encode())]


def use_level(level: str) -> None:
    """Use the kernels of this level from now on.

    Raises:
        ValueError: if it was not built or the CPU cannot run it.
    """
    accepted = supported_levels()
    if level not in accepted:
        raise ValueError(
            f"CPU level {level!r} (LOWP_CPU_LEVEL) is not supported here; use {' or '.join(accepted)}"
        )
    _use(level.encode())


if available():
    use_level(os.environ.get("LOWP_CPU_LEVEL") or supported_levels()[0])
