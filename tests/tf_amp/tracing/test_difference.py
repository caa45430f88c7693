"""What changed between two traces: `tf-amp diff`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from environments import RunPython
from tensorflow.core.framework.graph_pb2 import GraphDef

from graph_passes import FunctionRemarks, PrecisionConfig, Remark
from tf_amp.tracing.difference import compare
from tf_amp.tracing.jobs import jobs_of
from tf_amp.tracing.trace import Trace, TracedGraph

MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"
LOW = Remark(kind="converted", rule="allow_list", node="a", op="MatMul", op_list="allow", attr="T",
             reason="on the allow list", flops=8)  # fmt: skip
KEPT = dataclasses.replace(LOW, kind="kept", rule="behind_deny", reason="r", blocked_by="Exp")
INNER = dataclasses.replace(LOW, function="body_17")
OTHER = dataclasses.replace(LOW, node="b")


def trace_of(*remarks: Remark, name: str = "step (fit)", **process: Any) -> Trace:
    found = FunctionRemarks(
        name=name, target_dtype="bfloat16", device="CPU", total_nodes=9, remarks=remarks
    )
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU")
    return Trace("train.py", process, {}, (TracedGraph(found, config, GraphDef),))


def nodes_of(before: Trace, after: Trace) -> list[tuple[Any, ...]]:
    found = compare(jobs_of([before]), jobs_of([after]))
    return [(n.node, n.before and n.before[0], n.after and n.after[0]) for n in found.nodes]


@pytest.mark.parametrize(
    ("before", "after", "nodes"),
    [
        ([LOW], [LOW], []),
        ([LOW], [KEPT], [("a", "bfloat16", "float32")]),
        ([OTHER, LOW], [KEPT], [("a", "bfloat16", "float32"), ("b", "bfloat16", None)]),
        ([LOW, LOW], [LOW, KEPT], [("a", "bfloat16", "float32")]),
        ([INNER], [dataclasses.replace(KEPT, function="body_23")],
         [("body/a", "bfloat16", "float32")]),
    ],
)  # fmt: skip
def test_nodes(before: list[Remark], after: list[Remark], nodes: list[Any]) -> None:
    assert nodes_of(trace_of(*before), trace_of(*after)) == nodes


def test_both_reasons() -> None:
    (node,) = compare(jobs_of([trace_of(LOW)]), jobs_of([trace_of(KEPT)])).nodes
    assert node.before == ("bfloat16", "on the allow list")
    assert node.after == ("float32", "behind Exp")


def test_numbers_of_functions_do_not_count() -> None:
    before, after = trace_of(LOW, name="f_12 (fit)"), trace_of(KEPT, name="f_13 (fit)")
    (function,) = compare(jobs_of([before]), jobs_of([after])).functions
    assert function.before is not None and function.after is not None
    assert (function.before.flops_low, function.after.flops_low) == (8, 0)


def test_a_function_that_one_lacks() -> None:
    found = compare(jobs_of([trace_of(LOW)]), jobs_of([trace_of(LOW, name="evaluate")]))
    assert [(f.name, f.before is None, f.after is None) for f in found.functions] == [
        ("step (fit)", False, True),
        ("evaluate", True, False),
    ]
    assert not found.nodes


def test_settings() -> None:
    where = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH"
    before = {"process": 1, "variables": {where: "a", "A": "1"}, "settings": {"level": ""}}
    after = {"process": 2, "variables": {where: "b", "B": "2"}, "settings": {"level": "X"}}
    found = compare(jobs_of([trace_of(**before)]), jobs_of([trace_of(**after)]))
    assert found.settings == (
        ("variables: A", "1", None),
        ("settings: level", "", "X"),
        ("variables: B", None, "2"),
    )


def write(folder: Path, remarks: tuple[Remark, ...]) -> Path:
    """A trace directory as a process leaves it."""
    (graph,) = trace_of(*remarks).graphs
    of_process = folder / "process"
    of_process.mkdir(parents=True)
    config = {"target_dtype": "bfloat16", "device": "CPU", "level": ""}
    process = {"config": {**config, "list_edits": [], "disabled_rules": []}, "script": "train.py"}
    (of_process / "process.json").write_text(json.dumps(process))
    (of_process / "remarks_step_0000.jsonl").write_text("\n".join(graph.remarks.to_lines()))
    (of_process / "graphdef_preop_step_0000.pb").write_bytes(b"")
    (of_process / "shapes_step_0000.json.gz").write_bytes(b"")
    return folder


@pytest.mark.slow
def test_the_command(run_python: RunPython, tmp_path: Path) -> None:
    before, after = write(tmp_path / "1", (LOW, OTHER)), write(tmp_path / "2", (KEPT, OTHER))

    def diff(*arguments: object) -> subprocess.CompletedProcess[str]:
        return run_python(MAIN, args=("diff", *map(str, arguments)), check=False)

    done = diff(before, after)
    assert done.returncode == 1
    assert "2 of 2 -> 1 of 2" in done.stdout
    assert "bfloat16: on the allow list -> float32: behind Exp" in done.stdout
    assert diff(before, after).stdout == done.stdout
    found = json.loads(diff(before, after, "--json").stdout)
    assert [node["node"] for node in found["nodes"]] == ["a"]
    assert found["functions"][0]["after"]["products_low"] == 1
    same = diff(before, shutil.copytree(before, tmp_path / "3"))
    assert (same.returncode, same.stdout) == (0, "Nothing changed.\n")
    none = diff(before, tmp_path / "none")
    assert (none.returncode, none.stdout) == (2, "")
    assert "no directory" in none.stderr
