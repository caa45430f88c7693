"""Functions that call replacements, as protos alone."""

from __future__ import annotations

import gc
import weakref

from tensorflow.core.framework import function_pb2

from tf_amp.hosts.function_redirects import called_names, redirect_calls


def function(name: str, *calls: str, branches: tuple[str, ...] = ()) -> function_pb2.FunctionDef:
    """A function that calls others by PartitionedCall, and some as branches of a Case."""
    made = function_pb2.FunctionDef()
    made.signature.name = name
    for called in calls:
        node = made.node_def.add(name=f"call_{called}", op="PartitionedCall")
        node.attr["f"].func.name = called
    if branches:
        node = made.node_def.add(name="case", op="Case")
        for called in branches:
            node.attr["branches"].list.func.add(name=called)
    return made


def redirected(
    definition: function_pb2.FunctionDef, *library: function_pb2.FunctionDef
) -> dict[str, list[str]] | None:
    """Who calls whom once `g` is replaced by another body, and in which order they are given."""
    running = {f.signature.name: f for f in library}
    found = redirect_calls(definition, running.get, {"g": function("other")}.get, "_new")
    if found is None:
        return None
    changed, renamed = found
    functions = (*renamed, changed)
    return {
        f.signature.name: [n for n in called_names(f) if n not in ("PartitionedCall", "Case")]
        for f in functions
    }


def test_replacement_is_called_through_the_functions_between() -> None:
    found = redirected(function("top", "f"), function("f", "g", "h"), function("g"), function("h"))
    assert found == {"g_new": [], "f_new": ["g_new", "h"], "top": ["f_new"]}
    assert list(found) == ["g_new", "f_new", "top"]


def test_function_that_calls_nothing_replaced_is_left_alone() -> None:
    assert redirected(function("top", "h"), function("h"), function("g")) is None


def test_every_branch_that_is_replaced_is_redirected() -> None:
    found = redirected(function("top", branches=("h", "g", "g")), function("g"), function("h"))
    assert found == {"g_new": [], "top": ["h", "g_new", "g_new"]}


def test_recursive_function_is_renamed_once() -> None:
    found = redirected(function("top", "f"), function("f", "f", "g"), function("g"))
    assert found == {"g_new": [], "f_new": ["f", "g_new"], "top": ["f_new"]}


def test_definition_is_not_changed() -> None:
    top, g = function("top", "g"), function("g")
    redirected(top, g)
    assert (top, g) == (function("top", "g"), function("g"))


def test_what_gives_the_functions_is_let_go_at_once() -> None:
    """It holds a plan: megabytes, which a cycle would keep until the collector runs."""

    class Library(dict[str, function_pb2.FunctionDef]):
        """A dict to which a weak reference may be made."""

    library = Library(f=function("f", "f", "g"), g=function("g"))
    alive = weakref.ref(library)
    collects = gc.isenabled()
    gc.disable()
    try:
        redirect_calls(function("top", "f"), library.get, {"g": function("other")}.get, "_new")
        del library
        assert alive() is None
    finally:
        if collects:
            gc.enable()
