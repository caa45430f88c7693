"""How far what a step computes in mixed precision is from float32, tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from tf_amp.diagnosis.recording import Key, Record, Turn
from tf_amp.diagnosis.step import Low


@dataclasses.dataclass(frozen=True)
class Error:
    """How far a tensor that was recorded is from float32.

    Attributes:
        record: the tensor.
        reference: the same in float32, None where there is none like it.
        error: the distance, by the length of that.
        before: the largest distance of what its node reads.
        length: the largest length of what its node reads, in the target dtype; where that is what a
            unit gives, of what the unit is made of too.
    """

    record: Record
    reference: Record | None
    error: float
    before: float
    length: float


def errors(
    low: Low, records: Iterable[Record], right: Mapping[tuple[Key, Turn], Record]
) -> Iterator[Error]:
    """The distances of all tensors that can be compared."""
    found: dict[tuple[str, str, str], Error] = {}
    for record in records:
        (function, node, _), (calls, _) = record.key, record.turn
        sources = ((calls, function, source) for source in low.sources.get((function, node), ()))
        read = [found[source] for source in sources if source in found]
        before = max((each.error for each in read), default=0.0)
        reference = right.get((low.origin(record.key), record.turn))
        error = None if reference is None else record.error(reference)
        known = Error(
            record=record,
            reference=reference,
            # Of what a unit gives nothing is known but that it is no nearer than what it reads.
            error=before if error is None else error,
            before=before,
            length=max(map(_length, read), default=0.0),
        )
        last = found.setdefault((calls, function, node), known)
        if known.error > last.error:
            found[calls, function, node] = known
        if error is not None:
            yield known


def _length(read: Error) -> float:
    if read.reference is None:  # what a unit gives may be rounding itself
        return max(read.length, read.record.length)
    return read.record.length
