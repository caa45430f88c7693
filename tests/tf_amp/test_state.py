"""The record that `tf_amp.status()` returns."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tf_amp.state import Status


def test_it_reads_like_a_dict_and_like_a_record() -> None:
    status = Status(why="asked", list_edits=("allow add Relu",), hosts={"function": "hooked"})
    assert status["why"] == status.why == "asked"
    assert set(status) == {field.name for field in dataclasses.fields(Status)}
    assert len(status) == len(dict(**status))
    assert "casts" in status
    assert status.get("no_such") is None
    assert json.loads(json.dumps(status.as_dict()))["hosts"] == {"function": "hooked"}


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Status().enabled = True  # type: ignore[misc]
    with pytest.raises(KeyError):
        Status()["as_dict"]
