"""Messages are visible without any configuration, and once with one."""

from __future__ import annotations

import pytest
from environments import RunPython

SAY = """
    import logging
    from tf_amp.visible_log import ensure_visible
    {before}
    ensure_visible()
    ensure_visible()
    {after}
    log = logging.getLogger("tf_amp")
    log.debug("debugged")
    log.info("informed")
    logging.getLogger("{child}").warning("warned")
"""


def _stderr(
    run_python: RunPython, before: str = "", after: str = "", child: str = "tf_amp.loss_scale"
) -> str:
    return run_python(SAY.format(before=before, after=after, child=child)).stderr


@pytest.mark.parametrize("child", ["tf_amp.loss_scale", "graph_passes.driver"])
def test_visible_without_configuration(run_python: RunPython, child: str) -> None:
    assert _stderr(run_python, child=child) == "tf_amp: informed\ntf_amp: WARNING: warned\n"


def test_a_later_configuration_takes_over(run_python: RunPython) -> None:
    configure = "logging.basicConfig(format='own %(message)s', level=logging.INFO)"
    assert _stderr(run_python, after=configure) == "own informed\nown warned\n"
    assert _stderr(run_python, before=configure) == "own informed\nown warned\n"


def test_a_handler_of_both_loggers_gets_each_message_once(run_python: RunPython) -> None:
    both = """
    both = logging.StreamHandler()
    logging.getLogger().addHandler(both)
    logging.getLogger('tf_amp').addHandler(both)
    """
    assert _stderr(run_python, after=both) == "informed\nwarned\n"


def test_own_level_and_handler_are_kept(run_python: RunPython) -> None:
    level = "logging.getLogger('tf_amp').setLevel(logging.WARNING)"
    assert _stderr(run_python, before=level) == "tf_amp: WARNING: warned\n"
    handler = "logging.getLogger('tf_amp').addHandler(logging.NullHandler())"
    assert _stderr(run_python, before=handler) == ""


def test_traceback_is_written(run_python: RunPython) -> None:
    script = """
        import logging
        from tf_amp.visible_log import ensure_visible
        ensure_visible()
        try:
            1 / 0
        except ZeroDivisionError as error:
            logging.getLogger("tf_amp").error("failed", exc_info=error)
    """
    stderr = run_python(script).stderr
    assert stderr.startswith("tf_amp: ERROR: failed\ntf_amp: Traceback")
    assert stderr.rstrip().endswith("tf_amp: ZeroDivisionError: division by zero")
    assert all(line.startswith("tf_amp: ") for line in stderr.splitlines())


def test_the_level_of_the_root_logger_counts(run_python: RunPython) -> None:
    configure = "logging.basicConfig(format='own %(message)s', level=logging.{})"
    assert _stderr(run_python, after=configure.format("WARNING")) == "own warned\n"
    assert _stderr(run_python, before=configure.format("ERROR")) == ""
    assert _stderr(run_python, before="logging.getLogger().setLevel(logging.ERROR)") == ""
    both = configure.format("WARNING") + "; logging.getLogger('tf_amp').setLevel(logging.INFO)"
    assert _stderr(run_python, after=both) == "own informed\nown warned\n"


@pytest.mark.parametrize("log", ["logging", "__import__('absl.logging').logging"])
def test_a_handler_that_logging_makes_by_itself_is_no_configuration(
    run_python: RunPython, log: str
) -> None:
    seen = ["INFO:tf_amp:informed", "WARNING:tf_amp.loss_scale:warned"]
    for place in ("before", "after"):
        stderr = _stderr(run_python, **{place: f"{log}.error('theirs')"})
        assert stderr.splitlines()[-2:] == seen


def test_a_closed_stderr_is_no_error(run_python: RunPython) -> None:
    assert _stderr(run_python, before="import sys; sys.stderr = None") == ""
