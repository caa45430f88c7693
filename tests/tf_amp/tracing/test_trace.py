"""A traced run, from the program to what `tf-amp explain` says of it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from environments import BFLOAT16, REWRITE, RunPython

from tf_amp.tracing.blockers import find_blockers
from tf_amp.tracing.figures import figures_of
from tf_amp.tracing.trace import Trace, TraceError, read_traces

PROGRAM = """
import tensorflow as tf

class Net(tf.Module):
    def __init__(self):
        self.w = tf.Variable(tf.ones([64, 64]))

    def __call__(self, x):
        y = x @ self.w
        y = tf.exp(y)
        y = tf.nn.elu(y)
        return y @ self.w

net = Net()

@tf.function(input_signature=[tf.TensorSpec([None, 64])])
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(net(x))
    return tape.gradient(loss, net.w)

@tf.function
def looped(x):
    for _ in tf.range(3):
        x = net(x)
    return x

step(tf.ones([4, 64]))
looped(tf.ones([4, 64]))
"""
MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def directory(run_forked: RunPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trace")
    env = {
        **BFLOAT16,
        f"{REWRITE}_COST_TABLE": "off",
        f"{REWRITE}_INFERLIST_ADD": "Softplus",
        f"{REWRITE}_LOG_PATH": str(made),
    }
    early = "import tensorflow as tf; early = tf.function(lambda x: x); early(1)"
    run_forked(f"{early}\nfrom tf_amp import autoload; autoload.activate()\n{PROGRAM}", env)
    return made


@pytest.fixture(scope="module")
def trace(directory: Path) -> Trace:
    (found,) = read_traces(directory)
    return found


def test_lines_of_the_program_made_the_nodes(trace: Trace) -> None:
    (step,) = [g.remarks for g in trace.graphs if g.remarks.name == "step"]
    at = {r.node: Path(r.lines[0]).name for r in step.remarks if r.lines}
    assert (at["Exp"], at["Elu"]) == ("script.py:12", "script.py:13")
    # A gradient is at the line of what it is the gradient of.
    assert at["gradient_tape/matmul_1/MatMul"] == "script.py:14"


def test_bodies_of_loops_are_in_the_remarks_of_their_callers(trace: Trace) -> None:
    (looped,) = [g.remarks for g in trace.graphs if "looped" in g.remarks.name]
    inner = [r for r in looped.remarks if r.function and r.op == "MatMul"]
    assert len(inner) == 2
    assert {r.lines[0].rpartition(":")[2] for r in inner} == {"11", "14"}
    assert [g.remarks.name for g in trace.graphs if "while" in g.remarks.name] == []


def test_planning_again_gives_what_was_planned(trace: Trace) -> None:
    for graph in trace.graphs:
        again = figures_of([graph.plan(graph.config)])
        assert again == figures_of([graph.remarks])


SESSION = """
import numpy as np, tensorflow as tf
v1 = tf.compat.v1
v1.disable_eager_execution()
x = v1.placeholder(tf.float32, [64, 256])
w, b = (v1.get_variable(name, shape) for name, shape in (("w", [256, 256]), ("b", [256])))
y = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), b))  # which TensorFlow's remapper fuses
loss = tf.reduce_mean(tf.exp(tf.nn.bias_add(tf.matmul(y, w), b)))
train = v1.train.GradientDescentOptimizer(1e-3).minimize(loss)
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    session.run([train, loss], {x: np.ones([64, 256], "f")})
"""


def test_planning_the_graph_of_a_session_again_gives_what_was_planned(
    run_forked: RunPython, tmp_path: Path
) -> None:
    env = {**BFLOAT16, f"{REWRITE}_LOG_PATH": str(tmp_path)}
    run_forked(f"from tf_amp import autoload\nautoload.activate()\n{SESSION}", env)
    (found,) = read_traces(tmp_path)
    products = [g for g in found.graphs if figures_of([g.remarks]).products]
    assert products
    for graph in products:
        assert any("TfAmpUnfused" in node.name for node in graph.graph.node)
        planned = [dataclasses.replace(remark, lines=()) for remark in graph.remarks.remarks]
        assert [*graph.plan(graph.config).remarks] == planned
    numbers = {
        remark.node: int(remark.lines[0].rpartition(":")[2])
        for graph in products
        for remark in graph.remarks.remarks
        if remark.is_product
    }
    program = SESSION.splitlines()
    first = next(n for n, line in enumerate(program, 3) if line.startswith("y = "))
    assert set(numbers.values()) == {first, first + 1}
    assert numbers["gradients/MatMul_grad/MatMul_1"] == first


def test_a_blocker_gives_what_it_promises(trace: Trace) -> None:
    (graph,) = [g for g in trace.graphs if g.remarks.name == "step"]
    (blocker,) = [b for b in find_blockers([graph]).found if b.change.op == "Exp"]
    assert blocker.cast_bytes < 0
    assert blocker.change.line(trace.process["variables"]) == (
        f"export {REWRITE}_INFERLIST_ADD=Softplus,Exp"
    )
    moved = figures_of([graph.plan(blocker.change.applied(graph.config))])
    assert moved.casts == figures_of([graph.remarks]).casts + blocker.casts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ["traced before AMP was on, so float32 until traced anew: <lambda>"]),
        ((), ["step", "2 of 2", "What blocks most", "INFERLIST_ADD=Softplus,Exp", "risk: "]),
        (
            ("--op", "Elu"),
            [
                "float32: Elu Elu",
                "Exp -> Elu",
                "script.py:12: Exp -> Elu",
                "Exp is on the deny list",
                "script.py:13",
            ],
        ),
        (("--line", "script.py:13", "--missed"), ["Elu"]),
        (("--node", "^Exp$", "--function", "step"), ["on the deny list", "script.py:12"]),
    ],
)
def test_explain(
    run_forked: RunPython, directory: Path, arguments: tuple[str, ...], said: list[str]
) -> None:
    printed = run_forked(MAIN, args=("explain", str(directory), *arguments)).stdout
    for text in said:
        assert text in printed


def test_explain_as_json(run_forked: RunPython, directory: Path) -> None:
    printed = run_forked(MAIN, args=("explain", str(directory), "--json")).stdout
    (job,) = json.loads(printed)
    step = next(f for f in job["functions"] if f["name"] == "step")
    assert (step["products_low"], step["products"]) == (5, 5)
    lines = run_forked(MAIN, args=("explain", str(directory), "--op", "Exp", "--json")).stdout
    assert {json.loads(line)["rule"] for line in lines.splitlines()} == {"deny_list"}


def test_explain_as_a_page(run_forked: RunPython, directory: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    printed = run_forked(MAIN, args=("explain", str(directory), "--html", str(page))).stdout
    assert str(page) in printed
    text = page.read_text()
    assert "INFERLIST_ADD=Softplus,Exp" in text
    assert "script.py, process" in text
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--op", "Exq"), 1, "No remark fits these filters.\n"),
        (("--function", "stepp"), 1, "Functions with products: step"),
        (("--node", "("), 2, "no regular expression"),
        (("--quick", "--html", "/nowhere/report.html"), 1, "cannot be written"),
        (("--tensorboard", "/proc/version"), 1, "cannot be written"),
        (("--html", "report.html", "--op", "Exp"), 2, "leave out filters"),
        (("--html", "report.html", "--json"), 2, "leave out --json"),
        (("--format", "github", "--missed"), 2, "leave out filters"),
    ],
)
def test_explain_without_an_answer(
    run_forked: RunPython, directory: Path, arguments: tuple[str, ...], status: int, said: str
) -> None:
    done = run_forked(MAIN, args=("explain", str(directory), *arguments), check=False)
    assert done.returncode == status
    assert said in done.stderr


def test_what_is_no_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no directory"):
        read_traces(tmp_path / "none")
    with pytest.raises(TraceError, match="LOG_PATH"):
        read_traces(tmp_path)
    (tmp_path / "process.json").write_text("{")
    with pytest.raises(TraceError, match="cannot be read"):
        read_traces(tmp_path)


def test_what_is_damaged_or_of_another_release_is_an_error(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "trace")
    next(copy.rglob("graphdef_preop_*.pb")).write_bytes(b"\xff")
    with pytest.raises(TraceError, match="cannot be read"):
        [graph.graph for trace in read_traces(copy) for graph in trace.graphs]
    process = next(copy.rglob("process.json"))
    process.write_text(json.dumps({**json.loads(process.read_text()), "config": {"new": 1}}))
    with pytest.raises(TraceError, match="no configuration that this release knows"):
        read_traces(copy)


def test_graphs_come_in_the_order_of_their_numbers(directory: Path, tmp_path: Path) -> None:
    """Numbers have four digits, until there are more graphs."""
    copy = shutil.copytree(directory, tmp_path / "trace")
    for path in copy.rglob("*_000?.*"):
        later = "1000" if "step" in path.name else "999"
        path.rename(path.with_name(re.sub(r"_000(\d)\.", rf"_{later}\1.", path.name)))
    names = [[graph.remarks.name for graph in read_traces(d)[0].graphs] for d in (directory, copy)]
    assert names[0] != names[1]
    assert names[1] == sorted(names[0], key="step".__eq__)


@pytest.mark.parametrize("kind", ["shapes", "graphdef_preop"])
def test_a_graph_of_which_a_file_is_missing_is_an_error(
    directory: Path, tmp_path: Path, kind: str
) -> None:
    copy = shutil.copytree(directory, tmp_path / "trace")
    next(copy.rglob(f"{kind}_*looped*")).unlink()
    with pytest.raises(TraceError, match=f"{kind}_.*looped.* is missing"):
        read_traces(copy)


def test_the_largest_casts_are_shown_whichever_function_has_them(
    run_forked: RunPython, directory: Path
) -> None:
    command = ("explain", str(directory), "--op", "Cast")
    lines = run_forked(MAIN, args=(*command, "--json")).stdout.splitlines()
    casts = [json.loads(line) for line in lines]
    of_first = [each.get("bytes", 0) for each in casts if each["graph"] == casts[0]["graph"]]
    other = next(each for each in casts if each["graph"] != casts[0]["graph"])
    assert min(of_first) < other["bytes"]
    printed = run_forked(MAIN, args=(*command, "--limit", str(len(of_first)))).stdout
    assert f": {other['graph']}\n" in printed
    assert printed.count("  cast: Cast ") == len(of_first)
    assert f"{len(casts) - len(of_first)} more remarks" in printed
