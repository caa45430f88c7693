from __future__ import annotations

import os
from pathlib import Path

import pytest

from tf_amp.whole_files import write_whole


def test_a_file_is_replaced(tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        write_whole(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_fails_leaves_nothing_and_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "file", b"first")

    def fail(*_: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="planted"):
        write_whole(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_link_stays_one_and_a_pipe_too(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", b"content")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"content"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", b"content")
    assert os.read(reader, 99) == b"content"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
