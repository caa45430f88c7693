"""Gradient steps of traced functions, run after their definitions were rewritten."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2
from tensorflow.python.eager import context, execute

from graph_passes import PrecisionConfig, RewriteResult, rewrite_function_def
from graph_passes.functions.call_tree import CallTrees, node_types_with
from graph_passes.functions.loop_sum_moves import prepare_tree
from graph_passes.functions.specialization import name_functions
from graph_passes.ir.view import view_body
from graph_passes.pipeline import prepare
from graph_passes.policy.op_lists import load_op_lists
from tf_amp.hosts.function_devices import captured_constants
from tf_amp.hosts.function_shapes import called_shapes, traced_shapes

_NUMBERS = itertools.count()

Functions = dict[str, function_pb2.FunctionDef]


def library(name: str) -> function_pb2.FunctionDef | None:
    """A function of the eager context."""
    eager = context.context()
    return eager.get_function_def(name) if eager.has_function(name) else None


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """The definition of a step and those of the functions that the rewrite made for it."""

    step: function_pb2.FunctionDef
    extra: tuple[function_pb2.FunctionDef, ...]

    @property
    def functions(self) -> Functions:
        """All of them, by name."""
        return {f.signature.name: f for f in (self.step, *self.extra)}

    def loops(self) -> list[tuple[node_def_pb2.NodeDef, function_pb2.FunctionDef]]:
        """The loops of the step that the rewrite has changed, with their bodies."""
        functions = self.functions
        return [
            (node, functions[node.attr["body"].func.name])
            for function in functions.values()
            for node in function.node_def
            if node.op in ("While", "StatelessWhile") and node.attr["body"].func.name in functions
        ]


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced function that gives gradients."""

    concrete: Any

    def rewritten(self, config: PrecisionConfig) -> Rewritten:
        """What the whole pass makes of it."""
        result = self.result(config)
        return Rewritten(result.proto, result.extra_functions)  # type: ignore[arg-type]

    def result(self, config: PrecisionConfig) -> RewriteResult:
        """The outcome of the whole pass."""
        graph, definition = self.concrete.graph, self.concrete.function_def
        result = rewrite_function_def(
            definition,
            config,
            library=library,
            shapes=traced_shapes(graph, definition),
            function_shapes=called_shapes(graph._functions),
            function_constants=captured_constants(graph, definition),
        )
        assert result.failure is None
        return result

    def moved(self, config: PrecisionConfig) -> Rewritten:
        """The step with its sums moved out of loops and all dtypes as they were."""
        lists = load_op_lists(config)
        main = self.concrete.function_def
        tree = CallTrees(library, lambda op: lists.list_of(op) == "allow", main).build(main)
        view = functools.partial(view_body, node_types=node_types_with(library))
        new, _ = prepare_tree(
            tree,
            config,
            (),
            lambda _, body, __: prepare(body, config, (), view)[1],
        )
        # Naming writes into bodies, and those that nothing changed are the library's own.
        new = new.with_bodies(lambda region: copy.deepcopy(region.proto))
        return Rewritten(new.proto, name_functions(new, library))  # type: ignore[arg-type]

    def run(self, rewritten: Rewritten, *arguments: Any) -> list[Any]:
        """The results of a rewritten step."""
        eager = context.context()
        for function in rewritten.extra:
            if not eager.has_function(function.signature.name):
                eager.add_function_def(function)
        step = function_pb2.FunctionDef()
        step.CopyFrom(rewritten.step)
        step.signature.name = f"{step.signature.name}_rewritten_{next(_NUMBERS)}"
        eager.add_function_def(step)
        inputs = [*map(tf.convert_to_tensor, arguments), *self.concrete.captured_inputs]
        count = len(step.signature.output_arg)
        made = execute.execute(step.signature.name, count, inputs, (), eager)
        return [tensor.numpy() for tensor in made]


def traced(gradients: Callable[..., Sequence[Any]], *specs: tf.TensorSpec) -> Step:
    """Traces a function; gradients are dense tensors."""
    return Step(tf.function(gradients, autograph=False).get_concrete_function(*specs))
