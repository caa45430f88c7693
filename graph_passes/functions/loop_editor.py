"""More variables for a loop: in its functions and at its node."""

from __future__ import annotations

from tensorflow.core.framework import function_pb2, types_pb2

from graph_passes.rewriter.body_editor import BodyEditor
from graph_passes.rewriter.emitter import free_name

_ORIGINAL = "_num_original_outputs"
"""Attribute of a loop: how many of its outputs are its variables, see `ops/while_v2.py`."""


class LoopEditor:
    """Edits a loop in place.

    Attributes:
        caller: edits the graph that has the loop's node.
        node: that node.
        body: edits the loop's body.
    """

    def __init__(
        self,
        caller: BodyEditor,
        name: str,
        body: function_pb2.FunctionDef,
        cond: function_pb2.FunctionDef,
    ) -> None:
        """Starts editing; `name` is the node's, and the functions must be the loop's own."""
        self.caller, self.node = caller, caller.node(name)
        self.body = BodyEditor(body)
        self._body_def, self._functions = body, (body, cond)
        names = self.body.names | BodyEditor(cond).names
        self._taken = names | {each.removesuffix("_out") for each in names}

    def add_variable(self, name: str, start: str, dtype: int) -> tuple[str, int]:
        """Adds a loop variable, which no round changes unless `set_next` says how.

        Args:
            name: what its argument is called where that name is free.
            start: the tensor of the caller that it starts from.
            dtype: of the variable.

        Returns:
            Its argument in both functions, and the output of the node with what it ends as.
        """
        name = free_name(name, self._taken)
        self._taken.add(name)
        self.body.names.update((name, f"{name}_out"))
        for function in self._functions:
            function.signature.input_arg.add(name=name, type=dtype)
            if dtype == types_pb2.DT_VARIANT:  # a handle is a scalar
                shapes = function.arg_attr[len(function.signature.input_arg) - 1].attr
                shapes["_output_shapes"].list.shape.add()
        self._body_def.signature.output_arg.add(name=f"{name}_out", type=dtype)
        self._body_def.ret[f"{name}_out"] = name
        dtypes = self.node.attr["T"].list.type
        position = len(dtypes)
        self.node.input.insert(position, start)
        dtypes.append(dtype)
        # A gradient that is taken later leaves out what comes behind these.
        if _ORIGINAL in self.node.attr and self.node.attr[_ORIGINAL].i == position:
            self.node.attr[_ORIGINAL].i += 1
        for attr in ("output_shapes", "_output_shapes"):
            if attr in self.node.attr and self.node.attr[attr].list.shape:
                shape = self.node.attr[attr].list.shape.add()
                shape.unknown_rank = dtype != types_pb2.DT_VARIANT
        return name, position

    def set_next(self, argument: str, tensor: str) -> None:
        """Lets a round give a tensor of the body as the next value of a variable that was added."""
        self._body_def.ret[f"{argument}_out"] = tensor
