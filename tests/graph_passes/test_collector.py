from __future__ import annotations

import gc
import os
import threading

import pytest

from graph_passes.collector import collector_paused


def _starts() -> bool:
    """Whether the collector starts by itself."""
    before = gc.get_stats()[0]["collections"]
    _made = [[] for _ in range(10_000)]
    return gc.get_stats()[0]["collections"] > before


def test_collector_starts_again_after_the_outermost_pause() -> None:
    with collector_paused():
        with collector_paused():
            assert not _starts()
        assert not _starts()
    assert _starts()


def test_collector_starts_again_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collector_paused():
        raise ZeroDivisionError
    assert _starts()


def test_collector_starts_in_a_child_of_another_thread() -> None:
    paused, forked = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            paused.set()
            forked.wait(30)

    thread = threading.Thread(target=pause)
    thread.start()
    paused.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if _starts() else 3)
    _, status = os.waitpid(child, 0)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert _starts()


def test_what_the_program_sets_meanwhile_stays() -> None:
    threshold = gc.get_threshold()
    try:
        with collector_paused():
            gc.disable()
        assert not gc.isenabled()
        gc.enable()
        with collector_paused():
            gc.set_threshold(12_345, 6, 7)
        assert gc.get_threshold()[0] == 12_345
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
