"""What a pass over the units of a graph is given, and how it is declared."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

from graph_passes.ops.kernels import KernelSupport
from graph_passes.policy.config import PrecisionConfig
from graph_passes.policy.op_lists import FLOAT32, OpLists
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.units.normalization.norms import FoundNorm, find_norms


@dataclasses.dataclass
class UnitSearch:
    """One graph in which units are looked for.

    Attributes:
        edits: receives the replacements, the lists and the near misses.
        config: dtype and device.
        lists: the op lists in force.
        support: answers what has a kernel in the target dtype.
        in_float32: the units found so far that compute in float32 inside: of each the pattern, the
            node that makes its result, and its nodes.
        exact: nodes whose sums must not be rounded, by number: they feed what flows back to x.
    """

    edits: GraphEdits
    config: PrecisionConfig
    lists: OpLists
    support: KernelSupport
    in_float32: list[tuple[str, int, frozenset[int]]] = dataclasses.field(default_factory=list)
    exact: set[int] = dataclasses.field(default_factory=set)

    @functools.cached_property
    def norms(self) -> list[FoundNorm]:
        """The normalizations; those over single examples that are replaced are taken out."""
        return find_norms(self.edits)

    @property
    def is_float16(self) -> bool:
        """Whether the target dtype has a smaller range than float32."""
        return self.config.target_dtype == "float16"

    @property
    def is_bfloat16_cpu(self) -> bool:
        """Whether the kernels are those of oneDNN and Eigen in bfloat16."""
        return (self.config.device, self.config.target_dtype) == ("CPU", "bfloat16")

    @property
    def has_cpu_kernels(self) -> bool:
        """Whether each op runs by a kernel of a CPU: no compiler makes one of several."""
        return self.config.device == "CPU" and not self.config.fused

    @property
    def knows_times(self) -> bool:
        """Whether a cost table shows that oneDNN's kernels for bfloat16 run here, one an op."""
        is_here = self.is_bfloat16_cpu and self.has_cpu_kernels
        return is_here and self.config.cost_table is not None

    def infers(self, op: str) -> bool:
        """Whether an op is on the infer list: a pattern around one that is not stays float32."""
        return self.lists.list_of(op) == "infer"

    def keep_float32(
        self, kind: str, output: int, inside: frozenset[int], *, is_exact: bool
    ) -> None:
        """Makes a subgraph compute in float32 inside, while it takes and gives the target dtype.

        Statistics are denied, and with them the pass leaves all that follows up to the next op of
        the infer or allow list in float32: residual sums and dropouts among it. As a unit, a
        normalization denies nothing outside: x is cast up once, y is cast down once, and so are dy
        and dx. Large terms that cancel in dx are still added in float32.

        Args:
            kind: the pattern that it is an instance of.
            output: the node that makes its result.
            inside: its nodes.
            is_exact: whether their sums must not be rounded.
        """
        self.in_float32.append((kind, output, inside))
        if is_exact:
            self.exact.update(inside)

    def keep_inside(self) -> None:
        """Lists the nodes of float32 units as such, whatever other units have listed them as."""
        names = self.edits.view.names
        for kind, output, inside in self.in_float32:
            self.list_nodes(kind, output, [names[n] for n in sorted(inside)], FLOAT32)

    def list_nodes(self, rule: str, number: int, nodes: Iterable[str], list_name: str) -> None:
        """Proposes a unit that puts nodes on a list and changes nothing else."""
        listed = dict.fromkeys(nodes, list_name)
        self.edits.propose(rule, number, lambda new: new.node_lists.update(listed))


@dataclasses.dataclass(frozen=True)
class UnitPass:
    """One pass, switched off by the name of its rule.

    Attributes:
        rule: its name.
        run: looks for units and proposes their replacements.
        ops: nothing is to be found in a graph that has none of these; () where any will do.
        requires: what passes before it must have found out.
        ensures: what passes behind it may rely on.
        alone: whether it is of use in a graph without an op of the allow list.
        in_float32: whether it is for graphs in which nothing is converted, and for no others.
    """

    rule: str
    run: Callable[[UnitSearch], None]
    ops: Sequence[str]
    requires: Sequence[str] = ()
    ensures: Sequence[str] = ()
    alone: bool = False
    in_float32: bool = False
