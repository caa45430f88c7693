"""Cross entropy with one label a row, made from what it consists of.

TensorFlow's op makes the loss and its gradient of logits x [rows, classes] and labels l [rows]:

    e = Exp(x - m), with m = Max(x)          loss = Log(Sum(e)) + (m - x[l])
    gradient = e / Sum(e), but e[l] / Sum(e) - 1 at the label

On a CPU its kernel takes twice as long as these ops one by one, and makes the gradient where nobody
asks for it. The gradient is multiplied at once by what flows into each row, and what is at the
label is put in behind that, where it may be rounded already. As in TensorFlow's kernel, x - m, e
and the gradient take the place of the logits in memory, where nothing else reads these.

512 x 50,257 logits, made by a Mul and the gradient cast down, take 25 ms in place of 52, the loss
alone 17 in place of 48 (two cores).
"""

from __future__ import annotations

from tensorflow.python.framework import dtypes

from graph_passes.ir.graph_view import FLOAT, elements
from graph_passes.rewriter.matcher import Matcher
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.unit_pass import UnitSearch

RULE = "cross-entropy"
OPS = ("SparseSoftmaxCrossEntropyWithLogits",)
FEW_ELEMENTS = 1 << 13
"""Below this, more ops save nothing (two cores: 0.12 ms as before at 1,280 elements, 0.13 in place
of 0.15 at 8,192, 0.25 in place of 0.43 at 64,000)."""


def split_cross_entropies(search: UnitSearch) -> None:
    """Replaces cross entropies with labels by the ops that they consist of."""
    edits, view = search.edits, search.edits.view
    if not search.has_cpu_kernels:
        return
    m, unknown = edits.matcher, search.config.unknown_dimension
    for number in view.of_op(*OPS):
        logits = m.tensor(number, 0)
        is_known = view.dtypes[view.base[number]] == FLOAT and m.shape_of(logits) is not None
        if is_known and _size(m, logits, unknown) >= FEW_ELEMENTS:
            edits.propose(RULE, number, _write, number)


def _size(m: Matcher, logits: str, unknown: int) -> int:
    """The elements of logits: TensorFlow's own Reshape forgets the classes with the batch."""
    maker = m.maker(logits)
    tensors = [logits, *(m.inputs(maker)[:1] if m.op(maker) == "Reshape" else ())]
    return max(elements(m.shape_of(tensor) or (0,), unknown) or 0 for tensor in tensors)


def _write(new: Replacement, number: int) -> None:
    m, op = new.matcher, new.op
    logits, labels = m.inputs(number)
    shape = new.fact(logits).shape
    rows = shape[:1]  # type: ignore[index]
    column = (*rows, 1)
    axis = new.constant([1], name="axis", beside=logits)
    largest = op.Max(logits, axis, name="largest", keep_dims=True, shape=column)
    picked = _places(new, labels, largest)
    logit = op.GatherNd(logits, picked, name="logit_of_label", shape=rows)
    below = op.Sub(logits, largest, name="below_largest")
    new.wait(below, logit)
    exponentials = op.Exp(below, name="exponentials")
    total = op.Sum(exponentials, axis, name="total", keep_dims=True, shape=column)
    loss = m.output(number)
    read = {t for r in m.readers(number) for t in m.inputs(r) if m.maker(t) == number}
    if loss in read:
        largest, logarithm = (
            new.reshape(tensor, (None,), name=name, shape=rows)
            for tensor, name in ((largest, "largest_row"), (op.Log(total), "log_row"))
        )
        missing = op.Sub(largest, logit, name="missing")
        new.redirect[loss] = op.AddV2(logarithm, missing, name="loss", shape=rows)
    moved: list[str] = []
    for gradient in read - {loss}:
        weight, weighted = _weighted(m, number, gradient)
        factor = weight or new.constant(1.0, name="one", beside=total)
        scale = op.RealDiv(factor, total, name="scale", shape=column)
        of_label = op.GatherNd(exponentials, picked, name="exponential_of_label", shape=rows)
        scaled = op.Mul(exponentials, scale, name="scaled")
        new.wait(scaled, of_label)
        scale, factor = (
            new.reshape(tensor, (None,), name=name, shape=size)
            for tensor, name, size in ((scale, "scale_row", rows), (factor, "weight_row", None))
        )
        at_label = op.Sub(op.Mul(of_label, scale, name="label_scaled"), factor, name="at_label")
        made = op.TensorScatterUpdate(scaled, picked, at_label, name="gradient", shape=shape)
        new.redirect[weighted] = made
        moved.append(new.makers[made].name)
    # As the op itself: what comes behind it must not be rounded, but for what only moves values.
    new.node_lists.update((node.name, "deny") for node, _, _ in new.new_nodes if node.op != "Const")
    new.node_lists.update(dict.fromkeys(moved, "clear"))


def _weighted(m: Matcher, number: int, gradient: str) -> tuple[str | None, str]:
    """What flows into each row, and the gradient times that; None and the gradient itself.

    The form is that of `_SparseSoftmaxCrossEntropyWithLogitsGrad`, a column with a row for each.
    """
    readers = [reader for reader in m.readers(number) if m.reads(reader, gradient)]
    if len(readers) == 1 and m.op(readers[0]) == "Mul":
        weight = m.other_input(readers[0], gradient)
        rows = (m.shape_of(gradient) or ())[:1]
        if m.shape_of(weight) == (*rows, 1) and m.op(m.maker(weight)) == "ExpandDims":
            return weight, m.output(readers[0])
    return None, gradient


def _places(new: Replacement, labels: str, column: str) -> str:
    """Row and label of each row of the logits; fails where there are fewer or more labels."""
    dtype = new.fact(labels).dtype
    whole = dtypes.as_dtype(dtype).as_numpy_dtype
    start, step = (
        new.constant(value, name=name, beside=labels, dtype=whole)
        for value, name in ((0, "first_row"), (1, "next_row"))
    )
    count = new.op.Size(column, name="rows", out_type=dtype)
    rows = new.op.Range(start, count, step, name="row", shape=new.fact(labels).shape)
    return new.op.Pack(rows, labels, name="row_and_label", axis=1)
