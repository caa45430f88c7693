"""Cases of the mutator: a program, what is changed in it, and what it is rewritten for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
from cpu_units import HAS_ONEDNN
from free_casts import FREE_CASTS
from mutations import Mutation, mutated, targets
from programs import Program, in_function
from rewrite_checks import check_rewrite, rewrite_called_function, rewrite_graph
from unit_programs import Options, unit_program

from graph_passes import PrecisionConfig, rewrite_graph_def

CONFIGS: Mapping[str, PrecisionConfig] = {
    "float16": PrecisionConfig(target_dtype="float16", device="GPU"),
    "bfloat16": PrecisionConfig(target_dtype="bfloat16", device="CPU"),
    # Graphs as small as these are not worth their Casts.
    "float16, painted": PrecisionConfig(
        target_dtype="float16", device="GPU", disabled_rules=frozenset(("cast-cut",))
    ),
    "bfloat16, painted": PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
    ),
    "bfloat16, timed": PrecisionConfig(
        target_dtype="bfloat16",
        device="CPU",
        cost_table=FREE_CASTS,
        # No kernel but oneDNN's makes both gradients, and on a CPU with AVX2 at most it fails.
        disabled_rules=frozenset(() if HAS_ONEDNN else ("filter-gradient",)),
    ),
    "float32": PrecisionConfig(target_dtype="bfloat16", device="CPU", converts=False),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One rewrite to check.

    Attributes:
        program: the name of a program.
        options: the form that it has.
        mutations: what is changed in it, in order.
        config: a key of `CONFIGS`.
        place: where the graph is: "" for the main graph, "called" for that of a function which the
            program calls, "function" for the same, with the function rewritten by itself.
    """

    program: str
    options: Options
    mutations: tuple[Mutation, ...]
    config: str
    place: str = ""

    def __str__(self) -> str:
        o = self.options
        form = (
            "" if o == Options() else f", rank {o.rank}, {o.dtype}, {'' if o.known else 'un'}known"
        )
        changes = "; ".join(map(str, self.mutations)) or "as it is"
        where = f", {self.place}" if self.place else ""
        return f"[{self.config}{where}] {self.program}{form}: {changes}"


def run_case(case: Case) -> str:
    """Checks a rewrite.

    Returns:
        "invalid" where the mutated program does not run by itself, else whether the rewrite has
        "changed" it or left it "unchanged".

    Raises:
        Broken: a promise is not kept.
    """
    made = _program(case)
    if made is None:
        return "invalid"
    program, expected = made
    rewrite = rewrite_called_function if case.place == "function" else rewrite_graph
    result = check_rewrite(program, CONFIGS[case.config], expected, rewrite)
    return "changed" if result.changed else "unchanged"


@functools.cache
def choices(program: str, options: Options, config: str) -> tuple[str, ...]:
    """The nodes to choose from: all, and again those that a rewrite takes out, three times."""
    made = unit_program(program, options)
    nodes = targets(made)
    result = rewrite_graph_def(
        made.graph_def, CONFIGS[config], preserve=made.preserve, shapes=made.shapes
    )
    left = {node.name for node in result.graph_def.node}
    return (*nodes, *[name for name in nodes if name not in left] * 3)


@functools.lru_cache(maxsize=4)
def _program(case: Case) -> tuple[Program, Mapping[str, np.ndarray]] | None:
    program = unit_program(case.program, case.options)
    try:
        for mutation in case.mutations:
            program = mutated(program, mutation)
        if case.place:
            program = in_function(program)
        return program, program.run(program.graph_def)
    except Exception:
        return None
