"""Gathers the replacements of all units in a graph, and makes them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from tensorflow.core.framework import graph_pb2

from graph_passes.ir.eligibility import numbers_of
from graph_passes.ir.graph_view import GraphView
from graph_passes.ops.reasons import Reason
from graph_passes.rewriter.emitter import TensorFact
from graph_passes.rewriter.gate import Gate
from graph_passes.rewriter.matcher import Matcher, NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.rewriter.surgery import Edits, Unread, make_edits

_LOGGER = logging.getLogger(__name__)
_Found = TypeVar("_Found")


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A subgraph that looks like a pattern but is not one.

    Attributes:
        node: the node that the search started from.
        why: what is amiss.
    """

    node: str
    why: str


class GraphEdits(Edits):
    """The replacements that were accepted in one graph, and what came close.

    Attributes:
        view: the graph that the edits are for.
        made: tensors of new nodes -> what is known of them.
        units: "rule: node" of each subgraph that is replaced.
        misses: what came close to a pattern.
        node_lists: node -> the list that it counts as being on, `op_lists.FLOAT32` for what
            computes in float32 inside a unit. A denied op within a unit denies nothing outside.
        kept: the numbers of nodes that must stay as they are.
        owner: of the protos of new nodes; each alone would take a thousand bytes.
        taken: the names of new nodes.
    """

    def __init__(
        self,
        view: GraphView,
        preserve: Collection[str] = (),
        effects: Collection[str] = (),
        permits: Callable[[str, str], bool] = lambda _rule, _node: True,
    ) -> None:
        """Starts without edits.

        Args:
            view: the graph.
            preserve: names of nodes or tensors that must stay.
            effects: names of nodes that must stay for what they do, whatever they make.
            permits: tells of a rule and a node whether the replacement may be made.
        """
        super().__init__()
        self.view = view
        self.made: dict[str, TensorFact] = {}
        self.units: list[str] = []
        self.misses: list[NearMiss] = []
        self.node_lists: dict[str, str] = {}
        self.owner = graph_pb2.GraphDef()
        self.taken: set[str] = set()
        self._facts: dict[str, TensorFact] = {}
        self._has_failed = False
        self._preserve, self._effects, self._permits = preserve, effects, permits
        self._preserved = frozenset(numbers_of(view, preserve))
        self.kept = self._preserved.union(numbers_of(view, effects))

    @functools.cached_property
    def matcher(self) -> Matcher:
        """Reads the graph; all patterns share it, and with it what it remembers."""
        return Matcher(self.view)

    @functools.cached_property
    def gate(self) -> Gate:
        """Decides which replacements are made."""
        return Gate(self.matcher, self.kept, self._preserved)

    @functools.cached_property
    def unread(self) -> Unread:
        """Finds the nodes of which nothing comes."""
        return Unread(self.view, self.kept)

    def attempt(self, number: int, find: Callable[[int], _Found]) -> _Found | None:
        """What a search that starts from a node finds; None, and a near miss, where it fails.

        A fault of one search costs neither the graph nor other units. The first of a graph is said
        as what it is: where one fails, all like it mostly do.
        """
        try:
            return find(number)
        except NoMatchError as miss:
            self.miss(number, str(miss))
        except Exception as error:
            self._fail(error, f"at the node {self.view.names[number]!r}", self.view.names[number])
        return None

    def survives(self, rule: str, search: Callable[[], object]) -> bool:
        """Runs a search of a whole graph, and tells whether it came to its end.

        What it has found before a fault of its own stays, as what others find does.
        """
        try:
            search()
        except Exception as error:
            self._fail(error, f"by the rule {rule!r}", "")
            return False
        return True

    def _fail(self, error: Exception, where: str, node: str) -> None:
        _LOGGER.log(
            logging.DEBUG if self._has_failed else logging.WARNING,
            "A search for a unit %s failed, and what is there stays as it is. This is a fault of "
            "tf_amp, please report it.",
            where,
            exc_info=True,
        )
        self._has_failed = True
        why = f"the search failed: {type(error).__name__}: {error}"
        self.misses.append(NearMiss(node, why if node else f"{where}, {why}"))

    def miss(self, number: int, why: str) -> None:
        """Notes what came close to a pattern."""
        self.misses.append(NearMiss(self.view.nodes[number].name, why))

    def propose(
        self, rule: str, number: int, write: Callable[..., None], *more: Any, stem: str = ""
    ) -> bool:
        """Makes one replacement if it passes the gate; a near miss tells why it does not.

        Args:
            rule: the rule that it falls under.
            number: the node that it is named after, whose device and colocation new nodes have.
            write: writes it into a `Replacement`; raises NoMatchError if it cannot be.
            more: what `write` is given besides.
            stem: what names of new nodes begin with; the name of that node by default.

        Returns:
            Whether it is made. One that changes nothing is not.
        """

        def admitted(number: int) -> Replacement:
            new = Replacement(self, number, stem)
            write(new, *more)
            if new.edits_graph:
                self.gate.admit(new)
            return new

        new = self.attempt(number, admitted)
        if new is None or not (new.edits_graph or new.node_lists):
            return False
        if not self._permits(rule, self.view.names[number]):
            self.miss(number, Reason.BISECT_LIMIT.text)
            return False
        self._accept(new)
        self.units.append(f"{rule}: {self.view.names[number]}")
        return True

    def _accept(self, new: Replacement) -> None:
        self.redirect.update(new.redirect)
        self.inputs.update(new.inputs)
        for name, controls in new.controls.items():
            self.controls[name] = (*self.controls.get(name, ()), *controls)
        self.node_lists.update(new.node_lists)
        self.made.update(new.made)
        self.in_place.update(new.in_place)
        self.new_nodes.extend(node for node, _, _ in new.new_nodes)
        self.shapes.update(new.shapes)

    def fact(self, tensor: str) -> TensorFact:
        """What is known of a tensor of the graph or of an accepted replacement."""
        known = self.made.get(tensor) or self._facts.get(tensor)
        if known is not None:
            return known
        view, number = self.view, self.matcher.maker(tensor)
        slots = view.layout(number).out_slots
        port = view.split(tensor)[1]
        dtype = view.dtypes[view.base[number] + slots[port]] if slots else 0
        fact = self._facts[tensor] = TensorFact(dtype % 100, self.matcher.shape_of(tensor))
        return fact

    def apply(self) -> GraphView:
        """The graph with all edits made; nothing in the view or the protos is changed."""
        if not (self.redirect or self.inputs or self.in_place):
            return self.view
        for name in ("matcher", "gate", "_facts"):
            self.__dict__.pop(name, None)  # in a large graph they remember a lot
        return make_edits(self.view, self, self.unread)

    def preview(self) -> GraphView:
        """The graph as `apply` would make it now; more edits may follow."""
        trial = copy.copy(self)
        trial.new_nodes = copy.deepcopy(self.new_nodes)
        trial.in_place = copy.deepcopy(self.in_place)
        return trial.apply()

    def onto(self, view: GraphView) -> GraphEdits:
        """Further edits, for the graph that these give or for one with fewer nodes."""
        after = GraphEdits(view, self._preserve, self._effects, self._permits)
        after.units, after.misses, after.shapes = self.units, self.misses, self.shapes
        return after
