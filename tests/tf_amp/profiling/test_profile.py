"""`tf-amp profile`, from a program to its figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_ports import free_ports
from environments import CONVERTS, REWRITE, RunPython

MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"
KERAS = """
import sys
import keras, numpy as np, tensorflow as tf
model = keras.Sequential(
    [keras.Input((256,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(1)]
)
model.compile("adam", "mse")
rows = tf.data.Dataset.from_tensor_slices((np.ones((512, 256), "f"), np.ones((512, 1), "f")))
model.fit(rows.map(lambda x, y: (x * 2.0, y)).batch(128), epochs=int(sys.argv[1]), verbose=0)
print("trained to the end")
"""
# The graph switches itself on; and evaluation, which trains nothing, comes first.
SESSION = """
import numpy as np, tensorflow as tf, tf_amp
v1 = tf.compat.v1
v1.disable_eager_execution()
x = v1.placeholder(tf.float32, [None, 256])
w = v1.get_variable("w", [256, 256])
loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.matmul(x, w))))
optimizer = v1.train.GradientDescentOptimizer(1e-3)
train = tf_amp.enable_mixed_precision_graph_rewrite(optimizer).minimize(loss)
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    for _ in range(50):
        session.run(loss, {x: np.ones([64, 256], "f")})
        session.run([train, loss], {x: np.ones([64, 256], "f")})
"""

# As MultiWorkerMirroredStrategy makes it of TF_CONFIG, before it waits for the others.
SEVERAL = """
import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context
workers = tf.train.ClusterSpec({"worker": ["localhost:PORT", "localhost:OTHER"]})
server = tensorflow_server_pb2.ServerDef(job_name="worker", protocol="grpc")
server.cluster.CopyFrom(workers.as_cluster_def())
context.context().enable_collective_ops(server)
"""


ANYWHERE = {**CONVERTS, f"{REWRITE}_COST_TABLE": "off"}


def run(
    run_forked: RunPython,
    program: Path,
    *options: str,
    arguments: tuple[str, ...] = (),
    env: dict[str, str] = ANYWHERE,
) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "tf_amp", "run", str(program), *arguments)
    quick = ("--steps", "3", "--skip", "2", "--rounds", "1")
    return run_forked(MAIN, env, args=("profile", *quick, *options, "--", *command), check=False)


@pytest.mark.slow
def test_what_is_said_of_a_keras_program(run_forked: RunPython, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(KERAS)
    done = run(run_forked, program, arguments=("9",))
    assert done.returncode == 0, done.stderr
    assert "_step_on_iterator; bfloat16 on CPU" in done.stdout.splitlines()[0]
    for part in ("products", "casts", "outside of the function", "a step would be", "times as"):
        assert part in done.stdout
    # Each Cast of ours is found in the trace, with the line that made what it casts.
    assert re.search(r"us  casts what .* makes\n +at .*train.py:\d+", done.stdout)
    # An iterator's place is taken by one that has the same batch for ever.
    assert "With one batch that is there already" in done.stdout
    assert "trained to the end" not in done.stderr


@pytest.mark.slow
def test_a_program_that_stays_float32_is_not_said_to_be_faster_or_slower(
    run_forked: RunPython, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(KERAS)
    no_cpu_is_fast_in = {f"{REWRITE}_DTYPE": "float16", "CUDA_VISIBLE_DEVICES": ""}
    done = run(run_forked, program, arguments=("9",), env=no_cpu_is_fast_in)
    assert done.returncode == 0, done.stderr
    assert "both columns are float32" in done.stdout.splitlines()[0]
    assert "They are" not in done.stdout


@pytest.mark.slow
def test_figures_of_a_session_that_switches_itself_on(
    run_forked: RunPython, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(SESSION)
    done = run(run_forked, program, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for steps in (found["float32"], found["amp"]):
        assert steps["function"] == "Session.run(GradientDescent_1, Mean:0)"
        assert sum(steps["classes"].values()) == pytest.approx(steps["step"], rel=0.01)
        assert steps["classes"]["products"] > 0
        assert steps["ops"]["MatMul"] > 0
        assert steps["cached"] > 0
        assert list(steps["others"]) == ["Session.run(Mean:0)"]
    assert found["amp"]["casts"] > found["float32"]["casts"]
    assert found["bound"] >= 1
    assert found["speed_up"] == found["float32"]["step"] / found["amp"]["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "options", "status", "said"),
    [
        (KERAS, (), 1, "_step_on_iterator 4 times"),
        (SESSION, ("--function", "no such name"), 1, "Session.run(Mean:0) 50 times"),
        (SEVERAL + KERAS, (), 1, "one of several workers"),
        ("raise SystemExit('this one fails')", (), 1, "this one fails"),
        ("import tensorflow; 1 / 0", (), 1, "ZeroDivisionError"),
        ("import time; time.sleep(60)", ("--timeout", "1"), 1, "stopped after --timeout 1 seconds"),
        (KERAS, ("--steps", "0"), 2, "no whole number, 1 or more"),
    ],
)
def test_what_cannot_be_measured(
    run_forked: RunPython,
    tmp_path: Path,
    program: str,
    options: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    port, other = map(str, free_ports(2))
    (tmp_path / "train.py").write_text(program.replace("PORT", port).replace("OTHER", other))
    done = run(run_forked, tmp_path / "train.py", *options, arguments=("1",))
    assert done.returncode == status
    assert said in done.stderr
