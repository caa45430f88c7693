"""AMP under the strategies of TensorFlow that need servers or meshes of their own."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_ports import free_ports
from environments import FLOAT16, REWRITE

from tf_amp.tracing.jobs import jobs_of
from tf_amp.tracing.trace import read_traces

REPOSITORY = Path(__file__).resolve().parents[2]


def facts(stdout: str) -> list[Any]:
    return [ast.literal_eval(line[2:]) for line in stdout.splitlines() if line[:2] == "@@"]


START = """
import tf_amp.autoload
tf_amp.autoload.activate()
import sys
import numpy as np
import tensorflow as tf
import tf_amp

X = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
"""

PARAMETER_SERVER = (
    START
    + """
import os
import subprocess

cluster = {"worker": sys.argv[1:3], "ps": sys.argv[3:4]}
cluster = {job: [f"localhost:{port}" for port in ports] for job, ports in cluster.items()}
if len(sys.argv) > 4:
    server = tf.distribute.Server(cluster, job_name=sys.argv[4], task_index=int(sys.argv[5]))
    sys.stdin.read()  # ends with the coordinator, however that ends
    os._exit(0)
servers = [
    subprocess.Popen([sys.executable, *sys.argv, job, str(index)], stdin=subprocess.PIPE)
    for job, tasks in cluster.items() for index in range(len(tasks))
]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(cluster), rpc_layer="grpc"
)
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weight = tf.Variable(np.eye(16, dtype="float32"))

@tf.function
def step(x):
    def replica(x):
        with tf.GradientTape() as tape:
            y = tf.matmul(tf.nn.relu(tf.matmul(x, weight)), weight)
            loss = tf.reduce_mean(tf.square(y - x))
        gradient = tape.gradient(loss, weight)
        weight.assign_sub(0.1 * gradient)
        return loss
    return strategy.run(replica, args=(x,))

losses = []
for _ in range(4):
    values = [coordinator.schedule(step, args=(tf.constant(X),)) for _ in range(4)]
    coordinator.join()
    losses.append(float(np.mean([coordinator.fetch(value) for value in values])))
status = tf_amp.status()
print("@@" + repr((losses, status.graphs_rewritten, status.graphs_failed)), flush=True)
os._exit(0)  # servers are never joined
"""
)


def losses_of_one_worker() -> list[float]:
    """Of the same steps, one after the other in float32."""
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    weight = np.eye(16, dtype=np.float32)
    losses = []
    for _ in range(16):
        hidden = np.maximum(x @ weight, 0)
        error = hidden @ weight - x
        losses.append(np.mean(error**2))
        outer = error * np.float32(2 / error.size)
        weight -= 0.1 * (hidden.T @ outer + x.T @ np.where(hidden > 0, outer @ weight.T, 0))
    return [float(np.mean(losses[start : start + 4])) for start in range(0, 16, 4)]


@pytest.mark.slow
def test_parameter_servers(run_python: Any) -> None:
    """Two workers and a parameter server: what the workers run is rewritten, and trains."""
    ports = tuple(map(str, free_ports(3)))
    ((losses, rewritten, failed),) = facts(run_python(PARAMETER_SERVER, FLOAT16, args=ports).stdout)
    assert rewritten > 0
    assert failed == 0
    assert losses[-1] < losses[0]
    # Steps of two workers run in any order, so that losses differ a little without AMP too.
    assert losses == pytest.approx(losses_of_one_worker(), rel=0.1)


FIT_WITH_SERVERS = (
    START
    + """
import os
import tf_keras
from tf_amp.loss_scale import counters

cluster = tf.train.ClusterSpec(
    {job: [f"localhost:{port}"] for job, port in zip(("worker", "ps"), sys.argv[1:])}
)
servers = [tf.distribute.Server(cluster, job_name=job, task_index=0) for job in cluster.jobs]
strategy = tf.distribute.ParameterServerStrategy(
    tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
)
found = []
for optimizers in (tf_keras.optimizers, tf_keras.optimizers.legacy):
    tf_keras.utils.set_random_seed(1)
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(16, "relu"), tf_keras.layers.Dense(16)])
        model.compile(optimizers.SGD(0.1), "mse")
    data = tf.data.Dataset.from_tensor_slices((X, X)).batch(16).repeat()
    found += model.fit(data, epochs=3, steps_per_epoch=4, verbose=0).history["loss"]
states = [entry["state"] for entry in counters()["loss_scales"]]
print("@@" + repr((found, [state["good_steps"] for state in states])), flush=True)
os._exit(0)  # servers are never joined
"""
)


@pytest.mark.slow
def test_fit_with_parameter_servers(run_python: Any) -> None:
    """tf_keras refuses callbacks of batches there, and not the one that reports skipped steps.

    Its legacy optimizers refuse gradients that are summed already.
    """
    ports = tuple(map(str, free_ports(2)))
    ((losses, good_steps),) = facts(run_python(FIT_WITH_SERVERS, FLOAT16, args=ports).stdout)
    ports = tuple(map(str, free_ports(2)))
    ((plain, _),) = facts(run_python(FIT_WITH_SERVERS, args=ports).stdout)
    assert good_steps == [12, 12]
    assert losses == pytest.approx(plain, rel=0.01)


DTENSOR = (
    START
    + """
from tensorflow.experimental import dtensor

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
mesh = dtensor.create_mesh([("batch", 2)], device_type="CPU")
copied = dtensor.Layout.replicated(mesh, rank=2)
split = dtensor.Layout(["batch", dtensor.UNSHARDED], mesh)
weight = dtensor.DVariable(dtensor.call_with_layout(tf.fill, copied, (16, 16), 0.1))

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        y = tf.matmul(tf.nn.relu(tf.matmul(x, weight)), weight)
        loss = tf.reduce_mean(tf.square(y - x))
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss

losses = []
for _ in range(4):
    x = dtensor.pack([tf.constant(half) for half in np.split(X, 2)], split)
    losses.append(float(dtensor.unpack(step(x))[0]))
status = tf_amp.status()
print("@@" + repr((losses, status.graphs_rewritten, status.graphs_failed)), flush=True)
"""
)


@pytest.mark.slow
def test_dtensor(run_python: Any) -> None:
    """A mesh of two CPUs: functions over distributed tensors are rewritten."""
    ((losses, rewritten, failed),) = facts(run_python(DTENSOR, FLOAT16).stdout)
    ((plain, *_),) = facts(run_python(DTENSOR).stdout)
    assert rewritten > 0
    assert failed == 0
    assert losses == pytest.approx(plain, rel=0.01)


MULTI_WORKER = (
    START
    + """
import os
import tf_keras as keras

folder, die_at = sys.argv[1], int(sys.argv[2])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)

class Die(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("@@" + repr((epoch, round(logs["loss"], 3))), flush=True)
        if epoch == die_at:
            os.kill(os.getpid(), 9)

with strategy.scope():
    layers = [keras.layers.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(32).repeat()
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
model.fit(
    data.with_options(options), steps_per_epoch=4, epochs=5, verbose=0,
    callbacks=[keras.callbacks.BackupAndRestore(folder), Die()],
)
status = tf_amp.status()
print("@@" + repr((status.graphs_rewritten > 0, status.graphs_failed)), flush=True)
"""
)


def run_workers(script: Path, folder: Path, die_at: int, **settings: str) -> list[list[Any]]:
    workers = [f"localhost:{port}" for port in free_ports(2)]
    running = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {
            **os.environ,
            **FLOAT16,
            **settings,
            "TF_CONFIG": repr(config).replace("'", '"'),
            "PYTHONPATH": str(REPOSITORY),
        }
        # One of them dies; the other waits for it in vain, and is ended too.
        command = [sys.executable, str(script), str(folder), str(die_at if index else -1)]
        running.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = running[1].communicate(timeout=240)
        assert running[1].returncode == (-signal.SIGKILL if die_at >= 0 else 0), said[1][-3000:]
        assert ("is not tried: its job has other" in said[1]) == (f"{REWRITE}_TRIAL" in settings)
        if die_at >= 0:
            running[0].kill()
        return [facts(running[0].communicate(timeout=240)[0]), facts(said[0])]
    finally:
        for one in running:
            one.kill()


@pytest.mark.slow
def test_a_worker_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Both go on from the last checkpoint, loss scale included, to where they would have come."""
    script = tmp_path / "worker.py"
    script.write_text(MULTI_WORKER)
    _, first = run_workers(script, tmp_path / "broken", die_at=2)
    chief, second = run_workers(script, tmp_path / "broken", die_at=-1)
    # Nothing is tried: TensorFlow cannot wait for the devices of such a job.
    settings = {f"{REWRITE}_LOG_PATH": str(tmp_path / "trace"), f"{REWRITE}_TRIAL": "1"}
    chief_whole, whole = run_workers(script, tmp_path / "whole", die_at=-1, **settings)
    assert [epoch for epoch, _ in first] == [0, 1, 2]
    assert second[-1] == whole[-1] == chief[-1] == chief_whole[-1] == (True, 0)
    losses = dict(whole[:-1])
    assert sorted(losses) == [0, 1, 2, 3, 4]
    assert dict(first) == pytest.approx({n: losses[n] for n in (0, 1, 2)}, rel=0.02)
    # The last epoch before the end may not have been saved.
    assert [epoch for epoch, _ in second[:-1]] in ([2, 3, 4], [3, 4])
    assert dict(second[:-1]) == pytest.approx({n: losses[n] for n, _ in second[:-1]}, rel=0.02)
    # Both planned the same, so that the trace tells it once.
    (job,) = jobs_of(read_traces(tmp_path / "trace"))
    assert [rank.rank for rank in job.traces] == ["worker 0", "worker 1"]
    (step,) = [f for f in job.functions if f.figures.products]
    assert step.ranks == ()
    assert step.figures.products_low == step.figures.products > 0
