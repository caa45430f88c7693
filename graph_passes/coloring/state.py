"""What the painting stages read and write."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Set

import numpy as np

from graph_passes.ir.adjacency import Adjacency
from graph_passes.ir.constants import NO_CONSTANTS, Constants
from graph_passes.ir.graph_view import FLOAT, GraphView
from graph_passes.ops.kernels import ONE_DTYPE_OPS, KernelSupport, kernel_support
from graph_passes.ops.node_types import NodeType
from graph_passes.ops.reasons import Reason
from graph_passes.policy.config import PrecisionConfig
from graph_passes.policy.op_lists import FLOAT32, LIST_NAMES, OpLists, load_op_lists
from graph_passes.policy.rules import Rule

_CODES: Mapping[str, int] = {name: code for code, name in enumerate((FLOAT32, *LIST_NAMES))}
ALLOW, INFER, CLEAR, DENY = map(_CODES.__getitem__, LIST_NAMES)
"""List codes in `Coloring.list_codes`; 0 is a vertex on no list."""
_LOOPS = frozenset(("While", "StatelessWhile"))


class Coloring:
    """One graph being painted.

    Attributes:
        view: the graph.
        config: what the caller chose.
        target: the target dtype.
        lists: the op lists in force.
        support: answers whether a retyped node has a kernel.
        edges: edges between float32 vertices, implicit tensor-list edges included.
        list_codes: for each vertex the code of its op's list, 0 for none and for other dtypes;
            uint8 [vertices].
        eligible: for each vertex whether its node may be converted; bool [vertices].
        low: for each vertex 1 where it is to be in the target dtype (the colour ALLOW).
        denied: for each vertex 1 where it has the colour DENY.
        why: for each vertex the code of the reason recorded so far, 0 for none.
        parents: for a vertex behind a denied one, the vertex it was reached from.
        clusters: groups of vertices that must have one colour: those that share a tensor list,
            a pooling and its gradients.
        out_of_range: vertices that were denied for a constant's sake.
        followers: vertices that were painted for the Casts that it may save.
        rules: number of a node -> the rule of the user that decides it.
        constants: the arguments of the main graph that are constants, by name.
    """

    def __init__(
        self,
        view: GraphView,
        config: PrecisionConfig,
        ineligible: Mapping[int, Reason],
        constants: Constants = NO_CONSTANTS,
    ) -> None:
        """Starts with nothing painted; `ineligible` are nodes by number that stay as they are."""
        self.view, self.config, self.target = view, config, config.target
        self.constants = constants
        self.lists = load_op_lists(config)
        self.support = kernel_support(config.device, config.target)
        vertices = len(view.dtypes)
        self.list_codes = view.per_slot(functools.partial(_list_codes, self.lists), np.uint8)
        # A node that runs a function must agree with the function's signature, which is float32.
        bound = view.is_vertex_of(lambda node_type: node_type.runs_functions) & view.is_float
        allowed = np.ones(len(view.nodes) + 1, bool)
        allowed[-1] = False  # the node -1 of the opaque vertex
        allowed[list(ineligible)] = False
        self.eligible = allowed[np.asarray(view.vertex_nodes)] & ~bound
        self.edges: Adjacency
        self.low = bytearray(vertices)
        self.denied = bytearray(vertices)
        self.why = bytearray(vertices)
        for vertex in np.flatnonzero(~self.eligible & view.is_float).tolist():
            number = view.vertex_nodes[vertex]
            self.why[vertex] = ineligible.get(number, Reason.RUNS_FUNCTION)
        self.parents: dict[int, int] = {}
        self.clusters: list[list[int]] = []
        self.out_of_range: list[int] = []
        self.followers: list[int] = []
        self.rules: dict[int, Rule] = {}

    def relist(self, node_lists: Mapping[str, str]) -> None:
        """Gives nodes another list than their op has, as `GraphEdits.node_lists` says by name."""
        for name, list_name in node_lists.items():
            vertices = self.float_vertices(self.view.index[name])
            self.list_codes[vertices] = _CODES[list_name]
            if list_name == FLOAT32:
                self.block(vertices, Reason.INSIDE_UNIT)

    def obey(self, rules: Mapping[str, Rule]) -> None:
        """Takes rules of the user, and lets those that keep nodes in float32 do so.

        A node that is kept float32 still denies what its op denies. Rules go by names of nodes.
        """
        found = {self.view.index.get(name): rule for name, rule in rules.items()}
        # A unit may have taken the place of a node.
        self.rules = {number: rule for number, rule in found.items() if number is not None}
        for number, rule in self.rules.items():
            if rule.action == "deny":
                self.list_codes[self.float_vertices(number)] = DENY
            elif rule.keeps:
                self.block(self.float_vertices(number), Reason.KEPT_BY_RULE)

    def move_by_rules(self) -> None:
        """Lets rules of the user put nodes on other lists, but for what stays float32 anyway.

        What only hands values on goes by its neighbours, unless a rule asks for its op. No rule
        converts what has a state or brings values into the graph.
        """
        parts = (Reason.INSIDE_UNIT, Reason.VARIABLE_UPDATE)
        protected = (*parts, *(reason for reason in Reason if reason.keeps_values))
        for number, rule in self.rules.items():
            if rule.keeps or not _computes(self.view.node_type(number)):
                continue
            for vertex in self.float_vertices(number):
                follows = self.list_codes[vertex] == CLEAR and not rule.op
                if not follows and self.why[vertex] not in protected:
                    self.list_codes[vertex] = _CODES[rule.action]

    def float_vertices(self, number: int) -> list[int]:
        """The float32 vertices of a node."""
        return self.view.vertices_of(number, FLOAT)

    def connect(self, implicit_edges: list[tuple[int, int]]) -> None:
        """Makes the edge tables, with implicit edges between the ends of tensor lists."""
        self.edges = self.view.adjacency(FLOAT, implicit_edges)

    def disconnect(self) -> None:
        """Drops the edge tables, which nothing but painting needs."""
        del self.edges

    @property
    def is_low(self) -> np.ndarray:
        """`low` as it is now; bool [vertices]."""
        return np.frombuffer(bytes(self.low), bool)

    @property
    def is_denied(self) -> np.ndarray:
        """`denied` as it is now; bool [vertices]."""
        return np.frombuffer(bytes(self.denied), bool)

    def where(self, mask: np.ndarray) -> list[int]:
        """The vertices of a mask, in order."""
        return mask.nonzero()[0].tolist()  # type: ignore[no-any-return]

    def carriers(self) -> list[int]:
        """The vertices at which values come back to a loop in its next round."""
        return self.where(self.view.is_vertex_of(_carries) & self.view.is_float)

    def has_op(self, ops: Set[str]) -> np.ndarray:
        """The vertices of nodes that have one of some ops; bool [vertices]."""
        return self.view.is_vertex_of(lambda node_type: node_type.op in ops)

    def floats_of(self, ops: Set[str]) -> list[int]:
        """The float32 vertices of such nodes, in order."""
        return [v for number in self.view.of_op(*ops) for v in self.float_vertices(number)]

    def paint(self, vertices: Iterable[int], reason: Reason) -> None:
        """Gives vertices the colour ALLOW; the first reason stays."""
        low, why = self.low, self.why
        for vertex in vertices:
            if not low[vertex]:
                low[vertex] = 1
                why[vertex] = reason

    def erase(self, vertices: Iterable[int], reason: Reason) -> None:
        """Takes the colour ALLOW from vertices."""
        for vertex in vertices:
            if self.low[vertex]:
                self.low[vertex] = 0
                self.why[vertex] = reason

    def deny(self, vertices: Iterable[int], reason: Reason) -> None:
        """Gives vertices the colour DENY, which takes the colour ALLOW away."""
        for vertex in vertices:
            self.low[vertex] = 0
            if not self.denied[vertex]:
                self.denied[vertex] = 1
                self.why[vertex] = reason

    def block(self, vertices: Iterable[int], reason: Reason) -> None:
        """Makes vertices ineligible: they stay float32, and nothing follows from it."""
        for vertex in vertices:
            if self.eligible[vertex]:
                self.eligible[vertex] = False
                self.why[vertex] = reason

    @functools.cached_property
    def has_kernel(self) -> np.ndarray:
        """The float32 vertices whose node has a kernel with the slot in the target dtype; bool."""
        one_dtype = ONE_DTYPE_OPS if self.config.has_rule("max-pool") else frozenset[str]()
        return self.view.per_slot(functools.partial(_float_kernels, self.support, one_dtype), bool)

    @functools.cached_property
    def permitted(self) -> np.ndarray:
        """The vertices whose slot may hold the target dtype by the op definition; bool."""
        return self.view.per_slot(functools.partial(_permits, self.target), bool)


# What follows depends on the node type alone, and a process meets the same ones in many graphs.
_OF_NODE_TYPE = functools.lru_cache(maxsize=4096)


@_OF_NODE_TYPE
def _list_codes(lists: OpLists, node_type: NodeType) -> tuple[int, ...]:
    """For each slot of a node type the code of the list that it is on."""
    entry = None if node_type.op_type is None else lists.entries.get(node_type.op_type.name)
    code = 0 if entry is None else _CODES[entry.list_name]
    if node_type.is_inlined_call:  # its functions change with it
        code = code or CLEAR
    return tuple(code if dtype == FLOAT else 0 for dtype in node_type.dtypes)


def _carries(node_type: NodeType) -> bool:
    op_type = node_type.op_type
    is_loop = op_type is not None and op_type.name in _LOOPS and node_type.is_inlined_call
    return is_loop or node_type.op == "Merge"


@_OF_NODE_TYPE
def _computes(node_type: NodeType) -> bool:
    """Whether nodes of a node type make values of others alone."""
    op_type, reads = node_type.op_type, node_type.layout.in_slots
    return bool(op_type is not None and reads and op_type.name != "Cast" and op_type.is_pure)


@_OF_NODE_TYPE
def _permits(target: int, node_type: NodeType) -> tuple[bool, ...]:
    """For each slot of a node type whether its op definition lets it hold the target dtype."""
    op_type, slots = node_type.op_type, node_type.layout.slots
    return tuple(op_type is not None and op_type.allows(slot, target) for slot in slots)


@_OF_NODE_TYPE
def _float_kernels(
    support: KernelSupport, one_dtype: Set[str], node_type: NodeType
) -> tuple[bool, ...]:
    """For each slot of a node type whether it is float32 and has a kernel in the target dtype."""
    return tuple(
        dtype == FLOAT and support.supports(node_type, position, one_dtype)
        for position, dtype in enumerate(node_type.dtypes)
    )
