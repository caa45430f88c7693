"""Runs programs in forks of one process that has imported TensorFlow and what AMP consists of.

That takes four seconds of a processor, more than most programs of the tests take. What a fork
copies of a process that has done nothing else is as in a fresh one: each program still has its own
installation, environment, devices, functions, output and end.

Each line of the standard input names a program and its surroundings; the answer is a line with its
exit code, or with None where it took too long.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import types
from typing import Any


def main() -> None:
    """Answers until the input ends. In a child it returns with the program, to end as that does."""
    from tf_amp import autoload

    # Where the package is installed, the start of Python awaits the import: programs ask for it.
    autoload.deactivate()
    import numpy as np

    # What switching AMP on imports, TensorFlow with it, but for `installation` and `late_settings`:
    # by these it is known what a program has done.
    from tf_amp import plan  # noqa: F401
    from tf_amp.hosts import function, session  # noqa: F401
    from tf_amp.loss_scale import auto_wrap_keras, unscaled_notice, v1_optimizer  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection in a child then copies no page of what was imported
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            np.random.seed()  # by chance, as in a fresh process; `random` sees to itself
            return run(**asked)
        answer = json.dumps(exit_code(child, asked["timeout"])) + "\n"
        os.write(1, answer.encode())


def exit_code(child: int, timeout: float) -> int | None:
    """Waits for a child, and kills one that takes too long."""
    limit = time.monotonic() + timeout
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run(
    script: str, args: list[str], env: dict[str, str], folder: str, output: list[str], **_: Any
) -> None:
    """What the start of Python does for a script."""
    for number, path in enumerate((os.devnull, *output)):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [script, *args]
    # What PYTHONPATH says may be new; the rest is that of the same interpreter.
    given = list(filter(None, env.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [os.path.dirname(script), *given, *(p for p in sys.path[1:] if p not in given)]
    program = types.ModuleType("__main__")
    program.__file__ = script
    sys.modules["__main__"] = program
    with open(script) as text:
        code = compile(text.read(), script, "exec", dont_inherit=True)
    exec(code, program.__dict__)


if __name__ == "__main__":
    main()
