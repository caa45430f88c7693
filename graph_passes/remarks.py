"""Remarks: everything that the pass decides, one record each, and the file that holds them.

The schema is closed: a reader knows every kind and every field of `SCHEMA_VERSION`. Reports, tables
and files are views of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from graph_passes.policy.op_lists import product_ops
from graph_passes.units.reduction.ones_product import is_ones_product

SCHEMA_VERSION = 2
"""Version of the lines that `FunctionRemarks.to_lines` writes."""

Kind = Literal["converted", "kept", "unit", "near_miss", "cast", "note"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class RemarksError(ValueError):
    """Lines are no remarks, or of a version that this release does not know."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One decision.

    Attributes:
        kind: "converted" or "kept" (a type attribute of a node), "unit" (a subgraph that was
            replaced), "near_miss" (one that was not), "cast" (a Cast that was added), or "note".
        rule: what decided: a reason in small letters ("deny_list"), the rule of a unit
            ("layer-norm"), the direction of a Cast ("to_target", "to_float32").
        function: the function that has the node; "" for the graph that was rewritten.
        node: the node's name.
        op: its op type.
        op_list: the list that counts for it: "allow", "infer", "clear", "deny", or "" for none.
        attr: the type attribute, `T` or `Tin[2]`.
        reason: why, for people.
        path: for what a denied op reaches, the nodes from that op to this one.
        blocked_by: the op type at the start of the path.
        shapes: static shapes of the outputs; None for one that is not known, and in one for a
            dimension that is not.
        flops: the arithmetic of a matrix product or convolution, where its shapes tell.
        sides: of such a one, the lengths that matrix units work in blocks of: rows, summed axis and
            columns, or the input and output channels of a convolution; None for one that varies.
        bytes: what a Cast reads and writes, where its shape tells.
        seconds: the estimated time in the dtype that it has now, where a cost table has it.
        seconds_float32: that in float32; 0 for a Cast, which float32 has not.
        lines: the Python lines that made it, "file.py:42": the innermost one outside installed
            packages first, then the innermost one of a package, if that is deeper.
        number: its place among the conversions and units of the process, where they are numbered.
    """

    kind: Kind
    rule: str = ""
    function: str = ""
    node: str = ""
    op: str = ""
    op_list: str = ""
    attr: str = ""
    reason: str = ""
    path: tuple[str, ...] = ()
    blocked_by: str = ""
    shapes: tuple[tuple[int | None, ...] | None, ...] = ()
    flops: int | None = None
    sides: tuple[int | None, ...] = ()
    bytes: int | None = None
    seconds: float | None = None
    seconds_float32: float | None = None
    lines: tuple[str, ...] = ()
    number: int | None = None

    @property
    def is_product(self) -> bool:
        """Whether it is about a product or convolution: of the allow list, as shipped or now.

        Products that take the place of sums are none of the program's.
        """
        about_node = self.kind in ("converted", "kept")
        is_listed = self.op_list == "allow" or self.op in product_ops()
        return about_node and is_listed and not is_ones_product(self.node)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not empty, as JSON-ready values."""
        values = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        return {name: value for name, value in values if value not in ("", None, ())}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Remark:
        """The reverse of `to_dict`, also of what JSON made of it.

        Raises:
            RemarksError: a field or the kind is not of the schema.
        """
        unknown = sorted(fields.keys() - cls.__dataclass_fields__.keys())
        if unknown or fields.get("kind") not in KINDS:
            raise RemarksError(
                f"A remark has a kind of {', '.join(KINDS)} and the fields "
                f"{', '.join(cls.__dataclass_fields__)}. Received: {dict(fields)!r}."
            )
        return cls(**{name: _tuples(value) for name, value in fields.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionRemarks:
    """The remarks on one rewrite.

    Attributes:
        name: the function or graph, for people, such as "one_step_on_data (fit)".
        target_dtype: "float16" or "bfloat16".
        device: "GPU" or "CPU".
        total_nodes: nodes of the graph as it was given.
        failure: why the rewrite was given up, None where it was not.
        unknown_dimension: the length that counted for dimensions that are not known.
        compiled: whether XLA compiles the function.
        remarks: one for each decision.
    """

    name: str
    target_dtype: str
    device: str
    total_nodes: int
    failure: str | None = None
    unknown_dimension: int | None = None
    compiled: bool = False
    remarks: tuple[Remark, ...] = ()

    def to_lines(self) -> Iterator[str]:
        """JSON lines: what all remarks have in common, then each remark."""
        head = {name: getattr(self, name) for name in self.__dataclass_fields__}
        head.pop("remarks")
        yield json.dumps({"schema_version": SCHEMA_VERSION, **head})
        for remark in self.remarks:
            yield json.dumps(remark.to_dict())

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> FunctionRemarks:
        """The reverse of `to_lines`.

        Raises:
            RemarksError: the lines are something else.
        """
        try:
            head, *rest = (json.loads(line) for line in lines)
            version = head.pop("schema_version")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RemarksError(f"These are no remarks in JSON lines: {error!r}.") from error
        if version != SCHEMA_VERSION:
            raise RemarksError(
                f"The remarks have schema version {version!r}, and this release reads "
                f"{SCHEMA_VERSION}. Read them with the release that wrote them."
            )
        try:
            return cls(**head, remarks=tuple(map(Remark.from_dict, rest)))
        except (TypeError, AttributeError) as error:
            raise RemarksError(f"These are no remarks in JSON lines: {error}.") from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
