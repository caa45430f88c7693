"""Annotations of source lines."""

from __future__ import annotations

import dataclasses
from typing import Any

from graph_passes import FunctionRemarks, Remark
from tf_amp.tracing.workflow import workflow_lines


def remark(node: str, line: str = "", **more: Any) -> Remark:
    fields = {"kind": "kept", "op": "MatMul", "op_list": "allow", "reason": "slow, 100%: so"}
    return Remark(**{**fields, "node": node, "lines": (line,) if line else (), **more})


def lines(*remarks: Remark, failure: str | None = None) -> list[str]:
    graph = FunctionRemarks(name="step", target_dtype="bfloat16", device="CPU", total_nodes=9)
    return list(workflow_lines([dataclasses.replace(graph, remarks=remarks, failure=failure)]))


def test_products_of_a_line_that_stay_float32_for_one_reason_share_a_warning() -> None:
    found = lines(
        remark("a", "my,model.py:42"),
        remark("a", "my,model.py:42", attr="T[1]"),
        remark("b", "my,model.py:42"),
        remark("c", "model.py:43", reason="no kernel"),
        remark("d"),
        remark("e", "model.py:44", kind="converted"),
        remark("f", "model.py:45", op="Exp", op_list="deny"),
    )
    assert found == [
        (
            "::warning file=my%2Cmodel.py,line=42,title=2 MatMul in float32"
            "::slow, 100%25: so: a in step and 1 more"
        ),
        "::warning file=model.py,line=43,title=1 MatMul in float32::no kernel: c in step",
        "::warning title=1 MatMul in float32::slow, 100%25: so: d in step",
    ]


def test_graph_that_was_given_up_is_an_error() -> None:
    assert lines(failure="two\nlines") == ["::error title=step stays float32::two%0Alines"]
