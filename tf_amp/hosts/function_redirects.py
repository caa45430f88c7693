"""Functions that call others than they were traced with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.core.framework import attr_value_pb2, function_pb2

Find = Callable[[str], function_pb2.FunctionDef | None]


def redirect_calls(
    definition: function_pb2.FunctionDef, running: Find, replacement: Find, suffix: str
) -> tuple[function_pb2.FunctionDef, tuple[function_pb2.FunctionDef, ...]] | None:
    """Makes a function call replacements, in place and behind other functions that it calls.

    Args:
        definition: the function; it is not changed.
        running: gives a function as the runtime has it, None for a name that is no function's.
        replacement: gives what is to be called instead of a function, None for that function.
        suffix: what is added to the names of functions that are called instead.

    Returns:
        The function with other calls, and the functions that it then calls under their new names,
        each behind those it calls itself; None if nothing that it calls is replaced.
    """
    renamed: list[function_pb2.FunctionDef] = []
    targets: dict[str, str | None] = {}

    def redirect(caller: function_pb2.FunctionDef) -> function_pb2.FunctionDef | None:
        changed = None
        for name in sorted(set(called_names(caller))):
            target = redirected(name)
            if target is not None:
                if changed is None:
                    changed = function_pb2.FunctionDef()
                    changed.CopyFrom(caller)
                _rename_calls(changed, name, target)
        return changed

    def redirected(name: str) -> str | None:
        if name not in targets:
            targets[name] = None  # what a recursive function finds of itself
            targets[name] = renamed_copy(name)
        return targets[name]

    def renamed_copy(name: str) -> str | None:
        found = running(name)
        if found is None:
            return None
        other = replacement(name)
        body = redirect(other or found)
        if other is None and body is None:
            return None
        copy = function_pb2.FunctionDef()
        copy.CopyFrom(body or other or found)
        copy.signature.name = name + suffix
        renamed.append(copy)
        return copy.signature.name

    changed = redirect(definition)
    return None if changed is None else (changed, tuple(renamed))


def called_names(definition: function_pb2.FunctionDef) -> Iterator[str]:
    """Yields the names that a function may call by: its op types and its function attributes."""
    for node in definition.node_def:
        yield node.op
        for function in _function_attrs(node.attr.values()):
            yield function.name


def _rename_calls(definition: function_pb2.FunctionDef, old: str, new: str) -> None:
    for node in definition.node_def:
        if node.op == old:
            node.op = new
        for function in _function_attrs(node.attr.values()):
            if function.name == old:
                function.name = new


def _function_attrs(values: Any) -> Iterator[attr_value_pb2.NameAttrList]:
    for value in values:
        kind = value.WhichOneof("value")
        if kind == "func":
            yield value.func
        elif kind == "list":
            yield from value.list.func
