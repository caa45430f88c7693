"""An unchanged script finds the optimizer that it made, and everything it does with it goes on.

Each script prints what it sees, once without and once with loss scaling; both must print the same.
All of it runs in subprocesses.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HEAD = """
import copy, pickle, sys
import numpy as np
import tensorflow as tf
library, opts, directory, scaled = sys.argv[1:]
keras = __import__(library)
optimizers = keras.optimizers.legacy if opts == "legacy" else keras.optimizers
if scaled == "scaled":
    from tf_amp.loss_scale import auto_wrap, manager_of
    assert auto_wrap.install(wraps=True) is None
else:
    manager_of = lambda optimizer: None
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = x[:, :2] * 3
def build(cls=keras.Sequential):
    keras.utils.set_random_seed(0)
    model = cls([keras.layers.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    return model
def fit(model, epochs=2, **kwargs):
    history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=False, **kwargs)
    return [round(loss, 4) for loss in history.history["loss"]]
def train(optimizer, cls=keras.Sequential, callbacks=(), **compiled):
    model = build(cls)
    model.compile(optimizer, "mse", **{"jit_compile": False, **compiled})
    return model, fit(model, callbacks=list(callbacks))
def plain(value):
    value = getattr(value, "numpy", lambda: value)()
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else str(value)
def names(optimizer):
    found = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return sorted(getattr(v, "path", v.name) for v in found)
def show(*what):
    print("RESULT", *what)
def scaled_steps(optimizer):
    "For scripts with loss scaling: how many steps its scale has seen."
    manager = manager_of(optimizer)
    print("AMP", None if manager is None else manager.state().good_steps)
"""

SAME_OBJECT = """
optimizer = optimizers.Adam(0.01)
model, losses = train(optimizer)
show(model.optimizer is optimizer, type(optimizer), isinstance(optimizer, optimizers.Adam), losses)
show(plain(optimizer.beta_1), plain(optimizer.learning_rate), plain(optimizer.iterations))
show(plain(optimizer.get_config()), names(optimizer))
show(optimizer.from_config(optimizer.get_config()).get_config() == optimizer.get_config())
show(keras.optimizers.serialize(optimizer)["class_name"], type(keras.optimizers.get(optimizer)))
scaled_steps(optimizer)
for what in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
    for one in (optimizer, model):
        try:
            copied = what(one)
            show(type(copied))
            # A copy is scaled as well, or as new.
            model_of_copy, losses = train(getattr(copied, "optimizer", copied))
            show(losses)
            scaled_steps(model_of_copy.optimizer)
        except Exception as error:
            show(type(error))
# Another one of its class is made without a scale, and gets its own.
made = type(optimizer)(0.02)
show(type(made), made is optimizer, plain(made.learning_rate), train(made)[1])
scaled_steps(made)
# A subclass of its class is one of the class that it was made with.
class Louder(type(optimizer)):
    def __init__(self, learning_rate):
        super().__init__(2 * learning_rate)
louder = Louder(0.01)
show(Louder.__mro__[1:], type(louder), plain(louder.learning_rate), train(louder)[1])
scaled_steps(louder)
# A second compile with the same optimizer keeps it, and its scale.
model.compile(optimizer, "mse", jit_compile=True)
show(model.optimizer is optimizer, fit(model), plain(optimizer.iterations))
scaled_steps(optimizer)
"""

FILES = """
optimizer = optimizers.Adam(0.01)
model, _ = train(optimizer)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
model.save(directory + "/file.keras")
model.save_weights(directory + "/file.weights.h5")
formats = [".keras"]
if library == "tf_keras":
    formats += [".h5", ""]
    model.save(directory + "/file.h5")
    model.save(directory + "/file")
path = checkpoint.save(directory + "/checkpoint")
def go_on(source, scales=True):
    for suffix in formats:
        again = keras.models.load_model(source + "/file" + suffix)
        show(suffix, type(again.optimizer), plain(again.optimizer.get_config()), fit(again))
    for order in ("restored and compiled", "compiled and restored"):
        model, optimizer = build(), optimizers.Adam(0.01)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        if order == "compiled and restored":
            model.compile(optimizer, "mse", jit_compile=False)
        status = checkpoint.restore(tf.train.latest_checkpoint(source))
        if order == "restored and compiled":
            model.compile(optimizer, "mse", jit_compile=False)
        losses = fit(model)
        status.expect_partial()
        show(order, losses, plain(optimizer.iterations))
        if scales:
            scaled_steps(optimizer)
go_on(directory)
# What the script wrote when it ran without loss scaling goes on with it, and the other way round.
go_on(directory.replace("/scaled", "/plain"))
if scaled == "scaled":
    auto_wrap.uninstall()
go_on(directory, False)
if scaled == "scaled":
    assert auto_wrap.install(wraps=True) is None
"""

CALLBACKS = """
schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
plateau = lambda: keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=1e9)
backup = keras.callbacks.BackupAndRestore(directory + "/backup" + scaled)
logs = keras.callbacks.CSVLogger(directory + "/log.csv")
optimizer = optimizers.SGD(0.1)
model, losses = train(optimizer, callbacks=[schedule, plateau(), backup, logs])
show(losses, plain(optimizer.learning_rate), open(directory + "/log.csv").readline())
scaled_steps(optimizer)
if hasattr(keras.optimizers, "MultiOptimizer"):
    inner = {"dense": keras.optimizers.SGD(0.1)}
    for callback in (schedule, plateau()):
        by_name = {".*kernel": keras.optimizers.SGD(0.1)}
        by_name = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), by_name)
        optimizer = keras.optimizers.MultiOptimizer(by_name)
        model, losses = train(optimizer, callbacks=[callback])
        show(losses, [round(float(plain(one.learning_rate)), 6) for one in optimizer.optimizers])
        scaled_steps(optimizer)
"""

SETTINGS = """
if opts == "legacy":
    settings = [dict(clipnorm=0.05), dict(global_clipnorm=0.05), dict(clipvalue=0.01)]
else:
    settings = [dict(weight_decay=0.1), dict(clipnorm=0.05), dict(global_clipnorm=0.05),
                dict(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)]
if library == "keras":
    settings += [dict(gradient_accumulation_steps=2), dict(loss_scale_factor=8.0)]
for setting in settings:
    optimizer = optimizers.SGD(0.05, momentum=0.9, **setting)
    model, losses = train(optimizer)
    show(setting, losses, names(optimizer), plain(optimizer.iterations))
    if "loss_scale_factor" not in setting:  # that is a loss scale of its own
        scaled_steps(optimizer)
rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
for compiled in (dict(jit_compile=True), dict(run_eagerly=True), dict(steps_per_execution=2)):
    model, losses = train(optimizers.SGD(rate), **compiled)
    show(compiled, losses)
    scaled_steps(model.optimizer)
"""

# What people write: a step of their own, an optimizer of their own, a loop after `fit`.
OWN_CODE = """
print("OWN CODE", file=sys.stderr, flush=True)
class OwnStep(keras.Sequential):
    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(inputs, training=True) - targets) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}
model, losses = train(optimizers.SGD(0.05), OwnStep)
show("own step", losses)

class OwnScaledStep(keras.Sequential):
    "As the notice says: in float32 too."
    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(inputs, training=True) - targets) ** 2)
            if library == "keras":
                scaled_loss = self.optimizer.scale_loss(loss)
        if library == "keras":
            gradients = tape.gradient(scaled_loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        else:
            self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}
model, losses = train(optimizers.SGD(0.05), OwnScaledStep)
show("own scaled step", losses)
scaled_steps(model.optimizer)

class Around(keras.Sequential):
    def train_step(self, data):
        logs = super().train_step(data)
        # A second update, of a loss that is not scaled.
        with tf.GradientTape() as tape:
            penalty = tf.add_n([tf.reduce_sum(one ** 2) for one in self.trainable_variables])
        gradients = tape.gradient(penalty, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"penalty": penalty, **logs}
model, losses = train(optimizers.SGD(0.05), Around)
show("step around a step", losses)
scaled_steps(model.optimizer)

class Clipping(optimizers.SGD):
    "Its apply_gradients must get what it gets in float32."
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        pairs = [(tf.clip_by_norm(g, 0.05), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs, *args, **kwargs)
model, losses = train(Clipping(0.5))
show("own optimizer", losses, type(model.optimizer).__qualname__)
scaled_steps(model.optimizer)

@keras.utils.register_keras_serializable("mine")
class Mine(optimizers.SGD):
    pass
model, losses = train(Mine(0.05))
show("registered", losses, keras.utils.serialize_keras_object(model.optimizer)["registered_name"])
model.save(directory + "/mine" + opts + ".keras")
show(type(keras.models.load_model(directory + "/mine" + opts + ".keras").optimizer))

# Both kinds of loop with the optimizer that fit has used: nothing is scaled, nothing unscaled.
def own_loop(model):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
for eagerly in (True, False):
    model, losses = train(optimizers.SGD(0.05), run_eagerly=eagerly)
    step = own_loop if eagerly else tf.function(own_loop)
    show("own loop", losses, [round(float(step(model)), 4) for _ in range(4)])
if library == "keras":
    # scale_loss and apply in different functions: legal for a plain optimizer.
    model, losses = train(optimizers.SGD(0.05))
    @tf.function
    def half():
        with tf.GradientTape() as tape:
            loss = model.optimizer.scale_loss(tf.reduce_mean((model(x) - y) ** 2))
        return tape.gradient(loss, model.trainable_variables)
    for _ in range(3):
        model.optimizer.apply(half(), model.trainable_variables)
    show("halves", [round(float(w.sum()), 4) for w in model.get_weights()])

    class Watching(optimizers.SGD):
        "Reads the variables when it is built: a model without an Input has them in its first step."
        def build(self, variables):
            super().build(variables)
            self.starts = [self.add_variable_from_reference(v, name="start") for v in variables]
            for start, variable in zip(self.starts, variables):
                start.assign(variable)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    model.compile(Watching(0.05), "mse", jit_compile=False)
    show("model without an Input", fit(model))
    scaled_steps(model.optimizer)
"""

SCRIPT = "\n".join([HEAD, SAME_OBJECT, FILES, CALLBACKS, SETTINGS, OWN_CODE])


def lines(done, prefix: str) -> list[str]:
    return [line for line in done.stdout.split("\n") if line.startswith(prefix)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "opts"), [("keras", "new"), ("tf_keras", "new"), ("tf_keras", "legacy")]
)
def test_a_script_sees_the_same(run_python, tmp_path: Path, library: str, opts: str) -> None:
    def run(scaled: str):
        (tmp_path / scaled).mkdir()
        args = (library, opts, str(tmp_path / scaled), scaled)
        return run_python(SCRIPT, args=args, timeout=600)

    plain, scaled = run("plain"), run("scaled")
    assert lines(scaled, "RESULT") == lines(plain, "RESULT")
    # The loss was scaled all the same, and no loop was said to be a custom one that is none.
    steps = lines(scaled, "AMP")
    assert len(steps) > 10
    assert not [line for line in steps if line in ("AMP None", "AMP 0")]
    told, of_own_code = scaled.stderr.split("OWN CODE")
    assert "applies gradients with" not in told
    assert "applies gradients with SGD" in of_own_code
