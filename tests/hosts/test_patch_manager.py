"""Patches by dotted name: replaced everywhere, stacked, removed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from mindspeed_lowp.hosts.patch_manager import PatchManager


def one():
    return 1


def two():
    return 2


def plus_ten_wrapper(function):
    return lambda: function() + 10


def doubled_decorator(function):
    return lambda: function() * 2


@pytest.fixture
def library(monkeypatch):
    """library.core has `value` and `Shape.area`; library.user has done `from library.core import value`."""
    modules = {name: ModuleType(name) for name in ("library", "library.core", "library.user")}
    root, core, user = modules.values()
    root.__path__ = []
    root.core, root.user = core, user
    core.value = user.value = one
    core.Shape = type("Shape", (), {"area": lambda self: 1})
    user.other = "not the function"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(root=root, core=core, user=user)


def test_nothing_happens_before_apply(library):
    patches = PatchManager()
    patches.register_patch("library.core.value", two)
    assert library.core.value() == 1
    patches.apply_patches()
    assert library.core.value() == 2


def test_modules_that_imported_the_name_get_it_too(library):
    bystander = ModuleType("library.bystander")
    bystander.value = lambda: "its own"
    sys.modules["library.bystander"] = bystander
    try:
        patches = PatchManager()
        patches.register_patch("library.core.value", two)
        patches.apply_patches()
        assert library.user.value() == 2
        assert bystander.value() == "its own"
        patches.remove_patches()
        assert library.core.value is one and library.user.value is one
    finally:
        del sys.modules["library.bystander"]


def test_removal_leaves_the_replacement_where_it_comes_from(library, monkeypatch):
    home = ModuleType("other_package.home")
    home.value = two  # by the name that it replaces
    late = ModuleType("library.late")
    patches = PatchManager()
    monkeypatch.setitem(sys.modules, "other_package.home", home)
    patches.register_patch("library.core.value", two)
    patches.apply_patches()
    late.value = library.core.value  # from library.core import value
    monkeypatch.setitem(sys.modules, "library.late", late)
    patches.remove_patches()
    assert home.value is two
    assert library.core.value is library.user.value is late.value is one


def test_plain_value_is_replaced_only_where_it_is_defined(library):
    library.core.HAVE_IT = library.user.HAVE_IT = False
    patches = PatchManager()
    patches.register_patch("library.core.HAVE_IT", True)
    patches.apply_patches()
    assert library.core.HAVE_IT is True and library.user.HAVE_IT is False


def test_wrappers_stack_the_last_outermost(library):
    patches = PatchManager()
    patches.register_patch("library.core.value", plus_ten_wrapper)
    patches.register_patch("library.core.value", doubled_decorator)
    patches.register_patch("library.core.value", two)
    patches.register_patch("library.core.value", plus_ten_wrapper)  # has been registered, stays where it is
    patches.apply_patches()
    assert library.user.value() == (2 + 10) * 2


def test_applying_again_does_not_wrap_again_and_takes_in_what_came_later(library):
    patches = PatchManager()
    patches.register_patch("library.core.value", plus_ten_wrapper)
    patches.apply_patches()
    applied = library.core.value
    patches.apply_patches()
    assert library.core.value is applied and applied() == 11
    patches.register_patch("library.core.value", doubled_decorator)
    patches.apply_patches()
    assert library.core.value() == library.user.value() == 22


def test_second_replacement_needs_force(library):
    patches = PatchManager()
    patches.register_patch("library.core.value", two)
    patches.register_patch("library.core.value", two)
    with pytest.raises(RuntimeError, match=r"library.core.value has a patch already"):
        patches.register_patch("library.core.value", one)
    patches.register_patch("library.core.value", max, force_patch=True)
    patches.apply_patches()
    assert library.user.value is max


def test_method_of_a_class(library):
    shape = library.core.Shape()
    patches = PatchManager()
    patches.register_patch("library.core.Shape.area", lambda self: 5)
    patches.apply_patches()
    assert shape.area() == 5
    patches.remove_patches()
    assert shape.area() == 1


def test_registered_applied_removed_and_applied_again(library):
    patches = PatchManager()
    for _ in range(2):
        patches.register_patch("library.core.value", two)
        patches.apply_patches()
        assert library.user.value() == 2
        patches.remove_patches()
        patches.apply_patches()
        assert library.user.value() == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("library.core.valeu", "cannot patch library.core.valeu: library.core has no valeu"),
        ("library.score.value", "cannot patch a name in library.score"),
        ("library.core.Shape.sides.count", "cannot patch a name in library.core.Shape.sides"),
    ],
)
def test_missing_name_is_reported(library, name, message):
    patches = PatchManager()
    patches.register_patch(name, two)
    with pytest.raises(AttributeError, match=message):
        patches.apply_patches()


def test_missing_name_is_made_up_on_request(library, monkeypatch):
    patches = PatchManager()
    patches.register_patch("library.core.extra", two, create_dummy=True)
    patches.register_patch("library.absent.deep.value", plus_ten_wrapper, create_dummy=True)
    patches.apply_patches()
    assert library.core.extra() == 2
    from library.absent.deep import value

    with pytest.raises(RuntimeError, match=r"library.absent.deep.value does not exist"):
        value()
    for name in ("library.absent", "library.absent.deep"):
        monkeypatch.delitem(sys.modules, name)


def test_failing_import_inside_a_module_is_not_taken_for_a_missing_module(tmp_path, monkeypatch):
    (tmp_path / "imports_what_is_missing.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    patches = PatchManager()
    patches.register_patch("imports_what_is_missing.value", two, create_dummy=True)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        patches.apply_patches()
