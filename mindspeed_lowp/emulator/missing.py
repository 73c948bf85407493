"""How the emulator says that something is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


class NotEmulatedError(NotImplementedError, AttributeError):
    """A name of torch_npu that the emulator does not have.

    An AttributeError as well, so that `hasattr`, by which code probes for operators, answers no.
    """


def not_emulated(what: str) -> NoReturn:
    raise NotEmulatedError(
        f"{what} is not emulated: this torch_npu is mindspeed_lowp's emulator, and has what MindSpeed's GPT "
        "path calls"
    )


def refusing(module: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` for the module of that name."""

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        not_emulated(f"{module}.{name}")

    return __getattr__
