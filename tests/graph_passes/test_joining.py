"""A call tree as one graph."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import tensorflow as tf
from call_graphs import SHAPES, build
from view_checks import assert_same

from graph_passes.application import Applied
from graph_passes.call_graph import Region, build_call_tree, kinds_with
from graph_passes.indexing import NodeIndex
from graph_passes.joining import join, take_apart
from graph_passes.view import GraphView, view_function, view_graph

SPEC = tf.TensorSpec([4, 8], tf.float32)


def tree_of(shape: str, is_function: bool) -> tuple[Region, dict]:
    """A call tree and its library."""
    main = graph_def = build(SHAPES[shape]).graph_def
    if is_function:
        weight = tf.Variable(tf.ones((8, 8)))
        step = tf.function(lambda x: SHAPES[shape](x, weight), autograph=False)
        concrete = step.get_concrete_function(SPEC)
        main, graph_def = concrete.function_def, concrete.graph.as_graph_def()
    library = {function.signature.name: function for function in graph_def.library.function}
    tree = build_call_tree(main, library.get, lambda op: op in ("MatMul", "BatchMatMulV2"))
    assert tree.calls
    return tree, library


def with_all_shapes(test: object) -> object:
    """Runs a test for graphs and functions."""
    both = pytest.mark.parametrize("is_function", [False, True])
    return both(pytest.mark.parametrize("shape", sorted(SHAPES))(test))


@with_all_shapes
def test_taking_apart_undoes_joining(shape: str, is_function: bool) -> None:
    tree, _ = tree_of(shape, is_function)
    joined = join(tree)
    for touched in ((), range(len(joined.proto.node))):
        again = take_apart(tree, joined, Applied(joined.proto, tuple(touched), (), {}))
        for old, new in zip(tree.walk(), again.walk(), strict=True):
            assert new.proto == old.proto


@with_all_shapes
def test_the_view_of_a_joined_graph_is_made_of_those_of_its_bodies(
    shape: str, is_function: bool
) -> None:
    """As if all of its nodes were read; the bodies that have no view are."""
    tree, library = tree_of(shape, is_function)
    joined, kinds = join(tree), kinds_with(library.get)
    views = {}
    for region in tree.walk():
        is_body = is_function or not region.is_main
        views[region] = (view_function if is_body else view_graph)(region.proto, kinds=kinds)

    def assert_view_of(known: Collection[Region]) -> None:
        shapes = dict.fromkeys(tree.walk())
        found = joined.view({region: views[region] for region in known}, shapes)
        nodes = list(joined.proto.node)
        index = NodeIndex(kinds, named_outputs=True)
        index.extend(nodes)
        assert_same(found, GraphView(nodes, index, is_function=False, aliases=joined.aliases))

    assert_view_of(views)
    assert_view_of([tree])
    assert_view_of(list(views)[::2])
