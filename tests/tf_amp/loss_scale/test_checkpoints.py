"""The state of a scale survives, bit for bit, and float32 checkpoints fit in both directions."""

from __future__ import annotations

import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_amp.loss_scale import DynamicLossScale, LossScaleManager, wrap_optimizer
from tf_amp.loss_scale.v1_saver import make_tolerant_restore

v1 = tf.compat.v1
NAN = float("nan")
RULE = DynamicLossScale(initial=2.0**10, growth_interval=3)
# A skipped step and then two good ones: the next good step makes the scale grow.
STEPS = [1.0, NAN, 0.5, 0.25]
X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)


class Training:
    """A variable, an optimizer with slots, and steps."""

    def __init__(self, toolbox, *, scaled: bool) -> None:
        self.toolbox = toolbox
        self.variable = toolbox.variable([1.0, 2.0])
        self.inner = toolbox.sgd(0.1, momentum=0.9)
        self.optimizer = wrap_optimizer(self.inner, RULE) if scaled else self.inner
        self.scaled = scaled
        self.checkpoint = tf.train.Checkpoint(
            optimizer=self.optimizer, variable=toolbox.tensor(self.variable)
        )

    def step(self, x: float) -> None:
        tensor = self.toolbox.tensor(self.variable)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tensor * x)
            loss = self.optimizer.scale_loss(loss) if self.scaled else loss
        gradients = tape.gradient(loss, [tensor])
        self.optimizer.apply_gradients(zip(gradients, [self.variable], strict=True))

    def everything(self) -> list[np.ndarray]:
        values = self.toolbox.optimizer_values(self.inner)
        # Legacy optimizers list their variables in the order of creation, which a restored
        # checkpoint changes.
        values.sort(key=lambda value: (value.ndim, value.tolist()))
        return [self.toolbox.tensor(self.variable).numpy(), *values]


@pytest.mark.parametrize("restored", ["before_the_first_step", "after_a_step"])
def test_object_checkpoint_round_trip(toolbox, tmp_path: Path, restored: str) -> None:
    first = Training(toolbox, scaled=True)
    for x in STEPS:
        first.step(x)
    path = first.checkpoint.save(str(tmp_path / "ckpt"))
    second = Training(toolbox, scaled=True)
    if restored == "after_a_step":
        second.step(1.0)
    second.checkpoint.restore(path)
    first.step(0.5)
    second.step(0.5)
    np.testing.assert_equal(second.everything(), first.everything())
    assert second.optimizer.manager.state() == first.optimizer.manager.state()
    # The good steps were restored too: the third one made the scale grow.
    assert float(second.optimizer.loss_scale) == 2.0**10


@pytest.mark.parametrize("direction", ["float32_to_amp", "amp_to_float32"])
def test_object_checkpoint_between_float32_and_amp(toolbox, tmp_path: Path, direction: str) -> None:
    to_amp = direction == "float32_to_amp"
    first = Training(toolbox, scaled=not to_amp)
    for x in (1.0, 0.5):
        first.step(x)
    path = first.checkpoint.save(str(tmp_path / "ckpt"))
    second = Training(toolbox, scaled=to_amp)
    status = second.checkpoint.restore(path)
    second.step(0.25)
    if not to_amp and toolbox.family != "keras":
        # All that a float32 program has was found in the checkpoint. (Keras 3 tracks the trained
        # variables twice and does not match the second time, nor does it without tf_amp.)
        status.assert_existing_objects_matched()
    if to_amp:
        assert second.optimizer.manager.state().scale == RULE.initial
    first.step(0.25)
    # The gradients went through a scale that is a power of two, so even the bits are equal.
    np.testing.assert_equal(second.everything(), first.everything())


def test_the_state_has_names_of_its_own_in_a_checkpoint(toolbox, tmp_path: Path) -> None:
    training = Training(toolbox, scaled=True)
    training.step(1.0)
    path = training.checkpoint.save(str(tmp_path / "ckpt"))
    keys = {key for key, _ in tf.train.list_variables(path) if "/loss_scale/" in key}
    assert keys == {
        f"optimizer/loss_scale/{field}/.ATTRIBUTES/VARIABLE_VALUE"
        for field in ("scale", "good_steps", "skipped_steps", "skipped_in_a_row")
    }


def test_a_window_is_saved_half_way(tmp_path: Path) -> None:
    def make() -> tuple[LossScaleManager, tf.train.Checkpoint]:
        manager = LossScaleManager(DynamicLossScale(initial=8.0), window=2)
        return manager, tf.train.Checkpoint(manager=manager)

    def observe(manager: LossScaleManager, finite: bool) -> None:
        manager.assign(manager.plan(tf.constant(finite)))

    first, checkpoint = make()
    observe(first, False)
    path = checkpoint.save(str(tmp_path / "ckpt"))
    second, checkpoint = make()
    checkpoint.restore(path)
    observe(second, True)
    assert second.state().scale == 4.0
    assert second.state().skipped_steps == 1


# --- .keras files -----------------------------------------------------------------------------


def make_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def fit(model: keras.Model, bad: bool = False) -> None:
    x = X.copy()
    x[9] = NAN if bad else x[9]
    model.fit(x, X[:, :3], batch_size=8, epochs=1, verbose=0, shuffle=False)


def values(model: keras.Model) -> list[np.ndarray]:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return [v.numpy() for v in [*model.variables, *optimizer.variables]]


def test_keras_file_round_trip(tmp_path: Path) -> None:
    model = make_model(wrap_optimizer(keras.optimizers.Adam(0.01), RULE))
    fit(model, bad=True)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is keras.optimizers.Adam
    np.testing.assert_equal(values(again), values(model))
    fit(model)
    fit(again)
    np.testing.assert_equal(values(again), values(model))


class Slower(keras.optimizers.SGD):
    """An optimizer of a script's own."""


@pytest.mark.parametrize("make", [keras.optimizers.Adam, Slower])
def test_a_file_names_the_optimizer_as_without_a_scale(make: type) -> None:
    optimizer = make(0.01)
    plain = keras.saving.serialize_keras_object(optimizer)
    assert keras.saving.serialize_keras_object(wrap_optimizer(optimizer)) == plain


# tf_keras has no place for the state of the scale in such a file.
@pytest.mark.parametrize(("library", "good_steps"), [("keras", 8), ("tf_keras", 4)])
def test_what_is_saved_with_a_scale_by_hand_loads_anywhere(
    tmp_path: Path, run_forked, library: str, good_steps: int
) -> None:
    """The state of the scale goes on where loss scaling is on, and nobody else sees it."""
    common = f"""
        import pickle, sys
        import numpy as np
        import {library} as keras
        x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(32, 4)
        def fit(model):
            model.fit(x, x[:, :3], batch_size=8, verbose=0)
            return model
        def load():
            yield keras.models.load_model(sys.argv[1] + "/model.keras")
            with open(sys.argv[1] + "/model.pickle", "rb") as file:
                yield pickle.load(file)
    """
    enable = """
        import tf_amp
        optimizer = tf_amp.enable_mixed_precision_graph_rewrite(keras.optimizers.Adam(0.01))
    """
    env = {
        "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DTYPE": "float16",
        "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_IGNORE_PERFORMANCE": "1",
    }
    save = """
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
        model.compile(optimizer, "mse", jit_compile=False)
        fit(model).save(sys.argv[1] + "/model.keras")
        with open(sys.argv[1] + "/model.pickle", "wb") as file:
            pickle.dump(model, file)
    """
    plain = """
        for name in [*sys.modules]:
            if name.startswith("tf_amp"):
                sys.modules[name] = None  # as where it is not installed
        for model in load():
            made = keras.optimizers.Adam
            print(type(model.optimizer) is made, int(np.asarray(model.optimizer.iterations)))
            fit(model)
    """
    scaled = """
        import tf_amp
        for model in load():
            scale = tf_amp.loss_scale.manager_of(fit(model).optimizer)
            print(scale.state().good_steps)
    """
    args = (str(tmp_path),)
    run_forked(common + enable + save, env, args=args)
    assert run_forked(common + plain, args=args).stdout.split() == ["True", "4"] * 2
    head = "import tf_amp.autoload\ntf_amp.autoload.activate()\n"
    on = {"TF_ENABLE_AUTO_MIXED_PRECISION": "1", **env}
    again = run_forked(head + textwrap.dedent(common + scaled), on, args=args)
    assert again.stdout.split() == [str(good_steps)] * 2


def test_keras_file_holds_the_optimizer_once(tmp_path: Path) -> None:
    import zipfile

    import h5py

    model = make_model(wrap_optimizer(keras.optimizers.Adam(0.01), RULE))
    fit(model)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        file.extract("model.weights.h5", tmp_path)
    with h5py.File(tmp_path / "model.weights.h5") as store:
        assert sorted(store["optimizer"]) == ["loss_scale_store", "vars"]


@pytest.mark.parametrize("direction", ["float32_to_amp", "amp_to_float32"])
def test_weights_file_between_float32_and_amp(tmp_path: Path, direction: str) -> None:
    """A whole state, optimizer included, goes into a model of the other kind."""

    def make(scaled: bool) -> keras.Model:
        plain = keras.optimizers.Adam(0.01)
        model = make_model(wrap_optimizer(plain, RULE) if scaled else plain)
        model.optimizer.build(model.trainable_variables)
        return model

    to_amp = direction == "float32_to_amp"
    model, again = make(not to_amp), make(to_amp)
    fit(model)
    model.save_weights(tmp_path / "model.weights.h5")
    again.load_weights(tmp_path / "model.weights.h5")
    for one in (model, again):
        fit(one)
    np.testing.assert_equal(values(again), values(model))


@pytest.mark.slow
def test_keras_file_between_float32_and_amp_by_environment(
    tmp_path: Path, run_python, run_forked
) -> None:
    """What `compile` scales by itself is saved as a plain model, and loads where tf_amp is not."""
    common = """
        import sys
        import numpy as np
        import tensorflow as tf, keras
        x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(32, 4)

        def go_on(source, target=None):
            if source is None:
                keras.utils.set_random_seed(0)
                model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
                model.compile(keras.optimizers.Adam(0.01), "mse")
            else:
                model = keras.models.load_model(f"{sys.argv[1]}/{source}.keras")
            model.fit(x, x[:, :3], batch_size=8, verbose=0, shuffle=False)
            if target:
                model.save(f"{sys.argv[1]}/{target}.keras")
            scaling = model.optimizer.__dict__.get("_tf_amp_loss_scaling")
            steps = None if scaling is None else scaling.manager.state().good_steps
            weights = [w.tolist() for w in model.get_weights()]
            print("RESULT", steps, int(np.asarray(model.optimizer.iterations)), weights)
    """
    with_tf_amp = run_forked(
        common
        + """
        from tf_amp.loss_scale import auto_wrap
        go_on(None, "plain")
        go_on("plain")
        auto_wrap.install(wraps=True)
        go_on(None, "amp")
        go_on("plain")
        go_on("amp")
        """,
        args=(str(tmp_path),),
    )
    without = run_python(
        f'{common}\n        go_on("amp"); print("tf_amp.loss_scale" in sys.modules)\n',
        args=(str(tmp_path),),
    )
    lines = [x.split(" ", 3) for x in with_tf_amp.stdout.split("\n") if x.startswith("RESULT")]
    assert [(wrapped, steps) for _, wrapped, steps, _ in lines] == [
        ("None", "4"),
        ("None", "8"),
        ("4", "4"),
        ("4", "8"),
        # The state of the scale was in the file too.
        ("8", "8"),
    ]
    reference = lines[1][3]
    assert [weights for *_, weights in lines[3:]] == [reference] * 2
    elsewhere, imported, *_ = without.stdout.split("\n")
    assert elsewhere == f"RESULT None 8 {reference}"
    assert imported == "False"


# --- v1 Saver ---------------------------------------------------------------------------------


class SaverTraining:
    """A v1 graph with Adam, whose own variables are the delicate part of a checkpoint."""

    def __init__(self, *, scaled: bool) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [])
            variable = v1.get_variable("v", initializer=[1.0, 2.0])
            optimizer = v1.train.AdamOptimizer(0.1)
            self.optimizer = wrap_optimizer(optimizer, RULE) if scaled else optimizer
            self.train_op = self.optimizer.minimize(tf.reduce_sum(variable * self.x))
            self.saver = v1.train.Saver()
            self.names = {v.op.name for v in v1.global_variables()}
            initializer = v1.global_variables_initializer()
            self.all_variables = v1.global_variables()
        self.graph.finalize()
        self.session = v1.Session(graph=self.graph)
        self.session.run(initializer)

    def save(self, directory: Path) -> str:
        with self.graph.as_default():
            return self.saver.save(self.session, str(directory / "ckpt"), write_meta_graph=False)

    def step(self, x: float) -> None:
        self.session.run(self.train_op, {self.x: x})

    def values(self, shared_with: set[str]) -> dict[str, np.ndarray]:
        wanted = {v.op.name: v for v in self.all_variables if v.op.name in shared_with}
        return self.session.run(wanted)


def test_saver_round_trip(tmp_path: Path) -> None:
    first = SaverTraining(scaled=True)
    for x in STEPS:
        first.step(x)
    path = first.save(tmp_path)
    second = SaverTraining(scaled=True)
    with second.graph.as_default():
        second.saver.restore(second.session, path)
    for training in (first, second):
        training.step(0.5)
    np.testing.assert_equal(second.values(first.names), first.values(first.names))
    state = second.optimizer.manager.state(second.session)
    assert (state.scale, state.good_steps, state.skipped_steps) == (2.0**10, 0, 1)


restore = make_tolerant_restore(v1.train.Saver.restore)


@pytest.mark.parametrize("direction", ["float32_to_amp", "amp_to_float32"])
def test_saver_between_float32_and_amp(tmp_path: Path, direction: str) -> None:
    to_amp = direction == "float32_to_amp"
    first = SaverTraining(scaled=not to_amp)
    for x in (1.0, 0.5):
        first.step(x)
    path = first.save(tmp_path)
    second = SaverTraining(scaled=to_amp)
    # The graph is finalized, as in a MonitoredSession.
    with second.graph.as_default():
        restore(second.saver, second.session, path)
    for training in (first, second):
        training.step(0.25)
    shared = first.names & second.names
    assert {"v", "v/Adam", "v/Adam_1", "beta1_power", "beta2_power"} <= shared
    np.testing.assert_equal(second.values(shared), first.values(shared))


def test_saver_still_fails_when_something_else_is_missing(tmp_path: Path) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("other", initializer=1.0)
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver().save(session, str(tmp_path / "ckpt"))
    training = SaverTraining(scaled=True)
    with training.graph.as_default(), pytest.raises(tf.errors.OpError, match="not found"):
        restore(training.saver, training.session, path)


@pytest.mark.parametrize(("scope", "has_scale"), [(None, True), (None, False), ("imported", True)])
def test_a_saver_of_an_imported_meta_graph(
    tmp_path: Path, scope: str | None, has_scale: bool
) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [], "x")
        variable = v1.get_variable("v", initializer=[1.0, 2.0])
        plain = v1.train.Saver([variable])
        optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), RULE)
        train_op = optimizer.minimize(tf.reduce_sum(variable * x), name="train")
        session.run(v1.global_variables_initializer())
        session.run(train_op, {x: np.inf})
        saver = v1.train.Saver()
        meta = saver.export_meta_graph()
        path = (saver if has_scale else plain).save(session, str(tmp_path / "ckpt"))
        scale = optimizer.manager.state(session).scale if has_scale else RULE.initial
    prefix = f"{scope}/" if scope else ""
    with tf.Graph().as_default(), v1.Session() as session:
        restore(v1.train.import_meta_graph(meta, import_scope=scope), session, path)
        assert session.run(f"{prefix}loss_scale/scale/Read/ReadVariableOp:0") == scale
        session.run(f"{prefix}train", {f"{prefix}x:0": 1.0})
        values = session.run(f"{prefix}v/Read/ReadVariableOp:0")
    np.testing.assert_allclose(values, [0.9, 1.9])


def test_saver_restores_partitions_and_leaves_a_scale_that_it_does_not_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        rows = v1.get_variable(
            "rows",
            initializer=tf.range(8.0),
            partitioner=v1.fixed_size_partitioner(2),
        )
        of_weights = v1.train.Saver()
        optimizer = wrap_optimizer(v1.train.AdamOptimizer(0.1), RULE)
        train_op = optimizer.minimize(tf.reduce_sum(tf.convert_to_tensor(rows)) * np.inf)
        of_all = v1.train.Saver()
        session.run(v1.global_variables_initializer())
        path = of_weights.save(session, str(tmp_path / "weights"))
        session.run([train_op, *(v.assign(v + 1.0) for v in rows)])
        with caplog.at_level("INFO", "tf_amp.loss_scale"):
            restore(of_weights, session, path)
        np.testing.assert_array_equal(session.run(tf.convert_to_tensor(rows)), np.arange(8.0))
        assert optimizer.manager.state(session).scale == RULE.initial_scale / 2
        assert "starts at its initial value" not in caplog.text
        with pytest.raises(tf.errors.OpError, match="not found"):
            restore(of_all, session, path)
