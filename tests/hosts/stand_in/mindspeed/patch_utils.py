"""Patches by dotted name: a second plain one is an error, wrappers stack, MindSpeed's modules keep theirs."""

import importlib
import sys


class Patch:
    def __init__(self, name):
        self.path, self.attribute = name.rsplit(".", 1)
        self.replacement, self.wrappers = None, []
        self.module = self.original = self.installed = None
        self.is_applied = False

    def add(self, new, force):
        if new.__name__.endswith(("wrapper", "decorator")):
            if new not in self.wrappers:
                self.wrappers.append(new)
        elif self.replacement is not None and not force:
            raise RuntimeError(f"the patch of {self.attribute} exist !")
        else:
            self.replacement = new
        self.is_applied = False

    def apply(self):
        if self.is_applied:
            return
        try:
            module = importlib.import_module(self.path)
        except ModuleNotFoundError:  # a class
            parent, _, name = self.path.rpartition(".")
            module = getattr(importlib.import_module(parent), name)
        current = getattr(module, self.attribute)
        if self.module is None:
            self.module, self.original = module, current
        self.installed = self.original if self.replacement is None else self.replacement
        for wrapper in self.wrappers:
            self.installed = wrapper(self.installed)
        setattr(self.module, self.attribute, self.installed)
        self._replace_everywhere(current, self.installed, lambda name: True)
        self.is_applied = True

    def remove(self):
        self._replace_everywhere(self.installed, self.original, lambda name: "mindspeed" not in name)
        if isinstance(self.module, type):
            setattr(self.module, self.attribute, self.original)
        self.replacement, self.installed, self.is_applied = None, None, False
        self.wrappers.clear()

    def _replace_everywhere(self, old, new, wanted):
        for name, module in list(sys.modules.items()):
            if wanted(name) and vars(module).get(self.attribute) is old:
                setattr(module, self.attribute, new)


class MindSpeedPatchesManager:
    patches_info = {}  # noqa: RUF012

    @staticmethod
    def register_patch(orig_func_name, new_func=None, force_patch=False, create_dummy=False):
        patches = MindSpeedPatchesManager.patches_info
        patches.setdefault(orig_func_name, Patch(orig_func_name)).add(new_func, force_patch)

    @staticmethod
    def apply_patches():
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply()

    @staticmethod
    def remove_patches():
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove()
