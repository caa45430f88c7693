"""AMP in processes as they come and go: forked, spawned, ended at any moment, out of disk space."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from environments import FLOAT16, REWRITE

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]

# A program whose every part is converted: a model that is trained, a function, a session.
WORK = """
import tf_amp.autoload
tf_amp.autoload.activate()
import os, sys
import numpy as np
import tensorflow as tf
import keras
import tf_amp

X = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")

def train(epochs=1, **kwargs):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse", jit_compile=False)
    model.fit(X, X[:, :1], epochs=epochs, verbose=0, shuffle=False, **kwargs)
    return model

@tf.function
def product(x):
    return tf.matmul(tf.nn.relu(tf.matmul(x, x)), x)

def run_session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, (16, 16))
        y = tf.matmul(tf.nn.relu(tf.matmul(x, x)), x) + 1.0
        return session.run(y, {x: X[:16]})

def work(number=0):
    train()
    product(X[:16])
    run_session()
    status = tf_amp.status()
    return os.getpid(), status.graphs_rewritten, status.graphs_failed
"""
REWRITTEN = 4
"""The step of `fit` with its two branches, the function, and the session."""


def facts(stdout: str) -> list[Any]:
    return [ast.literal_eval(line[2:]) for line in stdout.splitlines() if line[:2] == "@@"]


POOLS = {
    "forked by hand": """
        # As a server that loads the program before it forks its workers.
        for _ in range(2):
            if os.fork() == 0:
                # One write: print's text and newline are two where Python does not buffer.
                os.write(1, f"@@{work()!r}\\n".encode())
                os._exit(0)
        assert {os.wait()[1] for _ in range(2)} == {0}
    """,
    "fork": """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for fact in pool.map(work, range(2), chunksize=1):
                print("@@" + repr(fact), flush=True)
    """,
    "spawn": """
        import multiprocessing
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                for fact in pool.map(work, range(2), chunksize=1):
                    print("@@" + repr(fact), flush=True)
    """,
}


def dedented(code: str) -> str:
    lines = code.splitlines()
    return "\n".join(line[8:] for line in lines)


@pytest.mark.parametrize("pool", [*POOLS][1:])
def test_pools(run_python: Any, tmp_path: Path, pool: str) -> None:
    check_pool(run_python, tmp_path, pool)


def test_workers_forked_after_the_import(run_python: Any, tmp_path: Path) -> None:
    check_pool(run_python, tmp_path, "forked by hand")


def check_pool(run_python: Any, tmp_path: Path, pool: str) -> None:
    """Each worker rewrites its own graphs, counts them and writes them to its own folder."""
    code = WORK + dedented(POOLS[pool])
    env = {**FLOAT16, f"{REWRITE}_LOG_PATH": str(tmp_path)}
    found = facts(run_python(code, env).stdout)
    assert len(found) == 2
    assert [failed for *_, failed in found] == [0, 0]
    by_process: dict[int, list[int]] = {}
    for process, rewritten, _ in found:
        by_process.setdefault(process, []).append(rewritten)
    for counts in by_process.values():
        # A worker that starts late leaves both to the other, which traces the function once.
        assert counts == [REWRITTEN, 2 * REWRITTEN - 1][: len(counts)]
    folders = {path.name.split("_")[1] for path in tmp_path.iterdir()}
    assert folders == {str(process) for process in by_process}


# What a program may leave running when it ends. Each prints its last word.
ENDINGS = {
    # One that is in TensorFlow's own C++ code when Python ends may abort the process, AMP or not.
    "a daemon thread that waits": """
        import threading
        def forever():
            run_session()
            product(X[:16])
            threading.Event().wait()
        threading.Thread(target=forever, daemon=True).start()
        work()
        print("@@'end'", flush=True)
    """,
    "a thread that still runs": """
        import threading, time
        def later():
            time.sleep(0.5)
            run_session()
            tf.function(lambda x: tf.matmul(tf.matmul(x, x), x))(X[:16])
            assert tf_amp.status().graphs_rewritten == 2, tf_amp.status().graphs_rewritten
            print("@@'end'", flush=True)
        threading.Thread(target=later).start()
    """,
    "atexit": """
        import atexit
        def last():
            assert work()[1:] == (4, 0)
            print("@@'end'", flush=True)
        atexit.register(last)
    """,
    "a session that nobody closes": """
        session = tf.compat.v1.Session(graph=tf.Graph())
        with session.graph.as_default():
            y = tf.matmul(tf.matmul(X[:16, :16], X[:16]), X[:16]) + 1.0
        session.run(y)
        iterator = iter(tf.data.Dataset.range(9).map(lambda i: i).prefetch(2))
        next(iterator)
        print("@@'end'", flush=True)
    """,
    "a subinterpreter": """
        import _testcapi
        code = "import sys, tf_amp; assert not tf_amp.status().enabled; import tf_amp.autoload"
        assert _testcapi.run_in_subinterp(code) == 0
        assert work()[1:] == (4, 0)
        assert _testcapi.run_in_subinterp("import tf_amp.state") == 0
        print("@@'end'", flush=True)
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends(run_python: Any, ending: str) -> None:
    if ending == "a subinterpreter":
        pytest.importorskip("_testcapi")
    done = run_python(WORK + dedented(ENDINGS[ending]), FLOAT16, timeout=200)
    assert facts(done.stdout) == ["end"]
    assert "Traceback" not in done.stderr


OUT_OF_SPACE = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        print("@@" + repr(work()[1:]), flush=True)
"""


def test_a_disk_that_is_full(run_python: Any, tmp_path: Path) -> None:
    """One warning, and no more files; the program and its rewrites go on."""
    done = run_python(
        WORK + dedented(OUT_OF_SPACE), {**FLOAT16, f"{REWRITE}_LOG_PATH": str(tmp_path)}
    )
    assert facts(done.stdout) == [(REWRITTEN, 0)]
    assert done.stderr.count("Graphs cannot be written") == 1


def test_nowhere_to_say_anything(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORK + "open(sys.argv[1], 'w').write(repr(work()[1:]))")
    result = tmp_path / "result"
    with open("/dev/full", "w") as full:
        environment = {**os.environ, **FLOAT16, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, str(script), str(result)]
        subprocess.run(command, env=environment, stdout=full, stderr=full, timeout=200, check=True)
    assert ast.literal_eval(result.read_text()) == (REWRITTEN, 0)


CHECKPOINTS = """
        from tf_amp.loss_scale import DynamicLossScale, manager_of, wrap_optimizer
        variable = tf.Variable(tf.zeros([256, 256]))
        optimizer = wrap_optimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0),
            DynamicLossScale(initial=1024.0, growth_interval=1 << 30),
        )
        checkpoint = tf.train.Checkpoint(variable=variable, optimizer=optimizer)
        manager = tf.train.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=2)
        assert optimizer.manager.variables  # made before they are restored, to be read
        checkpoint.restore(manager.latest_checkpoint)
        print("@@" + repr((int(variable[0, 0]), optimizer.manager.state().good_steps)), flush=True)
"""
STEPS = """
        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(-tf.reduce_sum(variable))
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        while True:
            step()
            manager.save()
            print("saved", flush=True)
"""


def test_killed_while_it_writes_a_checkpoint(tmp_path: Path) -> None:
    """What is found is of one step: the weights and the loss scale belong together."""
    script = tmp_path / "script.py"
    folder = str(tmp_path / "checkpoints")
    environment = {**os.environ, **FLOAT16, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(script), folder]
    saved = 0
    for at_least in (5, 9):
        script.write_text(WORK + dedented(CHECKPOINTS + STEPS))
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                saved += line == "saved\n"
                if saved >= at_least:
                    break
            time.sleep(0.005)  # into the next one
            run.send_signal(signal.SIGKILL)
        script.write_text(WORK + dedented(CHECKPOINTS))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        ((steps, good_steps),) = facts(done.stdout)
        assert steps == good_steps >= at_least
        saved = steps
