"""Are BatchNormalization's moving statistics right after many steps on fixed data?

    python benchmarks/moving_statistics.py

A convolution whose weights are frozen feeds a BatchNormalization and a layer that trains. The
data never change, so after 1,500 steps with a momentum of 0.99 the moving mean and variance must
be those of the convolution's output, which NumPy computes in float64. Printed is the median over
the channels of the relative error, against those statistics and against the float32 process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from results import RESULTS, print_table, write_json
from variants import DTYPES, VARIANTS, environment, prepare
from worker_channel import Message, Worker, serve

_STATISTICS = ("moving_mean", "moving_variance")
_CHANNELS = 64


def train(request: Message) -> Message:
    """Trains in this process; answers with the moving statistics and with the exact ones."""
    import keras
    from function_evidence import low_precision_ops
    from keras import layers

    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    # Off-centre data: with a mean near 0 a relative error would say nothing.
    images = (rng.standard_normal((16, 12, 12, 8)) + 0.5).astype(np.float32)
    labels = rng.integers(10, size=16).astype(np.int32)
    frozen = layers.Conv2D(_CHANNELS, 3, trainable=False, bias_initializer="ones")
    norm = layers.BatchNormalization(momentum=0.99)
    model = keras.Sequential(
        [
            keras.Input(images.shape[1:]),
            frozen,
            norm,
            layers.ReLU(),
            layers.Conv2D(16, 3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)
    for _ in range(request["steps"]):
        model.train_on_batch(images, labels)
    kernel, bias = (np.asarray(value, np.float64) for value in frozen.get_weights())
    windows = np.lib.stride_tricks.sliding_window_view(images.astype(np.float64), (3, 3), (1, 2))
    outputs = np.einsum("nyxcij,ijco->nyxo", windows, kernel) + bias
    return {
        "moving_mean": np.asarray(norm.moving_mean, np.float64).tolist(),
        "moving_variance": np.asarray(norm.moving_variance, np.float64).tolist(),
        "exact": {
            "moving_mean": outputs.mean((0, 1, 2)).tolist(),
            "moving_variance": outputs.var((0, 1, 2)).tolist(),
        },
        "math_ops": low_precision_ops(),
    }


def median_error(values: list[float], truth: list[float]) -> float:
    """Returns the median over the channels of the relative error."""
    exact = np.asarray(truth)
    return float(np.median(np.abs(np.asarray(values) - exact) / np.abs(exact)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500, help="training steps (1500)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--json", type=Path, default=RESULTS / "moving_statistics.json")
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        prepare(options.worker, options.dtype)
        serve(train)
        return

    found: dict[str, dict[str, Any]] = {}
    for variant in dict.fromkeys(("float32", *options.variants)):
        print(f"\r\033[K{variant}: {options.steps} steps", end="", file=sys.stderr, flush=True)
        arguments = [__file__, "--worker", variant, "--dtype", options.dtype]
        worker = Worker(arguments, environment(variant, options.dtype))
        try:
            found[variant] = worker.ask(steps=options.steps)
        finally:
            worker.close()
    print("\r\033[K", end="", file=sys.stderr, flush=True)

    rows = []
    for variant, run in found.items():
        run["median_relative_error"] = {
            name: {
                "exact": median_error(run[name], run["exact"][name]),
                "float32": median_error(run[name], found["float32"][name]),
            }
            for name in _STATISTICS
        }
        errors = [
            f"{run['median_relative_error'][name][against]:.5f}"
            for name in _STATISTICS
            for against in ("exact", "float32")
        ]
        rows.append([variant, *errors])
    headers = ["variant"]
    headers += [f"{name} against {other}" for name in _STATISTICS for other in ("exact", "float32")]
    print_table(headers, rows)
    write_json(options.json, {"steps": options.steps, "dtype": options.dtype, "variants": found})


if __name__ == "__main__":
    main()
