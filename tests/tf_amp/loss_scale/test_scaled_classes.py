"""The classes of optimizers with a loss scale, made of classes without TensorFlow."""

from __future__ import annotations

import abc
import gc
import weakref
from typing import Any

import pytest

from tf_amp.loss_scale.scaled_classes import scaled_class


class Plain:
    """An optimizer."""

    def __init__(self, rate: float) -> None:
        self.rate = rate


class OfMetaclass(Plain, abc.ABC):
    """One whose class is of a class of its own."""


class Mixin:
    """The methods."""

    shown = None
    own_class: Any
    behind = None

    def __new__(cls, *args: Any) -> Any:
        return cls.own_class(*args)


@pytest.fixture(params=[Plain, OfMetaclass])
def own(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_it_looks_like_the_class_itself(own: Any) -> None:
    made: Any = scaled_class(own, Mixin)
    assert made is scaled_class(own, Mixin)
    assert (made.__name__, made.__doc__) == (own.__name__, own.__doc__)
    assert made.__mro__[1:3] == (Mixin, own)
    assert type(made(1.0)) is own


def test_a_class_that_goes_is_not_kept() -> None:
    def make() -> weakref.ref[type]:
        class Mine(Plain):
            pass

        assert scaled_class(Mine, Mixin).own_class is Mine
        return weakref.ref(Mine)

    mine = make()
    gc.collect()
    assert mine() is None


def test_subclasses_are_of_the_class_itself(own: Any) -> None:
    class Other:
        def __init_subclass__(cls, word: str) -> None:
            cls.word = word  # type: ignore[attr-defined]

    class Mine(Other, scaled_class(own, Mixin), word="told"):  # type: ignore[misc]
        def __init__(self, rate: float) -> None:
            super().__init__(2 * rate)

    assert Mine.__mro__[1:4] == (Other, own, *own.__mro__[1:2])
    assert (type(Mine), Mine.word) == (type(own), "told")
    assert (type(Mine(1.0)), Mine(1.0).rate) == (Mine, 2.0)


def test_what_stands_behind_comes_right_before_the_library() -> None:
    class Behind(Plain):
        pass

    class Mine(Plain):
        pass

    mixin = type("Mixin", (Mixin,), {"behind": Behind})
    made = scaled_class(Mine, mixin)
    assert made.__mro__[1:] == (mixin, Mixin, Mine, Behind, Plain, object)
