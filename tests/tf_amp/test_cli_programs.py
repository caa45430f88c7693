"""Programs that a command starts."""

from __future__ import annotations

import os

import pytest
from environments import RunPython

STARTS = """
import os, signal, subprocess, sys
from tf_amp.cli import programs
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may be run by nohup, which ignores it
sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
child = programs.start(sleeping, {}, subprocess.DEVNULL)
print(child.pid, flush=True)
try:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    child.wait()
finally:
    programs.stop(child)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_program_ends_with_the_command_that_started_it(run_python: RunPython, name: str) -> None:
    done = run_python(STARTS, args=(name,), check=False)
    assert done.returncode > 128
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
