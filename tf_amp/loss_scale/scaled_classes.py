"""The classes that optimizers get with a loss scale: subclasses of their own, under its name."""

from __future__ import annotations

import types
from typing import Any

_NAMES = ("__module__", "__qualname__", "__doc__")


def scaled_class(own_class: Any, mixin: Any) -> Any:
    """The class of an optimizer that has a loss scale, the same for the same arguments.

    Args:
        own_class: The class that the optimizer was made with.
        mixin: The methods for its library, a subclass of `in_place.InPlace`.
    """
    # Python keeps no subclass that is not used, as a cache of ours would, and with it its base.
    for known in type.__subclasses__(own_class):
        if isinstance(known, _Maker) and mixin in known.__bases__:
            return known
    shown = own_class if mixin.shown is None else _shown_class(own_class, mixin.shown)
    # What is made by the class is made as it would be without a loss scale.
    of_class = {
        name: staticmethod(getattr(own_class, name))
        for one in reversed(own_class.__mro__)
        for name, member in one.__dict__.items()
        if isinstance(member, classmethod)
    }
    as_it_was = {name: getattr(own_class, name) for name in _NAMES}
    members = {"own_class": own_class, "__class__": property(lambda self: shown)}
    its = type(own_class)
    make: Any = _Maker if its is type else type(its.__name__, (_Maker, its), {})
    bases = (mixin, own_class, *(() if mixin.behind is None else (mixin.behind,)))
    return make(own_class.__name__, bases, {**of_class, **as_it_was, **members})


def _shown_class(own_class: Any, theirs: Any) -> type:
    """A class of the library for `isinstance`, and the own class wherever a library names it."""
    members = {name: getattr(own_class, name) for name in _NAMES}
    # By this tf_keras knows its own classes; a subclass of one has none.
    members |= {k: v for k, v in own_class.__dict__.items() if k == "_keras_api_names"}
    its = type(theirs)
    make: Any = _Shown if its is type else type(its.__name__, (_Shown, its), {})
    return make(own_class.__name__, (theirs,), {**members, "own_class": own_class})


class _Shown(type):
    """The class of the classes that `__class__` says: in a dict, each is the own class.

    In such dicts the libraries find by which name a file knows a class.
    """

    own_class: type

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.own_class

    def __hash__(cls) -> int:
        return hash(cls.own_class)


class _Maker(type):
    """The class of the classes made here; a `class Mine(type(optimizer))` is none of them."""

    own_class: type

    def __new__(
        cls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any], **keywords: Any
    ) -> Any:
        """Makes one, or a subclass of the class that an optimizer was made with.

        Its `compile` gives it a scale, as `InPlace.__new__` says.
        """
        if not any(isinstance(base, _Maker) for base in bases):
            return super().__new__(cls, name, bases, namespace, **keywords)
        own = tuple(base.own_class if isinstance(base, _Maker) else base for base in bases)
        return types.new_class(name, own, keywords, lambda made: made.update(namespace))
