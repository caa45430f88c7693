"""A NaN on one replica makes all replicas skip together, and their weights stay equal."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_ports import free_ports

REPOSITORY = Path(__file__).resolve().parents[3]

# One script for both strategies. It prints, for each step, whether it was applied and the weights
# of all local replicas; then the state; then whether the state is equal on all local replicas.
SCRIPT = """
import json, sys
import numpy as np
import tensorflow as tf
import keras, tf_keras
from tf_amp.loss_scale import DynamicLossScale, wrap_optimizer

kind, families = sys.argv[1], sys.argv[2].split(",")
if kind == "mirrored":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    mine = lambda pair: strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(pair[context.replica_id_in_sync_group])
    )
else:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    mine = lambda pair: tf.constant(pair[int(sys.argv[3])])
make = {
    "keras": lambda: keras.optimizers.Adam(0.1, global_clipnorm=10.0),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.1, global_clipnorm=10.0),
    "tf_keras_legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1, global_clipnorm=10.0),
    "v1": lambda: tf.compat.v1.train.AdamOptimizer(0.1),
}
NAN, INF = float("nan"), float("inf")
local = lambda value: [x.numpy().tolist() for x in strategy.experimental_local_results(value)]

def run(family, pairs, scaled):
    with strategy.scope():
        variable = (
            keras.Variable([1.0, 2.0]) if family == "keras"
            else tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.SUM)
        )
        tensor = variable.value if family == "keras" else variable
        optimizer = make[family]()
        if scaled:
            optimizer = wrap_optimizer(optimizer, DynamicLossScale(initial=4.0, growth_interval=2))
        if family == "keras":
            optimizer.build([variable])

    @tf.function
    def step(x):
        def replica(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tensor * x)
                loss = optimizer.scale_loss(loss) if scaled else loss
            gradients = tape.gradient(loss, [tensor])
            applied = optimizer.apply_gradients(zip(gradients, [variable]))
            return applied if scaled else tf.constant(True)
        return strategy.run(replica, args=(x,))

    steps = [(all(local(step(mine(pair)))), local(tensor)) for pair in pairs]
    if not scaled:
        return steps, None, None
    state = optimizer.manager.state()
    equal = all(len(set(local(v))) == 1 for v in optimizer.manager.variables)
    return steps, (state.scale, state.good_steps, state.skipped_steps), equal

for family in families:
    bad = [(1.0, 1.0), (1.0, NAN), (1.0, 2.0), (INF, 1.0), (3.0, 1.0)]
    good = [pair for pair in bad if np.isfinite(pair).all()]
    print("RESULT", repr((family, run(family, bad, True), run(family, good, False)[0])))
"""
FAMILIES = ["keras", "tf_keras", "tf_keras_legacy", "v1"]
if importlib.metadata.version("keras").startswith("3.4."):
    FAMILIES.remove("keras")  # its replicas drift apart, in float32 too
WORKER_FAMILIES = [family for family in FAMILIES if family != "tf_keras_legacy"]


def results(stdout: str) -> dict[str, tuple]:
    rows = [ast.literal_eval(line[7:]) for line in stdout.split("\n") if line.startswith("RESULT")]
    return {row[0]: row[1:] for row in rows}


def check(result: tuple, replicas: int) -> None:
    (steps, state, equal), plain = result
    assert [applied for applied, _ in steps] == [True, False, True, False, True]
    weights = [values for _, values in steps]
    assert all(len(values) == replicas and values[0] == values[-1] for values in weights)
    assert weights[1] == weights[0]
    assert weights[3] == weights[2]
    # 4, then two good steps with a skipped one between them, and again.
    assert state == (1.0, 1, 2)
    assert equal
    # The applied steps are those of float32 under the same strategy.
    taken = [w for applied, w in steps if applied]
    for ours, (_, theirs) in zip(taken, plain, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)


@pytest.mark.slow
def test_mirrored_strategy(run_forked) -> None:
    found = results(run_forked(SCRIPT, args=("mirrored", ",".join(FAMILIES))).stdout)
    assert sorted(found) == sorted(FAMILIES)
    for result in found.values():
        check(result, replicas=2)


FIT_SCRIPT = """
import sys
import numpy as np
import tensorflow as tf
how = sys.argv[1]
if how == "in_place":
    from tf_amp.loss_scale import auto_wrap
    auto_wrap.install(wraps=True)
if how != "plain":
    from tf_amp.loss_scale import manager_of, wrap_optimizer
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
import keras, tf_keras
for library, optimizers in ((keras, keras.optimizers), (tf_keras, tf_keras.optimizers),
                            (tf_keras, tf_keras.optimizers.legacy)):
    library.utils.set_random_seed(0)
    with strategy.scope():
        model = library.Sequential([library.layers.Input((4,)), library.layers.Dense(2)])
        optimizer = optimizers.Adam(0.05)
        if how == "wrapped":
            optimizer = wrap_optimizer(optimizer)
        model.compile(optimizer, "mse", jit_compile=False)
    fit = lambda x: model.fit(x, x[:, :2] * 0 + 1, batch_size=8, verbose=0, shuffle=False)
    losses = [round(fit(x).history["loss"][0], 4) for _ in range(3)]
    print("RESULT", repr((optimizers.__name__, losses)))
    if how != "plain":
        weights = model.get_weights()
        bad = x[:8].copy(); bad[5] = np.nan  # in the half of the second replica
        fit(bad)
        state = manager_of(optimizer).state()
        same = all((a == b).all() for a, b in zip(weights, model.get_weights()))
        assert (state.scale, state.good_steps, state.skipped_steps, same) == (2.0**14, 0, 1, True)
"""


@pytest.mark.slow
def test_fit_under_mirrored_strategy(run_forked) -> None:
    """To its end, where Keras 3 finalizes the variables of the model."""
    ways = ("plain", "wrapped", "in_place")
    plain, *scaled = (results(run_forked(FIT_SCRIPT, args=(how,)).stdout) for how in ways)
    assert len(plain) == 3
    assert scaled == [plain, plain]


CENTRAL_SCRIPT = """
import sys
import numpy as np
import tensorflow as tf
import tf_keras
from tf_amp.loss_scale import DynamicLossScale, wrap_optimizer
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = x[:, :2] * 0 + 1
for scaled in (False, True):
    tf_keras.utils.set_random_seed(0)
    with tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]).scope():
        model = tf_keras.Sequential([tf_keras.layers.Input((4,)), tf_keras.layers.Dense(2)])
        optimizer = tf_keras.optimizers.legacy.Adam(0.05)
        if scaled:
            optimizer = wrap_optimizer(optimizer, DynamicLossScale(initial=8.0))
        model.compile(optimizer, "mse")
    fit = lambda x: model.fit(x, y[: len(x)], batch_size=8, epochs=3, verbose=0, shuffle=False)
    print("RESULT", repr((scaled, [round(loss, 4) for loss in fit(x).history["loss"]])))
weights = model.get_weights()
bad = x[:8].copy(); bad[5] = np.nan  # in the half of the second replica
fit(bad)
assert all((a == b).all() for a, b in zip(weights, model.get_weights()))
assert optimizer.manager.state().scale == 1.0
"""


def test_legacy_optimizer_under_central_storage(run_forked) -> None:
    """It refuses gradients that are summed already there."""
    found = results(run_forked(CENTRAL_SCRIPT).stdout)
    assert found[True] == found[False]


@pytest.mark.slow
def test_multi_worker_mirrored_strategy(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    workers = [f"localhost:{port}" for port in free_ports(2)]
    processes = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {
            **os.environ,
            "TF_CONFIG": repr(config).replace("'", '"'),
            "PYTHONPATH": str(REPOSITORY),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), "multi", ",".join(WORKER_FAMILIES), str(index)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = []
    try:
        for process in processes:
            stdout, stderr = process.communicate(timeout=240)
            assert process.returncode == 0, stderr[-4000:]
            outputs.append(results(stdout))
    finally:
        for process in processes:
            process.kill()
    assert sorted(outputs[0]) == sorted(WORKER_FAMILIES)
    assert outputs[0] == outputs[1]
    for result in outputs[0].values():
        check(result, replicas=1)


def test_outside_a_replica_it_is_refused(run_forked) -> None:
    done = run_forked(
        """
        import tensorflow as tf
        from tf_amp.loss_scale import wrap_optimizer
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            variable = tf.Variable(1.0)
            optimizer = wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
            optimizer.scale_loss(tf.constant(1.0))
            try:
                optimizer.apply_gradients([(tf.constant(1.0), variable)])
            except RuntimeError as error:
                print(error)
        """
    )
    assert "strategy.run" in done.stdout
    assert "MirroredStrategy" in done.stdout


def test_horovod_processes_agree(run_forked) -> None:
    """With a stand-in for Horovod: the flag is summed over processes, outside the branch."""
    done = run_forked(
        """
        import sys, types
        import tensorflow as tf, keras
        from tf_amp.loss_scale import DynamicLossScale, wrap_optimizer

        calls = []
        other_process_is_bad = tf.Variable(0.0)
        hvd = types.ModuleType("horovod.tensorflow")
        hvd.Sum = "sum"
        def allreduce(value, op):
            assert op == "sum"
            calls.append(value)
            return value + other_process_is_bad
        hvd.allreduce = allreduce

        # What hvd.DistributedOptimizer returns: a subclass of the optimizer's class.
        Distributed = type("SGD", (keras.optimizers.SGD,), {"__module__": "horovod._keras"})
        variable = keras.Variable([1.0])
        optimizer = wrap_optimizer(Distributed(0.5), DynamicLossScale(initial=8.0))
        step = lambda: bool(optimizer.apply([optimizer.scale_loss(tf.constant([1.0]))], [variable]))
        try:
            step()
        except RuntimeError as error:
            print("horovod.tensorflow is not imported" in str(error))
        sys.modules["horovod.tensorflow"] = hvd
        print(step(), float(variable[0]), float(optimizer.loss_scale))
        other_process_is_bad.assign(1.0)
        print(step(), float(variable[0]), float(optimizer.loss_scale), len(calls))
        """
    )
    assert done.stdout.split("\n")[:3] == ["True", "True 0.5 8.0", "False 0.5 4.0 2"]
