"""Random programs: in float32, rewritten and in naive low precision."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import program_sweep
import pytest
import random_program_routes
import random_program_runs
import tensorflow as tf
from cpu_units import HAS_BFLOAT16_UNITS, NO_BFLOAT16_UNITS
from programs import Program, of_concrete
from random_program_runs import Reference, check, run_exact
from random_programs import UPDATES, RandomProgram
from random_steps import Step
from rewrite_checks import BrokenPromiseError
from rounded_graphs import rounded

# Each of these has once found a fault.
FOUND = {
    "which sums are of gradients depends on the order of the nodes": RandomProgram(
        "images", (Step("tf_keras norm", 20),) * 4, "huber", "second", dtype="float16", device="GPU"
    ),
    "what a Cast between equal dtypes waits for is never run": RandomProgram(
        "images",
        (Step("while", 34, ((Step("dense", 34), Step("dtype", 54), Step("count", 0)),)),),
        "binary",
        "none",
        known=False,
        dtype="bfloat16",
        route="session",
        rules="painted",
    ),
    "the kernel of Selu makes zero of small numbers, whose slope is another": RandomProgram(
        "tokens",
        (Step("keras dense", 14), Step("keras dense", 40), Step("python", 9), Step("python", 40)),
        "one hot",
        "first",
        dtype="bfloat16",
        route="offline",
    ),
    "what saves no Cast was erased in the order of the nodes": RandomProgram(
        "tokens",
        (Step("words", 49), Step("words", 42)),
        "log softmax",
        "tf.gradients",
        known=False,
        dtype="float16",
    ),
    "a maximum is looked for in what it was picked from": RandomProgram(
        "rows",
        (
            Step(
                "array loop",
                59,
                ((Step("unit", 49), Step("switch", 25, ((), (Step("reduce", 18),)))),),
            ),
        ),
        gradients="tf.gradients",
        dtype="float16",
        rules="painted",
    ),
    "the calls of one function that came out different were compared in the order of the nodes": (
        RandomProgram(
            "rows",
            (
                Step("function", 10, ((Step("python", 11), Step("keras dense", 11)),)),
                Step("average", 10),
            ),
            "cross entropy",
            "second",
            known=False,
            dtype="float16",
            device="GPU",
            rules="painted",
        )
    ),
    "what nobody calls in a model on disk calls what was dropped": RandomProgram(
        "tokens",
        (Step("array loop", 0, ((Step("array loop", 0, ((Step("average"),),)),),)),),
        gradients="second",
        dtype="float16",
        route="converted",
        rules="painted",
    ),
    "weights cast before a loop get names in the order of its nodes": RandomProgram(
        "rows", (Step("while", 0, ((Step("dense", 1), Step("dense", 1), Step("dense", 1)),)),)
    ),
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_programs_that_found_a_fault(program: RandomProgram) -> None:
    assert check(program) == "changed"


def sweep(run_python: Any, *args: str) -> CompletedProcess[str]:
    code = f"import runpy\nrunpy.run_path({program_sweep.__file__!r}, run_name='__main__')"
    return run_python(code, args=args, timeout=1500)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BFLOAT16_UNITS, reason=NO_BFLOAT16_UNITS)
def test_small_programs(run_python: Any) -> None:
    """Through every host, offline and saved."""
    done = sweep(run_python, "--cases", "40", "--seed", "7", "--steps", "2", "--depth", "1")
    assert "40 cases, 0 findings" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.skipif(not HAS_BFLOAT16_UNITS, reason=NO_BFLOAT16_UNITS)
def test_five_hundred_programs(run_python: Any) -> None:
    done = sweep(run_python, "--cases", "500", "--seed", "100", "--steps", "3", "--jobs", "2")
    assert "0 findings" in done.stdout


@pytest.mark.slow
def test_programs_that_train_where_nothing_is_converted(run_python: Any) -> None:
    """By optimizers, with normalizations, as on a CPU without fast units."""
    routes = ("function", "offline", "saved")
    options = ("--cases", "60", "--seed", "9100000", "--steps", "2", "--depth", "1", "--dtypes")
    done = sweep(run_python, *options, "float32", "--routes", *routes)
    assert "60 cases, 0 findings" in done.stdout
    assert "function float32: changed" in done.stdout


@pytest.mark.slow
def test_programs_that_train_with_a_loss_scale(run_python: Any) -> None:
    routes = ("fit", "scaled loop", "v1 minimize")
    options = ("--cases", "40", "--seed", "9200000", "--steps", "2", "--depth", "1", "--dtypes")
    done = sweep(run_python, *options, "float16", "--routes", *routes)
    assert "40 cases, 0 findings" in done.stdout
    assert all(f"{route} float16: changed" in done.stdout for route in routes)


@pytest.mark.slow
def test_programs_that_are_converted_on_disk(run_python: Any) -> None:
    options = ("--cases", "40", "--seed", "9300000", "--steps", "2", "--depth", "1", "--dtypes")
    done = sweep(run_python, *options, "float16", "--routes", "converted")
    assert "40 cases, 0 findings" in done.stdout
    assert "converted float16: changed" in done.stdout


def test_a_step_that_is_skipped_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    program = RandomProgram(
        "rows", (Step("dense"),), "one hot", "trained", True, "float16", "fit", update="SGD"
    )
    assert check(program) == "changed"
    monkeypatch.setattr(random_program_routes, "INITIAL_SCALE", 2.0**24)
    assert check(program) == "skipped"


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
def test_each_optimizer_trains(update: str) -> None:
    """None is never looked at because its programs do not run in float32."""
    program = RandomProgram(
        "rows", (Step("dense"),), gradients="trained", route="function", update=update
    )
    assert check(program) == "changed"


ENDS = "__import__('os').abort()"
DIFFERS = f"__import__('os')._exit({program_sweep.DIFFERS})"
RUNS = repr(RandomProgram("rows", (Step("dense"),)))


@pytest.mark.parametrize(
    ("programs", "ends"),
    [
        ([ENDS], True),
        pytest.param([ENDS, RUNS], True, marks=pytest.mark.slow),
        ([DIFFERS], True),
        pytest.param([RUNS], False, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_in_float32_too(
    programs: list[str], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_sweep, "FLOAT32_RUNS", 1)
    assert program_sweep.ends_in_float32(programs) is ends


def test_runs_in_float32_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    program = RandomProgram("rows", (Step("dense"),))
    assert run_exact(program)
    run, factors = Program.run, itertools.count(1)

    def damaged(self: Program, *given: Any) -> dict[str, np.ndarray]:
        factor = next(factors)
        return {name: value * factor for name, value in run(self, *given).items()}

    monkeypatch.setattr(Program, "run", damaged)
    assert not run_exact(program)


@pytest.fixture(scope="module")
def reference() -> Reference:
    steps = (Step("dense"), Step("count"), Step("python"), Step("each", 1))
    return Reference(RandomProgram("tokens", steps, gradients="first"))


def test_rounding_is_an_error_of_the_size_of_the_dtype(reference: Reference) -> None:
    errors = [reference.naive[name] for name in reference.graph.fetches[1:3]]
    assert all(1e-4 < error < 0.05 for error in errors)
    graph = rounded(reference.graph.graph_def, "bfloat16")
    assert {n.name for n in reference.graph.graph_def.node} < {n.name for n in graph.node}


def test_what_is_zero_in_each_precision_is_not_where_half_is_rounded() -> None:
    function = tf.function(lambda x: tf.tanh(x) - tf.identity(tf.tanh(x)), autograph=False)
    concrete = function.get_concrete_function(tf.TensorSpec([8]))
    graph = of_concrete(concrete, [np.linspace(0.1, 0.9, 8, dtype=np.float32)])

    def largest(half: int | None) -> float:
        found = graph.run(rounded(graph.graph_def, "bfloat16", half), 1)
        return float(np.abs(found[graph.fetches[0]]).max())

    assert largest(None) == 0
    assert 1e-4 < max(largest(half) for half in range(8)) < 0.01


def test_a_session_runs_a_graph_anew_each_time(reference: Reference) -> None:
    graph = reference.graph
    with graph.running(graph.graph_def) as run:
        for _ in range(2):
            found = run(graph.feeds, graph.state, 2)
            np.testing.assert_equal(found, reference.expected)
        other = run(graph.feeds, {k: v + v.dtype.type(1) for k, v in graph.state.items()}, 2)
        assert found.keys() == other.keys()
        assert not np.array_equal(found[graph.fetches[0]], other[graph.fetches[0]])


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("values", lambda value: value * 1.1),
        ("values", lambda value: value * np.nan),
        ("dtype", lambda value: value.astype("float16")),
        ("dtype", lambda value: value[:1]),
    ],
)
def test_what_is_wrong_is_seen(reference: Reference, what: str, change: Any) -> None:
    reference.compare(reference.expected)
    name = reference.graph.fetches[1]
    with pytest.raises(BrokenPromiseError) as raised:
        reference.compare({**reference.expected, name: change(reference.expected[name])})
    assert raised.value.what == what


def test_beyond_the_range_of_the_dtype_there_may_be_infinities(reference: Reference) -> None:
    found, large = reference.graph.fetches[1:3]
    beyond = copy.copy(reference)
    beyond.program = dataclasses.replace(reference.program, dtype="float16")
    infinite = {found: reference.expected[found] * np.inf}
    with pytest.raises(BrokenPromiseError):
        beyond.compare(infinite)
    beyond.expected = {**reference.expected, large: np.float32(1e6)}
    beyond.compare(infinite)
    with pytest.raises(BrokenPromiseError):
        beyond.compare({found: reference.expected[found] + np.float32(1e3)})


def test_a_program_may_end_itself_where_naive_low_precision_gives_nan(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_numerics(_: Reference) -> str:
        raise BrokenPromiseError("runs", "InvalidArgumentError: Tensor had NaN values")

    monkeypatch.setattr(random_program_runs, "Reference", lambda _: reference)
    monkeypatch.setattr(random_program_runs, "_check", check_numerics)
    with pytest.raises(BrokenPromiseError):
        check(reference.program)
    monkeypatch.setitem(reference.naive, reference.graph.fetches[1], np.nan)
    assert check(reference.program) == "invalid"


def test_runs_that_end_in_nan_measure_nothing(reference: Reference) -> None:
    name, judged = reference.graph.fetches[1], copy.copy(reference)
    for errors, noise in (([{name: 0.5}, {name: np.nan}], 0.5), ([{name: np.nan}], np.inf)):
        judged._noisy, judged._errors = {name: np.nan}, iter(errors)
        assert judged.noisy(name, 1.0) == noise


def test_an_effect_too_many_is_seen(reference: Reference) -> None:
    counts = [k for k, v in reference.expected.items() if k[:8] == "variable" and not v.ndim]
    assert [reference.expected[name] for name in counts] == [4]
    with pytest.raises(BrokenPromiseError, match="was 4"):
        reference.compare({counts[0]: np.int32(6)})
    assert reference.log == [3, 3]
    with pytest.raises(BrokenPromiseError, match="Python saw"):
        reference.compare_log([3, 3, 3])
