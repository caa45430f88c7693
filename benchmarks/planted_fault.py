"""A node with values near 1e5 in a model of 3,000 nodes: who names it, and after how many runs.

    python benchmarks/planted_fault.py
    python benchmarks/planted_fault.py --parts diagnose callback --blocks 40

The model is a stack of residual blocks, one of which multiplies by 1e5 and back. In float16 that
node overflows. `diagnose` gets one step of its training, `callback` waits inside `fit`, `bisect`
sees exit statuses alone, `calibrate` gets the exported model. Each time the rules that come out of
it are put to the test: a run of the program in mixed precision has to be finite, and the converted
model within the tolerance. It ends with an error if one is not, or if another node is named first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from results import RESULTS, print_table, write_json

PARTS = ("diagnose", "callback", "bisect", "calibrate")
BLOCKS, WIDTH, BATCH = "PLANTED_BLOCKS", 32, 16
TOLERANCE = 0.01
REWRITE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE"
FLOAT16 = {
    "TF_ENABLE_AUTO_MIXED_PRECISION": "1",
    f"{REWRITE}_DTYPE": "float16",
    f"{REWRITE}_IGNORE_PERFORMANCE": "1",
}


def model_of(blocks: int) -> Any:
    """The model; two thirds down one of its blocks has the fault."""
    import keras

    keras.utils.set_random_seed(0)

    class Planted(keras.layers.Layer):
        """Gives what it gets, by way of values near 1e5."""

        def build(self, shape: tuple[int, ...]) -> None:
            self.w = self.add_weight(shape=(shape[-1], shape[-1]), initializer="identity")

        def call(self, x: Any) -> Any:
            return keras.ops.matmul(x * 1e5, self.w) * 1e-5

    inputs = keras.Input([WIDTH])
    x = inputs
    for number in range(blocks):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(WIDTH, activation="relu")(y)
        y = Planted(name="planted")(y) if number == 2 * blocks // 3 else y
        x = keras.layers.Add()([x, 0.1 * keras.layers.Dense(WIDTH)(y)])
    return keras.Model(inputs, keras.layers.Dense(4)(x))


def batch() -> tuple[Any, Any]:
    """Inputs and what is to come out."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (BATCH, WIDTH)
    return rng.standard_normal(shape, np.float32), rng.standard_normal((BATCH, 4), np.float32)


def compiled() -> Any:
    """The model as it is trained."""
    model = model_of(int(os.environ[BLOCKS]))
    model.compile("sgd", "mse")
    return model


def step_and_batch() -> tuple[Any, list[Any]]:
    """What `tf-amp diagnose` asks for."""
    return compiled().train_step, [batch()]


def samples() -> Iterator[dict[str, Any]]:
    """What `tf-amp calibrate` asks for; the name is that of the only input."""
    yield {os.environ["PLANTED_INPUT"]: batch()[0]}


def train(with_callback: bool) -> int:
    """The program: two steps; it fails if the loss is not finite."""
    import tf_amp

    model = compiled()
    callbacks = [tf_amp.diagnose_callback(model)] if with_callback else []
    history = model.fit(*batch(), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
    loss = history.history["loss"][-1]
    found = callbacks[0].diagnosis if callbacks else None
    told = {"loss": loss, "epochs": len(history.history["loss"])}
    if found is not None:
        told["rules"] = found.rules
        told["nodes"] = [finding.remark.node for finding in found.findings]
    print(json.dumps(told))
    return not math.isfinite(loss)


class Job:
    """The runs of one campaign, in a folder of its own."""

    def __init__(self, room: Path, blocks: int) -> None:
        self.room = room
        self._base = {k: v for k, v in os.environ.items() if "AUTO_MIXED_PRECISION" not in k}
        self._base |= {BLOCKS: str(blocks), "TF_CPP_MIN_LOG_LEVEL": "2"}
        here = str(Path(__file__).resolve().parent)
        self._base["PYTHONPATH"] = os.pathsep.join(
            filter(None, (here, os.environ.get("PYTHONPATH", "")))
        )

    def run(
        self, *command: str, **variables: str
    ) -> tuple[subprocess.CompletedProcess[str], float]:
        """Runs Python; returns what it did and the seconds."""
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *command],
            env=self._base | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        return done, time.perf_counter() - start

    def finite_with(self, rules: str) -> bool:
        """Whether the program is finite in float16 with rules."""
        file = self.room / "pasted.toml"
        file.write_text(rules)
        done, _ = self.run(__file__, "--train", **FLOAT16, **{f"{REWRITE}_RULES": str(file)})
        return done.returncode == 0

    def diagnose(self) -> dict[str, Any]:
        """`tf-amp diagnose` on one step."""
        arguments = ("--dtype", "float16", "--device", "CPU", "--json")
        done, seconds = self.run(
            "-m", "tf_amp", "diagnose", "planted_fault:step_and_batch", *arguments
        )
        if done.returncode != 3:
            raise RuntimeError(done.stderr)
        (found,) = json.loads(done.stdout.splitlines()[-1]).values()
        first = found["findings"][0]
        return {
            "named": first["node"],
            "line": first["lines"][0],
            "rules": len(found["findings"]),
            "finite": self.finite_with(found["rules"]),
            "runs": 1,
            "seconds": seconds,
        }

    def callback(self) -> dict[str, Any]:
        """`tf_amp.diagnose_callback` in `fit`."""
        done, seconds = self.run(__file__, "--train", "--callback", **FLOAT16)
        told = json.loads(done.stdout.splitlines()[-1])
        return {
            "named": told["nodes"][0],
            "epochs": told["epochs"],
            "rules": len(told["nodes"]),
            "finite": self.finite_with(told["rules"]),
            "runs": 1,
            "seconds": seconds,
        }

    def bisect(self) -> dict[str, Any]:
        """`tf-amp bisect`, by the exit status."""
        file = self.room / "bisected.toml"
        program = (sys.executable, __file__, "--train")
        done, seconds = self.run(
            *("-m", "tf_amp", "bisect", "--rules", str(file), "--", *program), **FLOAT16
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        runs = re.search(r"^(\d+) runs$", done.stdout, re.MULTILINE)
        name = re.search(r" (\S+), number (\d+) of (\d+),", done.stdout)
        assert runs is not None and name is not None, done.stdout
        rules = file.read_text()
        return {
            "named": name[1],
            "of": int(name[3]),
            "rules": rules.count("[[rule]]"),
            "finite": self.finite_with(rules),
            "runs": int(runs[1]),
            "seconds": seconds,
        }

    def calibrate(self) -> dict[str, Any]:
        """`tf-amp calibrate` on the exported model, whose nodes are counted."""
        source, file = self.room / "model", self.room / "calibrated.toml"
        done, _ = self.run(__file__, "--export", str(source))
        told = json.loads(done.stdout.splitlines()[-1])
        inputs = ("--inputs", "planted_fault:samples")
        target = ("--dtype", "float16", "--device", "CPU")
        variables = {"PLANTED_INPUT": told["input"]}
        found: dict[str, Any] = {"nodes": told["nodes"]}
        tolerance = ("--tolerance", str(TOLERANCE))
        done, found["seconds"] = self.run(
            *("-m", "tf_amp", "calibrate", str(source), *inputs, *target, *tolerance),
            *("-o", str(file)),
            **variables,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        rules = file.read_text()
        found["said"] = [line[2:] for line in rules.splitlines() if line.startswith("#")]
        found["named"] = re.findall(r'^node = "(.*)"$', rules, re.MULTILINE)[0]
        found["rules"] = rules.count("[[rule]]")
        low = self.room / "low"
        self.run(*("-m", "tf_amp", "convert", str(source), str(low), *target, "--rules", str(file)))
        done, _ = self.run(
            *("-m", "tf_amp", "compare", str(source), str(low), *inputs, *tolerance),
            *("--rounds", "0"),
            **variables,
        )
        found["finite"] = done.returncode == 0
        runs = re.search(r"after (\d+) runs?", " ".join(found["said"]))
        assert runs is not None, rules
        found["runs"] = int(runs[1])
        return found


def export(path: str) -> int:
    """Writes the model; prints how many nodes it has and what its input is called."""
    import tensorflow as tf
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    compiled().export(path, verbose=False)
    saved = SavedModel.FromString(Path(path, "saved_model.pb").read_bytes())
    largest = max(len(f.node_def) for f in saved.meta_graphs[0].graph_def.library.function)
    signature = tf.saved_model.load(path).signatures["serving_default"]
    print(
        json.dumps({"nodes": largest, "input": next(iter(signature.structured_input_signature[1]))})
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--blocks", type=int, default=62)
    parser.add_argument("--json", type=Path, default=RESULTS / "planted_fault.json")
    for name in ("--train", "--callback"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--export", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options.callback)
    if options.export:
        return export(options.export)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as room:
        job = Job(Path(room), options.blocks)
        for part in options.parts:
            results[part] = getattr(job, part)()
            print(part, json.dumps(results[part]), file=sys.stderr, flush=True)
    head = ("part", "named first", "rules", "holds with them", "runs", "seconds")
    keys = ("named", "rules", "finite", "runs", "seconds")
    print_table(head, ([part, *(found[key] for key in keys)] for part, found in results.items()))
    write_json(options.json, {"blocks": options.blocks, "results": results})
    right = all("planted" in found["named"] and found["finite"] for found in results.values())
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
