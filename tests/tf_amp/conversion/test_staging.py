"""Output that is there whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tf_amp.conversion.staging import _prefix, staged
from tf_amp.model_files import ModelError


def fill(path: Path, text: str) -> None:
    path.mkdir()
    (path / "inner").mkdir()
    (path / "inner" / "file").write_text(text)


def test_a_directory_appears_when_it_is_complete(tmp_path: Path) -> None:
    with staged(tmp_path / "sub" / "out") as path:
        fill(path, "new")
        assert not (tmp_path / "sub" / "out").exists()
    assert (tmp_path / "sub" / "out" / "inner" / "file").read_text() == "new"
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["out"]


def test_nothing_appears_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), staged(tmp_path / "out") as path:
        fill(path, "new")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_file", [True, False])
def test_only_force_replaces(tmp_path: Path, is_file: bool) -> None:
    out = tmp_path / "out"
    write = (lambda p, t: p.write_text(t)) if is_file else fill
    read = (lambda: out.read_text()) if is_file else (lambda: (out / "inner/file").read_text())
    write(out, "old")
    with pytest.raises(ModelError, match="exists"), staged(out):
        pytest.fail("not reached")
    assert read() == "old"
    with staged(out, force=True) as path:
        write(path, "new")
        assert read() == "old"
    assert read() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_was_made_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="made meanwhile"), staged(tmp_path / "out") as path:
        fill(path, "new")
        (tmp_path / "out").mkdir()
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, other = (tmp_path / f"{_prefix(tmp_path / 'out')}{n}-x" for n in (ended.pid, os.getpid()))
    left.mkdir()
    other.mkdir()
    with staged(tmp_path / "out") as path:
        path.write_text("new")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([other.name, "out"])


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"), staged(tmp_path / "file" / "out"):
        pytest.fail("not reached")
