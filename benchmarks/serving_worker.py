"""A process that serves a SavedModel in one variant, for `conversions.py`.

python benchmarks/serving_worker.py MODEL --inputs FILE.npz --variant float32
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from variants import VARIANTS, prepare
from worker_channel import Message, serve


class Serving:
    """A loaded model with one batch of inputs."""

    def __init__(self, path: Path, inputs: Path) -> None:
        from tf_amp.comparison.callables import load_signatures

        with np.load(inputs) as stored:
            arrays = dict(stored)
        start = time.perf_counter()
        # A model of Keras has more signatures, which are the same; a hub module has "default".
        signatures = load_signatures(path)
        self.load_s = time.perf_counter() - start
        self._signature = signatures.get("serving_default") or signatures["default"]
        self._fed = self._signature.feed(arrays)

    def call(self) -> dict[str, Any]:
        """The outputs."""
        return {name: value.numpy() for name, value in self._signature.call(self._fed).items()}

    def handle(self, request: Message) -> Message:
        """Answers a request: "outputs" into a file, or "steps" timed."""
        if request["do"] == "outputs":
            self.call()
            found = {k: np.asarray(v, np.float32) for k, v in self.call().items()}
            np.savez(request["file"], **found)
            return {"load_s": self.load_s}
        start = time.perf_counter()
        for _ in range(request["steps"]):
            self.call()
        return {"seconds": (time.perf_counter() - start) / request["steps"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    options = parser.parse_args()
    prepare(options.variant)
    serve(Serving(options.model, options.inputs).handle)


if __name__ == "__main__":
    main()
