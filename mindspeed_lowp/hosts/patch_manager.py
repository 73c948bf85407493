"""Replacing functions and classes of another package by dotted name, with MindSpeed's contract."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class PatchManager:
    """Collects patches; `apply_patches` puts them in place, `remove_patches` takes them out."""

    def __init__(self) -> None:
        self._patches: dict[str, _Patch] = {}

    def register_patch(
        self,
        orig_func_name: str,
        new_func: Any,
        force_patch: bool = False,
        create_dummy: bool = False,
    ) -> None:
        """Note that `new_func` is to take the place of `orig_func_name`, from the next `apply_patches` on.

        A function called `...wrapper` or `...decorator` is applied to what stands there instead; such
        wrappers stack, the one registered last being the outermost. Anything else replaces the original,
        once: a second, different replacement raises RuntimeError unless force_patch is set. With create_dummy
        a name (or a whole module) that does not exist is made up; otherwise `apply_patches` raises
        AttributeError for it.
        """
        patch = self._patches.setdefault(orig_func_name, _Patch(orig_func_name))
        patch.create_dummy |= create_dummy
        if getattr(new_func, "__name__", "").endswith(("wrapper", "decorator")):
            if new_func in patch.wrappers:
                return
            patch.wrappers.append(new_func)
        else:
            if patch.replacement is new_func:
                return
            if patch.replacement is not None and not force_patch:
                raise RuntimeError(f"{orig_func_name} has a patch already: {patch.replacement!r}")
            patch.replacement = new_func
        patch.is_applied = False

    def apply_patches(self) -> None:
        """Put every registered patch in place, in each module that imported the name by `from ... import`."""
        for patch in self._patches.values():
            patch.apply()

    def remove_patches(self) -> None:
        """Put the originals back and forget every patch."""
        for patch in self._patches.values():
            patch.remove()
        self._patches.clear()


class _Patch:
    """All that is registered for one name, and what stands in its place now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.replacement: Any = None
        self.wrappers: list[Callable[[Any], Any]] = []
        self.create_dummy = False
        self.is_applied = False
        self._owner: Any = None  # the module or class that holds the name; None until applied
        self._attribute = ""
        self._original: Any = None
        self._installed: Any = None
        self._holders: list[Any] = []  # where the original stood

    def apply(self) -> None:
        if self.is_applied:  # leave alone what somebody may have put on top since
            return
        if self._owner is None:
            self._owner, self._attribute = _locate(self.name, self.create_dummy)
            self._original = self._installed = getattr(self._owner, self._attribute)
        target = self._original if self.replacement is None else self.replacement
        for wrapper in self.wrappers:
            target = wrapper(target)
        self._install(target)
        self.is_applied = True

    def remove(self) -> None:
        if self._owner is not None:
            self._install(self._original)

    def _install(self, target: Any) -> None:
        holders = [self._owner]
        # A plain value such as False is one object everywhere, so finding it says nothing about its origin.
        if isinstance(self._owner, ModuleType) and callable(self._installed):
            # vars(), not hasattr(): asking a lazy module for a name may import half of a library.
            holders += [
                module
                for name, module in list(sys.modules.items())
                if isinstance(module, ModuleType)
                and vars(module).get(self._attribute) is self._installed
                and self._has_it_by_this_patch(name, module)
            ]
        for holder in holders:
            setattr(holder, self._attribute, target)
        self._installed, self._holders = target, holders

    def _has_it_by_this_patch(self, name: str, module: ModuleType) -> bool:
        """Whether a module holds what is installed because it is here, not from where that comes from itself.

        A replacement of the same name as the original is at home in modules of its own. Of modules imported
        since it was installed, those of the patched package took it from there.
        """
        if self._installed is self._original or module in self._holders:
            return True
        return name.partition(".")[0] == self._owner.__name__.partition(".")[0]


def _locate(name: str, create_dummy: bool) -> tuple[Any, str]:
    """The module or class that holds the last part of a dotted name, and that part."""
    *path, attribute = name.split(".")
    owner: Any = None
    for depth, part in enumerate(path, start=1):
        owner = _step(owner, part, ".".join(path[:depth]), create_dummy)
    if not hasattr(owner, attribute):
        if not create_dummy:
            raise AttributeError(f"cannot patch {name}: {'.'.join(path)} has no {attribute}")
        setattr(owner, attribute, _dummy_function(name))
    return owner, attribute


def _step(owner: Any, part: str, path: str, create_dummy: bool) -> Any:
    """From the module or class `owner` (None at the start) to its submodule or attribute `part`."""
    if owner is None or isinstance(owner, ModuleType):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:  # the module exists, and something that it imports does not
                raise
    if hasattr(owner, part):
        return getattr(owner, part)
    if not create_dummy:
        raise AttributeError(f"cannot patch a name in {path}: there is no such module or class")
    module = ModuleType(path)
    module.__path__ = []  # so that modules below it can be made up, too
    sys.modules[path] = module
    if owner is not None:
        setattr(owner, part, module)
    return module


def _dummy_function(name: str) -> Callable[..., Any]:
    def dummy(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} does not exist")

    return dummy
