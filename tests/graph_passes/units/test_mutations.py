"""A unit that is changed a little keeps its meaning on a rewrite, or stays as it was.

Every example is one program with one or two mutations, run in TensorFlow before and after: the
same values, shapes, dtypes and effects, with fed tensors meaning what they meant. The suite runs
the same few examples every time. To look for new faults:

    MUTATION_EXAMPLES=500 python -m pytest tests/graph_passes/units/test_mutations.py
    python tests/graph_passes/mutation_sweep.py --seconds 600
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from mutation_cases import CONFIGS, Case, choices, run_case
from mutations import COUNTER, KINDS, Mutation, mutated
from programs import Program
from rewrite_checks import BrokenPromiseError, Rewritten, check_rewrite
from tensorflow.core.framework import node_def_pb2
from unit_programs import HAND_WRITTEN, NAMES, Options, unit_program

from graph_passes import PrecisionConfig

EXAMPLES = int(os.environ.get("MUTATION_EXAMPLES", "10"))

on_cases = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="MUTATION_EXAMPLES" not in os.environ,
    database=None,
    phases=[Phase.generate],  # one or two mutations are few enough
    suppress_health_check=list(HealthCheck),
)


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    """Cases of which the first mutation is of a kind."""
    name = draw(st.sampled_from(NAMES))
    options = Options()
    if name in HAND_WRITTEN and draw(st.booleans()):
        rank, known = draw(st.sampled_from((1, 4, 0))), draw(st.booleans())
        dtype = draw(st.sampled_from(("float32", "float32", "float64", "float16")))
        options = Options(rank, dtype, known)
    config = draw(st.sampled_from(sorted(CONFIGS)))
    kinds = [kind, *draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=1))]
    nodes = st.sampled_from(choices(name, options, config))
    changes = tuple(Mutation(k, draw(nodes), draw(st.integers(0, 99))) for k in kinds)
    place = draw(st.sampled_from(("", "", "", "", "", "called", "function")))
    return Case(name, options, changes, config, place)


@pytest.mark.parametrize("kind", KINDS)
@on_cases
@given(data=st.data())
def test_a_changed_unit_keeps_its_meaning(kind: str, data: st.DataObject) -> None:
    assume(run_case(data.draw(cases(kind))) != "invalid")


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_as_it_is_keeps_its_meaning(name: str) -> None:
    """Each in one of the configurations; the mutations above try the others."""
    config = sorted(CONFIGS)[zlib.crc32(name.encode()) % len(CONFIGS)]
    assert run_case(Case(name, Options(), (), config)) != "invalid"


def test_the_gradient_of_a_normalization_may_have_no_known_size() -> None:
    name = "encoder of two layers"
    nodes = unit_program(name, Options()).graph_def.node
    of_gamma = next(
        node.name
        for node in nodes
        if "norm" in node.name and node.op == "Sum" and "mul/Sum_1" in node.name
    )
    case = Case(name, Options(), (Mutation("sizes unknown", of_gamma),), "float16")
    assert run_case(case) == "changed"


Nodes = list[node_def_pb2.NodeDef]


def forget_controls(nodes: Nodes) -> None:
    for node in nodes:
        node.input[:] = [name for name in node.input if name[0] != "^"]


def forget_control_and_name(nodes: Nodes) -> None:
    """As a replacement does: the node that waited is another one."""
    waiting = next(node for node in nodes if node.op == "Rsqrt")
    old, waiting.name = waiting.name, "replacement"
    forget_controls([waiting])
    for node in nodes:
        node.input[:] = ["replacement" if name == old else name for name in node.input]


def forget_axes(nodes: Nodes) -> None:
    mean = next(node for node in nodes if node.op == "Mean")
    mean.attr["keep_dims"].b = False


def compute_otherwise(nodes: Nodes) -> None:
    square = next(node for node in nodes if node.op == "Square")
    square.op = "Abs"


def depend_on_order(nodes: Nodes) -> None:
    nodes[0].attr["_first"].b = True


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (forget_controls, "control inputs"),
        (forget_control_and_name, "effects"),
        (forget_axes, "runs|shape"),
        (compute_otherwise, "values"),
        (depend_on_order, "order"),
    ],
)
def test_a_faulty_rewrite_is_seen(fault: Callable[[Nodes], None], what: str) -> None:
    """So that the tests above can fail."""
    program = mutated(unit_program("rms norm, forward"), Mutation("control input", "Rsqrt"))
    expected = program.run(program.graph_def, steps=2)
    assert expected[f"variable {COUNTER}"] == 2

    def rewrite(given: Program, _: PrecisionConfig) -> Rewritten:
        copy = type(given.graph_def).FromString(given.graph_def.SerializeToString())
        nodes = list(copy.node)
        fault(nodes)
        return Rewritten(given.with_nodes(nodes).graph_def, True, ())

    with pytest.raises(BrokenPromiseError, match=what):
        check_rewrite(program, CONFIGS["float16"], expected, rewrite)
