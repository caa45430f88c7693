from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.remarks import KINDS, FunctionRemarks, Remark, RemarksError

SIZES = st.none() | st.integers(0, 9)
REMARKS = st.builds(
    Remark,
    kind=st.sampled_from(KINDS),
    rule=st.text(),
    node=st.text(),
    path=st.lists(st.text()).map(tuple),
    shapes=st.lists(st.none() | st.lists(SIZES).map(tuple)).map(tuple),
    flops=SIZES,
    seconds=st.none() | st.floats(0, 1),
    lines=st.lists(st.text()).map(tuple),
)
STEP = FunctionRemarks(name="step", target_dtype="bfloat16", device="CPU", total_nodes=2)


@given(st.lists(REMARKS))
def test_lines_give_the_remarks_back(remarks: list[Remark]) -> None:
    written = dataclasses.replace(STEP, remarks=tuple(remarks))
    lines = list(written.to_lines())
    assert len(lines) == 1 + len(remarks)
    assert FunctionRemarks.from_lines(lines) == written


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "no remarks"),
        (["graph"], "no remarks"),
        (["[1]"], "no remarks"),
        (['{"name": "step"}'], "schema_version"),
        (['{"schema_version": 99}'], "release that wrote"),
        (['{"schema_version": 2, "colour": 1}'], "no remarks"),
        ([*STEP.to_lines(), "[]"], "no remarks"),
        ([*STEP.to_lines(), '{"kind": "guess"}'], "guess"),
        ([*STEP.to_lines(), '{"kind": "kept", "mood": 1}'], "mood"),
    ],
)
def test_other_lines_are_an_error(lines: list[str], said: str) -> None:
    with pytest.raises(RemarksError, match=said):
        FunctionRemarks.from_lines(lines)
