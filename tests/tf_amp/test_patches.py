"""Members are replaced and given back by identity."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tf_amp.patches import Patches


class Base:
    def method(self, number: int) -> int:
        """Documented."""
        return number

    @property
    def value(self) -> int:
        return 1


class Derived(Base):
    pass


def plus_ten(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: original(*args) + 10


def test_methods_properties_and_functions() -> None:
    module = ModuleType("module")
    module.function = function = lambda: 3  # type: ignore[attr-defined]
    before = dict(Base.__dict__)
    patches = Patches()
    patches.replace(Derived, "method", plus_ten)
    patches.replace(Base, "value", plus_ten)
    patches.replace(module, "function", plus_ten)
    assert (Derived().method(1), Base().value, module.function()) == (11, 11, 13)
    assert Base.method.__doc__ == "Documented."
    patches.undo()
    assert dict(Base.__dict__) == before
    assert module.function is function


def test_what_others_put_on_top_stays_and_then_reaches_the_original() -> None:
    module = ModuleType("module")
    module.function = lambda: 3  # type: ignore[attr-defined]
    patches = Patches()
    patches.replace(module, "function", plus_ten)
    ours = module.function
    module.function = theirs = lambda: 100 + ours()  # type: ignore[attr-defined]
    assert module.function() == 113
    patches.undo()
    assert module.function is theirs
    assert module.function() == 103


def test_a_member_is_replaced_once() -> None:
    before = Base.__dict__["method"]
    patches = Patches()
    patches.replace(Base, "method", plus_ten)
    patches.replace(Derived, "method", plus_ten)
    assert Base().method(1) == 11
    patches.undo()
    patches.undo()
    assert Base.__dict__["method"] is before


def test_a_class_that_goes_is_not_kept() -> None:
    patches = Patches()

    def make() -> weakref.ref[type]:
        class Mine(Base):
            def method(self, number: int) -> int:
                return super().method(number)

            @property
            def value(self) -> int:
                return super().value

        patches.replace(Mine, "method", plus_ten)
        patches.replace(Mine, "value", plus_ten)
        assert (Mine().method(1), Mine().value) == (11, 11)
        return weakref.ref(Mine)

    mine = make()
    gc.collect()
    assert mine() is None
    patches.undo()


class Odd:
    constant = 1
    static = staticmethod(len)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Base, "nothing"), (ModuleType("empty"), "nothing"), (Odd, "constant"), (Odd, "static")],
)
def test_what_is_no_function_is_named(owner: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=f"no function '{name}'"):
        Patches().replace(owner, name, plus_ten)
