"""What features read from the command line, add to it, and say when it cannot be honoured."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import Any, NoReturn


def stop(message: str) -> NoReturn:
    """End the run because of a user's mistake: `error: ...` on stderr, exit code 1, no traceback."""
    raise SystemExit(f"error: {message}")


def typed(*flags: str) -> str | None:
    """The first of `flags` that stands on the command line, or None.

    A parsed namespace cannot tell a flag given with its default value from one left out.
    """
    words = (word.split("=", 1)[0] for word in sys.argv[1:])
    return next((word for word in words if word in flags), None)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names in `known` most like `name`, the closest first."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.4)


def tell_nearest_flags(parser: argparse.ArgumentParser) -> None:
    """Let the parser answer unknown flags by the nearest ones that it has, not by all of its usage."""
    give_up = parser.error

    def error(message: str) -> NoReturn:
        before, _, words = message.partition("unrecognized arguments: ")
        unknown = [word.split("=", 1)[0] for word in words.split() if word.startswith("--")]
        if before or not unknown:
            give_up(message)
        known = [flag for action in parser._actions for flag in action.option_strings]
        lines = []
        for flag in unknown:
            close = nearest(flag, known)
            lines.append(f"{flag}: no such flag" + (f"; the nearest: {', '.join(close)}" if close else ""))
        stop("; ".join(lines))

    parser.error = error


def find_option(parser: argparse.ArgumentParser, flag: str) -> argparse.Action | None:
    """The option of `parser` called `flag`, in whichever group it was added."""
    return next((action for action in parser._actions if flag in action.option_strings), None)


def add_choices(parser: argparse.ArgumentParser, flag: str, *choices: Any) -> None:
    """Let an option that the parser has take more values; an option without choices takes any already."""
    option = find_option(parser, flag)
    if option is not None and option.choices is not None:
        # A new list: Megatron 0.17 keeps its choices in tuples.
        option.choices = [*option.choices, *(c for c in choices if c not in option.choices)]


def add_option(parser: argparse.ArgumentParser, title: str, flag: str, **kwargs: Any) -> None:
    """Add an option under the group `title`, or extend the choices of the one that is there already.

    A host may have the option, and MindSpeed registers every feature's options on two parsers.
    """
    if find_option(parser, flag) is not None:
        add_choices(parser, flag, *(kwargs.get("choices") or ()))
        return
    groups = {group.title: group for group in parser._action_groups}
    group = groups.get(title) or parser.add_argument_group(title=title)
    group.add_argument(flag, **kwargs)
