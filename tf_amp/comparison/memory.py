"""What a model takes of memory, measured in a process that does nothing else."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tf_amp.comparison.callables import Arrays, load_signatures
from tf_amp.comparison.resident_memory import peak_resident_bytes, reset_peak, resident_bytes
from tf_amp.env_variables import ENABLING_VARIABLES

_log = logging.getLogger("tf_amp")

_CALLS = 2
"""The first call of a function makes what later ones use; the second shows what a call takes."""


def peak_memory(model: Path, samples: Mapping[str, Arrays]) -> int | None:
    """What loading a model and calling its signatures adds to a process that has TensorFlow.

    Args:
        model: as for `load_signatures`. It runs without AMP.
        samples: a sample for each signature to call.

    Returns:
        Bytes, at the peak. None where that cannot be measured (it takes Linux, and a model that
        loads without the program's own classes), which a warning says.
    """
    environ = {name: value for name, value in os.environ.items() if name not in ENABLING_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(model)],
        input=pickle.dumps(dict(samples)),
        capture_output=True,
        env=environ,
        check=False,
    )
    if done.returncode == 0:
        return int(done.stdout.split()[-1])
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    _log.warning("The memory of %s was not measured: %s", model, "".join(last))
    return None


def _main() -> None:
    # From the parent: nothing else writes to this pipe.
    samples: dict[str, Arrays] = pickle.loads(sys.stdin.buffer.read())
    reset_peak()
    before = resident_bytes()
    signatures = load_signatures(Path(sys.argv[1]))
    for key, sample in samples.items():
        for _ in range(_CALLS):
            signatures[key].call(signatures[key].feed(sample))
    print(peak_resident_bytes() - before)


if __name__ == "__main__":
    _main()
