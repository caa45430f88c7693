"""An unchanged script gets a loss scale by environment. All of it runs in subprocesses."""

from __future__ import annotations

import pytest
from environments import FLOAT16

LOSS_SCALING = {"TF_ENABLE_AUTO_MIXED_PRECISION_LOSS_SCALING": "1"}
# What the .pth file of an installed tf_amp does at the start of Python.
START = """
import sys, logging
import tf_amp.autoload
tf_amp.autoload.activate()
"""
KERAS_SCRIPT = """
import numpy as np
import tensorflow as tf
import {library} as keras
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 4)).astype("float32")
y = x[:, :2] * 3
def build():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, "relu"),
                              keras.layers.Dense(2)])
    return model
model = build()
model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
loss = model.fit(x, y, batch_size=16, epochs=3, verbose=0, shuffle=False).history
"""
REPORT = """
print(type(model.optimizer).__module__.split(".")[0], sorted(loss), round(loss["loss"][-1], 5))
"""


def run(run_python, script: str, env: dict[str, str]):
    return run_python(START + script, env=env)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_compile_and_fit(run_forked, library: str) -> None:
    script = KERAS_SCRIPT.format(library=library) + REPORT
    off = run(run_forked, script, {})
    on = run(
        run_forked,
        script
        + """
from tf_amp.loss_scale import is_wrapped, manager_of, wrap_optimizer
optimizer = model.optimizer
manager = manager_of(optimizer)
state = manager.state()
print(state.scale, state.good_steps, state.skipped_steps)
import tf_amp
print(tf_amp.status()["loss_scale"]["managers"])

# A second compile with the same optimizer keeps its scale.
model.compile(optimizer, "mse")
print("same", model.optimizer is optimizer, manager_of(optimizer) is manager)
try:
    wrap_optimizer(optimizer)
except ValueError as error:
    print("twice", "scales the loss already" in str(error))

# One that the user wrapped, with either library, is left alone.
mine = wrap_optimizer(keras.optimizers.SGD())
model.compile(mine, "mse")
theirs = (keras.optimizers if hasattr(keras.optimizers, "LossScaleOptimizer")
          else keras.mixed_precision).LossScaleOptimizer(keras.optimizers.SGD())
print("mine", model.optimizer is mine)
model.compile(theirs, "mse")
print("theirs", model.optimizer is theirs, manager_of(theirs))
model.fit(x, y, verbose=0)

# A mixed_float16 policy: the library scales as it always does, and nobody else.
half = build()
setattr(half, "dtype_policy" if hasattr(half, "dtype_policy") and not hasattr(half, "_dtype_policy")
        else "_dtype_policy",
        (getattr(keras, "DTypePolicy", None) or keras.mixed_precision.Policy)("mixed_float16"))
half.compile(keras.optimizers.SGD(), "mse")
print("policy", type(half.optimizer).__module__.split(".")[0], manager_of(half.optimizer),
      is_wrapped(half.optimizer), is_wrapped(half.optimizer.inner_optimizer))

# A NaN batch is skipped; the model stays finite.
bad = x.copy(); bad[3] = np.nan
model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=True)
model.fit(bad, y, batch_size=16, verbose=0, shuffle=False)
print("skipped", manager_of(model.optimizer).state().skipped_steps,
      all(np.isfinite(w).all() for w in model.get_weights()))

import tf_amp.loss_scale.auto_wrap as auto_wrap
auto_wrap.uninstall()
model.compile(keras.optimizers.SGD(), "mse")
print("off", manager_of(model.optimizer))
""",
        LOSS_SCALING,
    )
    first, *lines = on.stdout.strip().split("\n")
    assert off.stdout.strip().split(" ", 1)[0] == library
    # The same class of optimizer, the same losses and log keys.
    assert first == off.stdout.strip()
    assert lines == [
        "32768.0 12 0",
        "1",
        "same True True",
        "twice True",
        "mine True",
        "theirs True None",
        f"policy {library} None True False",
        "skipped 1 True",
        "off None",
    ]
    assert "the optimizer Adam of compile() scales its loss by a dynamic loss scale (" in on.stderr
    assert "scales the loss, and tf_amp leaves it alone" in on.stderr
    assert "A custom training loop" not in on.stderr


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_models_of_one_kind_share_a_line(run_forked, library: str) -> None:
    script = """
for optimizer in (keras.optimizers.Adam(), keras.optimizers.SGD()):
    model = build()
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(x, y, verbose=0)
"""
    done = run(run_forked, KERAS_SCRIPT.format(library=library) + script, LOSS_SCALING)
    lines = [line for line in done.stderr.splitlines() if "of compile() scales its loss" in line]
    assert ["Adam" in line for line in lines] == [True, False]
    assert "SGD" in lines[1]


REWRITE = {
    "TF_ENABLE_AUTO_MIXED_PRECISION": "1",
    "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_IGNORE_PERFORMANCE": "1",
}
DTYPE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DTYPE"
ENVIRONMENTS = [
    ({"TF_ENABLE_AUTO_MIXED_PRECISION_LOSS_SCALING": "0"}, False),
    (LOSS_SCALING, True),
    ({**REWRITE, DTYPE: "bfloat16"}, False),
    ({**REWRITE, **LOSS_SCALING, DTYPE: "bfloat16"}, True),
    ({**REWRITE, DTYPE: "float16"}, True),
]


def test_which_variables_wrap(run_forked) -> None:
    """Off for bfloat16 unless asked for."""
    done = run_forked(
        f"""
        import tensorflow as tf, keras
        from tf_amp import installation
        from tf_amp.env_config import read_settings
        from tf_amp.loss_scale import is_wrapped
        for env in {[env for env, _ in ENVIRONMENTS]!r}:
            installation.install(read_settings(env), source="environment")
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
            model.compile("adam", "mse")
            print("RESULT", is_wrapped(model.optimizer))
            installation.uninstall()
        """
    )
    assert rows(done.stdout) == [f"RESULT {wrapped}" for _, wrapped in ENVIRONMENTS]


V1_SCRIPT = """
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
class Decayed(tf.train.GradientDescentOptimizer):
    "A class with an apply_gradients of its own, as BERT's optimizer."
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        updates = [v.assign_sub(0.1 * (g + 0.01 * v)) for g, v in grads_and_vars]
        if global_step is not None:
            updates.append(global_step.assign_add(1))
        return tf.group(*updates, name=name)

def train(make, loop):
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [])
        v = tf.get_variable("v", initializer=[1.0, 2.0])
        step = tf.train.get_or_create_global_step()
        op = loop(make(), tf.reduce_sum(v * x), v, step)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for value in XS:
                session.run(op, {x: value})
            scale = [w for w in tf.global_variables() if w.op.name.endswith("/scale")]
            return (session.run(v).round(4).tolist(), int(session.run(step)),
                    [float(s) for s in session.run(scale)])
def by_minimize(optimizer, loss, v, step):
    return optimizer.minimize(loss, global_step=step)
def by_pair(optimizer, loss, v, step):
    pairs = optimizer.compute_gradients(loss)
    clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], 0.5)
    return optimizer.apply_gradients(zip(clipped, [v]), global_step=step)
def by_hand(optimizer, loss, v, step):
    return optimizer.apply_gradients(zip(tf.gradients(loss, [v]), [v]), global_step=step)
adam = lambda: tf.train.AdamOptimizer(0.1)
for name, make in (("adam", adam), ("decayed", lambda: Decayed(0.1))):
    for loop in (by_minimize, by_pair):
        print("RESULT", name, loop.__name__, train(make, loop))
"""


def rows(stdout: str) -> list[str]:
    return [line for line in stdout.split("\n") if line.startswith("RESULT")]


def test_v1_minimize_and_gradient_pairs(run_forked) -> None:
    on = run(run_forked, V1_SCRIPT.replace("XS", "(1.0, float('nan'), 2.0, 0.5)"), LOSS_SCALING)
    off = run(run_forked, V1_SCRIPT.replace("XS", "(1.0, 2.0, 0.5)"), {})
    ours, theirs = rows(on.stdout), rows(off.stdout)
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        # Weights and global_step are those of float32 without the NaN; the scale fell once.
        assert a == b.replace("[])", "[16384.0])")
    assert "the optimizer AdamOptimizer is wrapped" in on.stderr


def test_v1_optimizers_made_of_optimizers_scale_once(run_forked) -> None:
    done = run(
        run_forked,
        """
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
class Averaging(tf.train.Optimizer):
    "Hands everything to another optimizer, as MovingAverageOptimizer and Horovod's do."
    def __init__(self, optimizer):
        super().__init__(False, "Averaging")
        self._optimizer = optimizer
    def compute_gradients(self, *args, **kwargs):
        return self._optimizer.compute_gradients(*args, **kwargs)
    def apply_gradients(self, *args, **kwargs):
        return self._optimizer.apply_gradients(*args, **kwargs)
seen = []
@tf.custom_gradient
def spy(y):
    def grad(upstream):
        seen.append(upstream)
        return upstream
    return tf.identity(y), grad
from tf_amp.loss_scale import wrap_optimizer
for by_hand in (False, True):
    with tf.Graph().as_default(), tf.Session() as session:
        v = tf.get_variable("v", initializer=1.0)
        optimizer = Averaging(tf.train.GradientDescentOptimizer(0.25))
        if by_hand:
            optimizer = wrap_optimizer(optimizer, 64.0)
        op = optimizer.minimize(spy(v * 1.0))
        session.run(tf.global_variables_initializer())
        upstream = float(session.run(seen[-1]))
        session.run(op)
        scales = [w.op.name for w in tf.global_variables() if w.op.name.endswith("/scale")]
        print("RESULT", upstream, float(session.run(v)), scales)
""",
        LOSS_SCALING,
    )
    assert rows(done.stdout) == [
        "RESULT 32768.0 0.75 ['loss_scale/scale']",
        "RESULT 64.0 0.75 ['loss_scale/scale']",
    ]


def test_v1_optimizers_that_tensorflow_scales_are_left_to_it(run_forked) -> None:
    done = run(
        run_forked,
        """
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
from tensorflow.python.training.experimental import loss_scale, loss_scale_optimizer
x = tf.placeholder(tf.float32, [])
v = tf.get_variable("v", initializer=1.0)
inner = tf.train.GradientDescentOptimizer(0.25)
scale = loss_scale.DynamicLossScale(initial_loss_scale=64.0)
optimizer = loss_scale_optimizer.MixedPrecisionLossScaleOptimizer(inner, scale)
op = optimizer.minimize(v * x)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for value in (1.0, float("nan"), 1.0):
        session.run(op, {x: value})
    print("RESULT", float(session.run(v)), float(session.run(scale())))
print("RESULT", tf.get_collection("tf_amp_loss_scale"))
""",
        LOSS_SCALING,
    )
    assert rows(done.stdout) == ["RESULT 0.5 32.0", "RESULT []"]
    assert "wrapped" not in done.stderr
    assert "scale_loss" not in done.stderr


KERAS_IN_A_V1_GRAPH = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import numpy as np
import tensorflow as tf
tf.config.list_physical_devices("GPU")
tf.compat.v1.disable_eager_execution()
def made(optimizer="adam"):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, input_shape=(2,))])
    model.compile(optimizer, "mse")
    return model
model = made()
model.set_weights([np.ones((2, 1), "float32")])
x = np.array([VALUES, VALUES], "float32").T
model.fit(x, np.zeros(len(x)), batch_size=1, epochs=2, shuffle=False, verbose=0)
model.optimizer.learning_rate = 0.002
model.train_on_batch(x[:1], np.zeros(1))
optimizer = model.optimizer
print("RESULT", [round(float(value), 5) for value in model.get_weights()[0].ravel()])
print("RESULT", int(tf.keras.backend.get_value(optimizer.iterations)),
      isinstance(optimizer, tf.keras.optimizers.legacy.Adam),
      [weight.name for weight in optimizer.weights])
print("SCALE", [float(tf.keras.backend.get_value(v))
                for v in tf.compat.v1.global_variables("loss_scale/")[:3]])
class Clipping(tf.keras.optimizers.legacy.SGD):
    "Clips where it computes gradients."
    def get_gradients(self, loss, params):
        return [tf.clip_by_norm(g, 0.05) for g in super().get_gradients(loss, params)]
class OwnGradients(tf.keras.optimizers.legacy.SGD):
    def get_gradients(self, loss, params):
        return [tf.clip_by_norm(g, 0.05) for g in tf.compat.v1.gradients(loss, params)]
for optimizer in (Clipping(0.1), OwnGradients(0.1)):
    model = made(optimizer)
    model.set_weights([np.ones((2, 1), "float32")])
    model.train_on_batch(np.ones((1, 2)), np.zeros(1))
    print("RESULT", [round(float(value), 5) for value in model.get_weights()[0].ravel()])
"""


def test_fit_of_tf_keras_in_a_v1_graph(run_forked) -> None:
    on = run(run_forked, KERAS_IN_A_V1_GRAPH.replace("VALUES", "[1, np.nan, 2]"), LOSS_SCALING)
    off = run(run_forked, KERAS_IN_A_V1_GRAPH.replace("VALUES", "[1, 2]"), {})
    assert rows(on.stdout) == rows(off.stdout)
    assert "SCALE [8192.0, 2.0, 2.0]" in on.stdout
    assert "the optimizer Clipping of compile() scales its loss" in on.stderr
    assert on.stderr.count("of compile() computes gradients by a method of its own") == 1
    assert "the optimizer OwnGradients" not in on.stderr
    assert "custom training loop" not in on.stderr


UPDATES_IN_A_V1_GRAPH = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import numpy as np
import tensorflow as tf
tf.compat.v1.disable_eager_execution()
legacy, backend = tf.keras.optimizers.legacy, tf.keras.backend
class Counting(legacy.SGD):
    def get_updates(self, loss, params):
        return list(super().get_updates(loss, params)) + [backend.update_add(counter, 1.0)]
class Delegating(legacy.Optimizer):
    "Has no way to apply gradients itself."
    def __init__(self, optimizer):
        super().__init__("delegating")
        self.optimizer = optimizer
    def get_updates(self, params, loss):
        return self.optimizer.get_updates(params=params, loss=loss)
class ByHand:
    "What trains without compile."
    def __init__(self, model, optimizer):
        loss = backend.mean(backend.square(model.output))
        updates = optimizer.get_updates(params=model.trainable_weights, loss=loss)
        self.run = backend.function([model.input], [loss], updates=updates)
    def train_on_batch(self, x, y):
        self.run([x])
for name in ("counting", "delegating", "by hand", "counting by hand"):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, input_shape=(2,))])
    model.set_weights([np.ones((2, 1), "float32")])
    counter = backend.variable(0.0)
    optimizer = Counting(0.1) if "counting" in name else legacy.SGD(0.1)
    trained = model
    if "hand" in name:
        trained = ByHand(model, optimizer)
    else:
        model.compile(Delegating(optimizer) if name == "delegating" else optimizer, "mse")
    for value in VALUES:
        trained.train_on_batch(np.full((1, 2), value, "float32"), np.zeros(1))
    print("RESULT", name, [round(float(value), 5) for value in model.get_weights()[0].ravel()])
    print("COUNT", backend.get_value(counter))
"""


def test_updates_of_tf_keras_in_a_v1_graph(run_forked) -> None:
    on = run(run_forked, UPDATES_IN_A_V1_GRAPH.replace("VALUES", "[1, np.nan, 2]"), LOSS_SCALING)
    off = run(run_forked, UPDATES_IN_A_V1_GRAPH.replace("VALUES", "[1, 2]"), {})
    assert rows(on.stdout) == rows(off.stdout)
    counts = [line for line in on.stdout.splitlines() if line.startswith("COUNT")]
    assert counts == ["COUNT 3.0", "COUNT 0.0", "COUNT 0.0", "COUNT 3.0"]
    for said in ("Counting of compile()", "SGD of get_updates()", "Counting of get_updates()"):
        assert on.stderr.count(f"the optimizer {said} scales its loss") == 1
    assert "Delegating" not in on.stderr
    assert "custom training loop" not in on.stderr


V1_OPTIMIZER_IN_TF_KERAS = """
import numpy as np
import tensorflow as tf
import tf_keras
if MODE == "graph":
    tf.compat.v1.disable_eager_execution()
enable = lambda optimizer: optimizer
if CALLS:
    import tf_amp
    enable = tf_amp.enable_mixed_precision_graph_rewrite
x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
tf_keras.utils.set_random_seed(1)
def train(optimizer):
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(4,))])
    model.compile(optimizer, "mse", run_eagerly=MODE == "eager")
    for factor in ROWS:
        model.fit(factor * x, x[:, :1], epochs=2, batch_size=8, verbose=0, shuffle=False)
    weights = [round(float(w), 4) for w in np.concatenate([v.ravel() for v in model.get_weights()])]
    print("ROW", weights, int(tf_keras.backend.get_value(model.optimizer.iterations)))
adam = enable(tf.compat.v1.train.AdamOptimizer(0.05))
train(adam)
train(adam)
train(enable(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)))
"""


@pytest.mark.parametrize("calls", [False, True], ids=["variable", "call"])
@pytest.mark.parametrize("mode", ["function", "eager", "graph"])
def test_v1_optimizers_in_compile_of_tf_keras_scale(run_forked, mode: str, calls: bool) -> None:
    script = V1_OPTIMIZER_IN_TF_KERAS.replace("MODE", repr(mode))
    to_scale = script.replace("CALLS", str(calls)).replace("ROWS", "[1, np.nan, 2]")
    float16 = {**FLOAT16, "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD": "MatMul"}
    float16["TF_ENABLE_AUTO_MIXED_PRECISION"] = "0"
    on = run(run_forked, to_scale, float16 if calls else LOSS_SCALING)
    off = run(run_forked, script.replace("CALLS", "False").replace("ROWS", "[1, 2]"), {})
    assert rows(on.stdout) == rows(off.stdout)
    for name in ("AdamOptimizer", "MomentumOptimizer"):
        line = f"Loss scaling: the optimizer {name} is wrapped"
        assert on.stderr.count(line) == (not calls)
    assert "could not be given" not in on.stderr
    assert "leaves it alone" not in on.stderr
    assert "WARNING: A custom training loop" not in on.stderr
    assert "without loss scaling" not in on.stderr
    assert "Skipped step" in on.stderr


def test_v1_saver_restores_a_float32_checkpoint(run_forked, tmp_path) -> None:
    """One script, run in turn without and with loss scaling, each time going on from its file."""
    done = run_forked(
        """
        import sys
        import tensorflow.compat.v1 as tf
        tf.disable_eager_execution()
        from tf_amp.loss_scale import auto_wrap
        path = sys.argv[1] + "/ckpt"
        for scaled in (False, True, False, True):
            if scaled:
                auto_wrap.install(wraps=True)
            with tf.Graph().as_default():
                v = tf.get_variable("v", initializer=1.0)
                op = tf.train.AdamOptimizer(0.25).minimize(v)
                saver = tf.train.Saver()
                with tf.Session() as session:
                    session.run(tf.global_variables_initializer())
                    if tf.io.gfile.exists(path + ".index"):
                        saver.restore(session, path)
                    session.run(op)
                    saver.save(session, path)
                    print("RESULT", round(float(session.run(v)), 4), len(tf.global_variables()))
            auto_wrap.uninstall()
        """,
        args=(str(tmp_path),),
    )
    assert rows(done.stdout) == ["RESULT 0.75 5", "RESULT 0.5 9", "RESULT 0.25 5", "RESULT 0.0 9"]


def test_a_v1_saver_without_a_session_restores_eagerly(run_forked, tmp_path) -> None:
    done = run(
        run_forked,
        f"""
import tensorflow as tf
v = tf.Variable(1.0, name="v")
saver = tf.compat.v1.train.Saver([v])
path = saver.save(sess=None, save_path={str(tmp_path / "ckpt")!r})
v.assign(2.0)
saver.restore(sess=None, save_path=path)
print("RESULT", float(v))
""",
        LOSS_SCALING,
    )
    assert rows(done.stdout) == ["RESULT 1.0"]


def test_a_fixed_scale_of_keras_is_left_alone(run_forked) -> None:
    done = run_forked(
        START
        + """
import numpy as np, keras, tensorflow as tf
from tf_amp.loss_scale import is_wrapped, manager_of
x = np.ones((64, 4), "float32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
fixed = keras.optimizers.SGD(0.01, loss_scale_factor=128.0)
model.compile(fixed, "mse")
model.fit(x, x, batch_size=16, verbose=0)
print("RESULT", is_wrapped(fixed), manager_of(fixed), int(fixed.iterations.numpy()))
@tf.function
def step(optimizer):
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_mean((model(x) - x) ** 2))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
step(keras.optimizers.SGD(0.01, loss_scale_factor=128.0))
print("LOOP", file=sys.stderr, flush=True)
# This one multiplies, and scales nothing.
model.compile(keras.optimizers.SGD(0.01, loss_scale_factor=1.0), "mse")
print("RESULT", manager_of(model.optimizer) is not None)
""",
        LOSS_SCALING,
    )
    assert rows(done.stdout) == ["RESULT True None 4", "RESULT True"]
    told = done.stderr.split("LOOP")[0]
    assert "The SGD of compile() scales the loss, and tf_amp leaves it alone" in told
    assert "A custom training loop" not in told


def test_custom_loops_are_told_once(run_forked) -> None:
    done = run(
        run_forked,
        """
import tensorflow as tf, keras, tf_keras
v, k = tf.Variable(1.0), keras.Variable(1.0)
optimizers = (
    (keras.optimizers.SGD(0.1), k),
    (tf_keras.optimizers.SGD(0.1), v),
    (tf_keras.optimizers.legacy.SGD(0.1), v),
    (tf.compat.v1.train.GradientDescentOptimizer(0.1), v),
)
def step():
    for optimizer, variable in optimizers:
        optimizer.apply_gradients([(tf.constant(1.0), variable)])
step()
print("EAGER", file=sys.stderr, flush=True)
for _ in range(2):
    tf.function(step)()
# None of these is a loop that needs to be told.
from tf_amp.loss_scale import wrap_optimizer
for optimizer in (
    wrap_optimizer(keras.optimizers.Adam(0.1)),
    keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad(0.1)),
):
    optimizer.apply([optimizer.scale_loss(tf.constant(1.0))], [k])
print("RESULT", round(float(v), 4), round(float(k.numpy()), 1))
""",
        LOSS_SCALING,
    )
    eager, traced = done.stderr.split("EAGER")
    # What runs eagerly is not converted.
    assert "A custom training loop" not in eager
    told = [line for line in traced.split("\n") if "A custom training loop" in line]
    # Once for each library, whichever of its optimizers it was.
    assert len(told) == 3
    assert all("wrap_optimizer(optimizer)" in line for line in told)
    assert "RESULT 0.1 " in done.stdout


def test_hooks_come_off_and_go_on_again(run_forked) -> None:
    done = run_forked(
        """
        import tensorflow as tf, keras, tf_keras
        from tf_keras.src.mixed_precision import loss_scale_optimizer as theirs
        from tf_amp.loss_scale import auto_wrap
        owners = [
            (keras.Model, "compile"), (keras.Model, "fit"), (keras.optimizers.Optimizer, "apply"),
            (keras.optimizers.LossScaleOptimizer, "apply"),
            (keras.optimizers.LossScaleOptimizer, "scale_loss"),
            (keras.optimizers.Optimizer, "scale_loss"),
            (tf_keras.Model, "compile"), (tf_keras.Model, "fit"),
            (tf_keras.optimizers.Optimizer, "apply_gradients"),
            (tf_keras.optimizers.legacy.Optimizer, "apply_gradients"),
            (theirs.LossScaleOptimizer, "get_scaled_loss"),
            (theirs.LossScaleOptimizerV3, "get_scaled_loss"),
            (tf.compat.v1.train.Optimizer, "__init__"),
            (tf.compat.v1.train.Optimizer, "compute_gradients"),
            (tf.compat.v1.train.Optimizer, "apply_gradients"),
            (tf.compat.v1.train.Saver, "restore"),
        ]
        now = lambda: [getattr(cls, name) for cls, name in owners]
        originals = now()
        for wanted in (True, False, True):
            assert auto_wrap.install(wraps=wanted) is None
            hooked = now()
            auto_wrap.install(wraps=wanted)
            assert now() == hooked
            changed = [name for (cls, name), a, b in zip(owners, originals, hooked) if a is not b]
            assert len(changed) == (len(owners) if wanted else 2), changed
            auto_wrap.uninstall()
            auto_wrap.uninstall()
            assert now() == originals
        # What a compile() replaced comes off too, and a patch that others made since stays on.
        auto_wrap.install(wraps=True)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        theirs = lambda *args, **kwargs: None
        keras.Model.fit = theirs
        auto_wrap.uninstall()
        assert keras.Model.fit is theirs
        assert now()[2:] == originals[2:]
        assert model.train_step.__func__.__module__.startswith("keras.")
        assert keras.optimizers.Adam.scale_loss.__module__.startswith("keras.")
        print("fine")
        """
    )
    assert done.stdout == "fine\n"


def test_classes_made_in_a_function_go(run_forked) -> None:
    done = run(
        run_forked,
        """
import gc, weakref
import numpy as np
import tensorflow as tf, keras
def train():
    class Mine(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)
    class Slower(keras.optimizers.SGD):
        pass
    model = Mine([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(Slower(0.1), "mse", jit_compile=False)
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    print("RESULT", sys.modules["tf_amp"].status().loss_scale["managers"])
    return weakref.ref(Mine), weakref.ref(Slower)
kept = train()
keras.utils.clear_session()
gc.collect()
gc.collect()
print("RESULT", kept[0](), kept[1]())
""",
        {**REWRITE, DTYPE: "float16"},
    )
    assert rows(done.stdout) == ["RESULT 1", "RESULT None None"]


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_what_compiled_before_the_hooks_went_off_and_on_scales(run_forked, library: str) -> None:
    """`compile` of a class with a step of its own too; while they are off nothing is scaled."""
    done = run(
        run_forked,
        KERAS_SCRIPT.format(library=library)
        + """
import tf_amp
from tf_amp.loss_scale import manager_of
class Mine(keras.Sequential):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
            scaled = self.optimizer.scale_loss(loss) if keras.__name__ == "keras" else loss
        if keras.__name__ == "keras":
            gradients = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        else:
            self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}
def compiled(cls):
    model = cls([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    return model
def good_steps(models):
    for model in models:
        model.fit(0.1 * x, 0.1 * y, batch_size=16, verbose=0)  # no step overflows
    return [manager_of(model.optimizer).state().good_steps for model in models]
models = [[compiled(keras.Sequential), compiled(Mine)] for _ in range(3)]
rule = tf_amp.Rule(action="keep_float32", op="Softmax", why="test")
tf_amp.enable_mixed_precision_graph_rewrite(rules=[rule])
print("RESULT", good_steps(models[0]))
tf_amp.disable_mixed_precision_graph_rewrite()
print("RESULT", good_steps(models[1]))
tf_amp.enable_mixed_precision_graph_rewrite()
print("RESULT", good_steps(models[2]))
""",
        {**REWRITE, DTYPE: "float16"},
    )
    assert rows(done.stdout) == ["RESULT [4, 4]", "RESULT [0, 0]", "RESULT [4, 4]"]
    assert "not scaled" not in done.stderr


def test_a_library_that_is_not_as_expected_is_named(run_forked) -> None:
    done = run_forked(
        """
        import tensorflow as tf, keras
        class Model: pass
        keras.Model = Model
        from tf_amp.loss_scale import auto_wrap
        print(auto_wrap.install(wraps=True))
        """
    )
    assert "cannot hook Keras" in done.stdout
    assert "not as expected" in done.stderr


IMPORT_ORDER = """
import sys
import tf_amp.autoload
tf_amp.autoload.activate()
first = sys.argv[1]
library = __import__(first)  # imports TensorFlow, which switches AMP on in the middle of this
import numpy as np
import tf_amp
model = library.Sequential([library.layers.Input((4,)), library.layers.Dense(2)])
model.compile(library.optimizers.SGD(0.01), loss="mse")
model.fit(np.zeros((4, 4), "f4"), np.zeros((4, 2), "f4"), verbose=0)
print(type(model.optimizer).__name__, tf_amp.status()["loss_scale"]["loss_scales"])
"""


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_a_library_imported_before_tensorflow_is_hooked(run_python, library: str) -> None:
    env = FLOAT16
    done = run_python(IMPORT_ORDER, env, args=(library,))
    assert done.stdout.startswith("SGD [{")
    assert "'good_steps': 1" in done.stdout


def test_tf_keras_under_the_name_of_keras(run_forked) -> None:
    """As programs have it that use a library made for Keras 2."""
    script = """
import sys
import tf_keras
sys.modules["keras"] = tf_keras
import tensorflow as tf
w = tf.Variable(1.0)
optimizer = tf_keras.optimizers.Adam()
optimizer.apply_gradients([(tf.constant(1.0), w)])
print("updated", float(w) < 1.0)
"""
    assert "updated True" in run(run_forked, script, LOSS_SCALING).stdout
