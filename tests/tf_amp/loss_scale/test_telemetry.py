from __future__ import annotations

import gc
import glob
import logging
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tf_amp.loss_scale import (
    DynamicLossScale,
    LossScaleAtFloorError,
    LossScaleManager,
    counters,
    loss_scale_callback,
    manager_of,
    wrap_optimizer,
)

NAN = float("nan")


def observe(manager: LossScaleManager, finite: bool) -> None:
    manager.assign(manager.plan(tf.constant(finite)))


def test_summary_writes_scalars_for_tensorboard(tmp_path: Path) -> None:
    manager = LossScaleManager(DynamicLossScale(initial=8.0))
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        for step, finite in enumerate([True, False]):
            observe(manager, finite)
            manager.summary(step)
    seen = {}
    for path in glob.glob(str(tmp_path / "*")):
        for record in tf.data.TFRecordDataset(path):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                seen[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    assert seen == {
        ("amp/loss_scale", 0): 8.0,
        ("amp/loss_scale", 1): 4.0,
        ("amp/good_steps", 0): 1.0,
        ("amp/good_steps", 1): 0.0,
        ("amp/skipped_steps", 0): 0.0,
        ("amp/skipped_steps", 1): 1.0,
        ("amp/skipped_in_a_row", 0): 0.0,
        ("amp/skipped_in_a_row", 1): 1.0,
    }


def test_counters_of_living_managers() -> None:
    gc.collect()
    before = counters()
    managers = [LossScaleManager(8.0, name=f"counted_{i}") for i in range(2)]
    observe(managers[0], False)
    observe(managers[0], False)
    after = counters()
    assert after["managers"] == before["managers"] + 2
    assert after["skipped_steps"] == before["skipped_steps"] + 2
    (entry,) = [e for e in after["loss_scales"] if e["name"] == "counted_0"]
    assert entry["rule"] == "StaticLossScale"
    assert entry["state"] == {
        "scale": 8.0,
        "good_steps": 0,
        "skipped_steps": 2,
        "skipped_in_a_row": 2,
    }
    with tf.Graph().as_default():
        assert counters()["loss_scales"][0]["state"] is None
    del managers
    gc.collect()
    assert counters()["managers"] == before["managers"]


def test_counting_while_others_make_managers() -> None:
    """Another thread makes managers and their variables, and drops them again."""
    interval = sys.getswitchinterval()
    done = threading.Event()

    def make() -> None:
        while not done.is_set():
            for manager in [LossScaleManager(8.0) for _ in range(5)]:
                manager.create_variables()

    thread = threading.Thread(target=make)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(300):
            assert all(entry["rule"] for entry in counters()["loss_scales"])
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_threads_that_first_use_a_manager_find_the_same_variables() -> None:
    for _ in range(20):
        manager = LossScaleManager("dynamic")
        together, found = threading.Barrier(6), []

        def use(manager=manager, together=together, found=found) -> None:
            together.wait()
            found.append(manager.variables[0])

        threads = [threading.Thread(target=use) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(one) for one in found}) == 1


def test_counting_needs_no_tensorflow(run_python) -> None:
    done = run_python(
        """
        import sys
        import tf_amp.loss_scale as ls
        print(ls.counters(), ls.DynamicLossScale().initial_scale, "tensorflow" in sys.modules)
        """
    )
    assert done.stdout == ("{'managers': 0, 'skipped_steps': 0, 'loss_scales': []} 32768.0 False\n")


@pytest.mark.parametrize("library", [keras, tf_keras])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_callback_logs_the_scale(library, jit_compile: bool) -> None:
    model = library.Sequential([library.layers.Input((2,)), library.layers.Dense(1)])
    model.compile(
        wrap_optimizer(library.optimizers.SGD(0.01), DynamicLossScale(initial=8.0)),
        "mse",
        jit_compile=jit_compile,
    )
    x = np.ones((8, 2), np.float32)
    x[0] = NAN
    history = model.fit(
        x,
        x[:, :1],
        batch_size=2,
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[loss_scale_callback(model)],
    ).history
    assert history["loss_scale"] == [4.0, 2.0]
    assert history["skipped_steps"] == [1, 2]


def test_callback_carries_out_at_floor_under_xla() -> None:
    rule = DynamicLossScale(initial=2.0, at_floor="raise", floor_patience=6)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(wrap_optimizer(keras.optimizers.SGD(), rule), "mse", jit_compile=True)
    x = np.full((100, 2), NAN, np.float32)
    batches = []
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: batches.append(b))
    with pytest.raises(LossScaleAtFloorError, match=r"8 steps in a row.*kernel has NaN"):
        model.fit(
            x,
            x[:, :1],
            batch_size=2,
            verbose=0,
            callbacks=[counting, loss_scale_callback(model, every=4)],
        )
    assert len(batches) == 8


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_what_was_skipped_before_a_restore_is_not_reported_again(library, tmp_path, caplog) -> None:
    def build():
        model = library.Sequential([library.layers.Input((2,)), library.layers.Dense(1)])
        model.compile(wrap_optimizer(library.optimizers.SGD(0.01)), "mse")
        return model, tf.train.Checkpoint(optimizer=model.optimizer)

    def fit(model, x):
        with caplog.at_level(logging.INFO):
            model.fit(x, x[:, :1], verbose=0, callbacks=[loss_scale_callback(model)])
        said = [one.getMessage() for one in caplog.records if "Skipped" in one.getMessage()]
        caplog.clear()
        return said

    finite, model, path = np.ones((8, 2), np.float32), *build()
    assert len(fit(model, finite * NAN)) == 1
    saved = path.save(str(tmp_path / "saved"))
    restored, path = build()
    path.restore(saved)
    assert fit(restored, finite) == []
    assert manager_of(restored.optimizer).state().skipped_steps == 1
    (notice,) = fit(restored, finite * NAN)
    assert "2 skipped so far" in notice


def test_callback_refuses_what_it_cannot_watch() -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"wrap_optimizer.*Received: model\.optimizer"):
        loss_scale_callback(model)
    model.compile(wrap_optimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(ValueError, match=r"`every`.*Received: every=0"):
        loss_scale_callback(model, every=0)


def test_callback_watches_a_layer_that_a_trainer_of_keras_fits() -> None:
    class FittedLayer(TensorFlowTrainer, keras.layers.Dense):
        def __init__(self) -> None:
            keras.layers.Dense.__init__(self, 1)
            TensorFlowTrainer.__init__(self)

    layer = FittedLayer()
    layer.compile(optimizer=wrap_optimizer(keras.optimizers.SGD(0.01)), loss="mse")
    callback = loss_scale_callback(layer)
    layer.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0, callbacks=[callback])
    assert manager_of(layer.optimizer).state().good_steps == 1
