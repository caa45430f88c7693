"""Adam's update of a table of which a step reads some rows, such as an embedding's.

Keras gives the average of the gradient the sum of what a row got, and that of its square the sum of
the squares: of a row that was read twice no one gradient has both. The op is given the root of the
latter, and the rows of the former average are moved before by what it will be wrong by. Rows that
were not read get 0 either way. So the table and its slots are gone over once.

The root is no larger than the sum of the sizes of what is added: moving by it rounds no worse than
the sum does. That variable is not written row by row which the forward pass reads: TensorFlow would
copy it at each read from then on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from tensorflow.python.framework import dtypes

from graph_passes.rewriter.effects import Contraction
from graph_passes.rewriter.matcher import Matcher, NoMatchError
from graph_passes.rewriter.replacement import Replacement

_FEW = 8
"""The part of a table's rows up to which it is worth while. Of 30,522 x 768 the update took 45 ms
in place of 78 where a sixtieth of the rows was read, 91 of 103 at a quarter, 181 of 135 at all."""


@dataclasses.dataclass(frozen=True)
class ReadRows:
    """The rows of a table that a step reads.

    Attributes:
        indices: which, each as often as it is read; int32 or int64 [reads].
        gradients: of what was read; float32 [reads, ...].
        squares: their squares.
        count: how many rows the table has; a scalar.
    """

    indices: str
    gradients: str
    squares: str
    count: str


def find_read_rows(m: Matcher, gradient: str, squares: str, unknown: int) -> ReadRows:
    """The rows of which two tensors are sums, of gradients and of their squares.

    Args:
        m: reads the graph, in a function: there all that reads or writes a variable is in order,
            so that nothing sees it between the steps of the update.
        gradient: the one; of the table's shape, all known.
        squares: the other.
        unknown: what is taken for a size that is not known.

    Raises:
        NoMatchError: they are other tensors, it is no function, or the rows are too many.
    """
    one, other = m.maker(gradient), m.maker(squares)
    if {m.ops[one], m.ops[other]} != {"UnsortedSegmentSum"}:
        raise NoMatchError("it is no update that one op computes")
    (added, indices, count), (squared, same, _) = m.inputs(one), m.inputs(other)
    square = m.maker(squared)
    if m.ops[square] not in ("Square", "Mul") or {*m.inputs(square)} != {added} or same != indices:
        raise NoMatchError("the rows of one sum are not the squares of the other's")
    if not m.view.is_function:
        raise NoMatchError("something may read the table between the steps of its update")
    rows, before = m.stored_shape(gradient), m.stored_shape(m.through(indices, "Reshape"))
    reads = math.prod(size or unknown for size in before or (None,))
    if not rows or not rows[0]:
        raise NoMatchError("nothing shows how many rows the table has")
    if reads * _FEW > rows[0]:
        raise NoMatchError("so many rows of the table are read that one op for it is no gain")
    return ReadRows(indices, added, squared, count)


def write_rows(
    new: Replacement,
    nodes: Contraction,
    op: str,
    inputs: Mapping[str, str],
    read: ReadRows,
    shift: str,
) -> None:
    """Writes the update of a table, with all arguments of Adam's op but the gradient as given.

    The shift is (1 - beta1) / beta1.
    """
    make = new.op
    rows, place = make.Unique(read.indices, name="rows")
    count = make.Size(rows, name="rows_count")
    sums = make.UnsortedSegmentSum(read.gradients, place, count, name="sums")
    squares = make.UnsortedSegmentSum(read.squares, place, count, name="squares")
    roots = make.Sqrt(squares, name="roots")
    change = make.Mul(make.Sub(sums, roots, name="change"), shift, name="change")
    # Where squares overflow, that of the sum mostly does too, and its average is to be what it is.
    finite, none = make.IsFinite(roots, name="finite"), new.constant(0.0, name="none", beside=roots)
    change = make.SelectV2(finite, change, none, name="change")
    roots = make.SelectV2(finite, roots, sums, name="roots")
    # The sum over the table leaves out what has an index below 0, and fails for one too large.
    whole = dtypes.as_dtype(new.fact(rows).dtype).as_numpy_dtype
    zero = new.constant(0, name="zero", beside=rows, dtype=whole)
    there = make.Where(make.GreaterEqual(rows, zero, name="rows_there"), name="rows_there")
    moved, change = (make.GatherNd(each, there, name="moved") for each in (rows, change))
    make.ResourceScatterAdd(inputs["m"], moved, change, name="move")
    move = new.new_nodes[-1][0]
    gradient = make.UnsortedSegmentSum(roots, rows, read.count, name="gradient")
    new.contract(nodes, op, *{**inputs, "grad": gradient}.values(), first=[move], use_locking=True)
