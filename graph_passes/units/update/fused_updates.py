"""Optimizers' updates as one op each, which reads and writes every variable once.

Keras and tf_keras write an update of Adam as a dozen element-wise ops, each with a pass over
memory; in a training step of a transformer on a CPU they take as long as a third of all else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from graph_passes.ir.graph_view import Shape, elements
from graph_passes.policy.config import PrecisionConfig
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.effects import in_circles
from graph_passes.rewriter.gate import CONTROL_FLOW
from graph_passes.rewriter.matcher import NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.unit_pass import UnitSearch
from graph_passes.units.update.expression import Update, UpdateSearch, Variables, is_float32_write
from graph_passes.units.update.formulas import (
    ADAM,
    SHIFT,
    SQUARES,
    Arguments,
    op_of_update,
    write_scalar,
)
from graph_passes.units.update.row_updates import ReadRows, find_read_rows, write_rows

RULE = "fused-update"
OPS = ("AssignAddVariableOp", "AssignSubVariableOp")
"""What every update ends with."""

_PACKET, _ONE_THREAD, _WORTH_THREADS = 8, 56, 1 << 14
"""Numbers that TensorFlow's Adam computes at once on a CPU; how many such steps it takes before it
wakes other threads; from how many numbers on that is worth it. Its kernel
(`ApplyAdamNonCuda` of training_ops.cc) gives the cost of all steps as that of each. A step of
three tiny layers took 1.1 to 1.3 times float32's time, most of it for two such updates."""

_Found = tuple[str, Arguments, Update, ReadRows | None]


def fuse_updates(search: UnitSearch) -> None:
    """Replaces updates by one op each; further units are found in the graph without them."""
    edits = search.edits
    view, m = edits.view, edits.matcher
    if search.config.fused:
        return  # a compiler that fuses element-wise ops makes one loop of an update
    if not view.ops.isdisjoint(CONTROL_FLOW):
        return  # parts of an update may be dead where others run
    variables = Variables(m, edits.gate.preserved)
    awaited = frozenset(variables.awaited.values())  # those of slots, which others begin with
    steps = [number for number in view.of_op(*OPS) if is_float32_write(m, number)]
    steps.sort(key=awaited.__contains__)
    found: list[_Found] = []
    written: set[int] = set()
    for with_slots in (True, False):
        find = functools.partial(_find, edits, variables, search.config, with_slots)
        for number in steps:
            if number in written or (with_slots and m.source(number, 1) not in variables.behind):
                continue
            one = edits.attempt(number, find)
            if one is not None:
                found.append(one)
                written.update(one[2].contraction.writes.values())
    circles = in_circles(view, [update.contraction for _, _, update, _ in found])
    constants: dict[tuple[str, float], str] = {}
    lasts = {view.names[update.contraction.last]: n for n, (_, _, update, _) in enumerate(found)}
    for _, number in sorted(lasts.items()):  # so that the order of nodes does not matter
        op, arguments, update, read = found[number]
        last = update.contraction.last
        if circles[number]:
            edits.miss(last, "something runs between the parts of the update")
            continue
        known = dict(constants)
        if edits.propose(RULE, last, _write, op, arguments, update, read, known):
            constants = known
    if edits.in_place:
        search.edits = edits.onto(edits.apply())


def _find(
    edits: GraphEdits, variables: Variables, config: PrecisionConfig, with_slots: bool, number: int
) -> _Found | None:
    """The update that ends with a write, None where it is none."""
    device = config.device
    search = UpdateSearch(variables, number, with_slots=with_slots)
    if with_slots and len(search.writes) == 1:
        return None
    _require_one_device(edits, device, search.writes)
    try:
        update = search.read()
        op, arguments = op_of_update(update.formula)
    except NoMatchError:
        if with_slots:
            raise
        return None
    read = None
    if SQUARES in arguments:
        if device != "CPU":
            raise NoMatchError("the rows of a table are updated by themselves on a CPU alone")
        gradient, squares = (update.tensors[str(arguments[name])] for name in ("grad", SQUARES))
        read = find_read_rows(edits.matcher, gradient, squares, config.unknown_dimension)
    elif op == ADAM and device == "CPU" and _wakes_threads(update.shape):
        raise NoMatchError("the op would wake threads for few numbers")
    return op, arguments, update, read


def _wakes_threads(shape: Shape | None) -> bool:
    """Whether Adam's op divides less work than is worth it."""
    size = elements(shape or ()) or 0
    steps = size if size % _PACKET else size // _PACKET
    return steps > _ONE_THREAD and size < _WORTH_THREADS


def _require_one_device(edits: GraphEdits, device: str, writes: Mapping[str, int]) -> None:
    """Asks that all variables are where one op can have them."""
    if len(writes) == 1:
        return
    nodes, maker = edits.view.nodes, edits.matcher.maker
    held_by = {nodes[maker(variable)].device for variable in writes}
    written_by = {nodes[write].device for write in writes.values()}
    if len(held_by) > 1 or len(written_by) > 1:
        raise NoMatchError("its variables are on several devices")
    if device != "CPU" and held_by == written_by == {""}:
        raise NoMatchError("nothing shows that its variables are on one device")


def _write(
    new: Replacement,
    op: str,
    arguments: Arguments,
    update: Update,
    read: ReadRows | None,
    constants: dict[tuple[str, float], str],
) -> None:
    inputs: dict[str, str] = {}
    attrs: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, bool):
            attrs[name] = value
        elif isinstance(value, str):
            inputs[name] = update.tensors[value]
            if value in update.broadcast and len(update.contraction.writes) > 1:
                shape, tensor = list(update.shape or ()), inputs[name]
                sizes = new.constant(shape, name=f"{name}_shape", beside=tensor)
                inputs[name] = new.op.BroadcastTo(tensor, sizes, name=name, shape=update.shape)
        else:
            inputs[name] = write_scalar(new, update, value, name, constants)
    if read is None:
        new.contract(update.contraction, op, *inputs.values(), use_locking=True, **attrs)
        return
    del inputs[SQUARES]
    write_rows(new, update.contraction, op, inputs, read, inputs.pop(SHIFT))
