"""How random programs are run: by functions, sessions, `fit`, saved or with a loss scale."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from random_programs import RATE, SCALED, UPDATES, Minimize, RandomProgram, by_optimizer, step_of
from random_steps import Scene

from tf_amp.loss_scale import LossScaleManager, wrap_optimizer
from tf_amp.loss_scale.wrapping import manager_of, wrapper_of

v1 = tf.compat.v1
STEPS = 2
"""How many times a program is run; state carries over."""
INITIAL_SCALE = 2.0**4
"""A loss scale by which gradients of a few units do not overflow."""

Outcome = dict[str, np.ndarray]


class SkippedStepError(Exception):
    """Gradients were not finite, by the loss scale."""


def _gathered(scene: Scene, outputs: Sequence[Any]) -> Outcome:
    result = {f"output {n}": np.asarray(value) for n, value in enumerate(outputs)}
    return result | {where: v.numpy() for where, v in scene.variables.items()}


def _values(program: RandomProgram) -> list[tf.Tensor]:
    return [tf.constant(value) for value in program.values().values()]


def _run_function(
    program: RandomProgram, scene: Scene, minimize: Minimize | None = None
) -> Outcome:
    function = tf.function(
        step_of(program, scene, minimize),
        autograph=False,
        jit_compile=True if program.route == "xla" else None,
        input_signature=list(program.specs().values()),
    )
    for _ in range(STEPS):
        outputs = function(*_values(program))
    return _gathered(scene, outputs)


def run_saved(
    program: RandomProgram, scene: Scene, change: Callable[[Path], Path] = lambda saved: saved
) -> Outcome:
    """Traced, saved, maybe changed on disk, loaded and run."""
    function = tf.function(
        step_of(program, scene), autograph=False, input_signature=list(program.specs().values())
    )
    function.get_concrete_function()
    module = tf.Module()
    module.function = function
    module.held = list(scene.variables.values())
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, f"{folder}/saved")
        loaded = tf.saved_model.load(str(change(Path(folder, "saved"))))
    for _ in range(STEPS):
        outputs = loaded.function(*_values(program))
    held = dict(zip(scene.variables, loaded.held, strict=True))
    result = {f"output {n}": np.asarray(value) for n, value in enumerate(outputs)}
    stored_low = {where for where in scene.trained if held[where].dtype != tf.float32}
    return result | {where: v.numpy() for where, v in held.items() if where not in stored_low}


def _run_outside(program: RandomProgram, scene: Scene) -> Outcome:
    """The function is called under a tape, so its gradient is a function of its own."""
    forward = step_of(dataclasses.replace(program, gradients="none"), scene)
    function = tf.function(forward, autograph=False, input_signature=list(program.specs().values()))
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            outputs = function(*_values(program))
        found = tape.gradient(outputs[0], list(scene.trained.values()))
    gradients = [tf.convert_to_tensor(g) for g in found if g is not None]
    return _gathered(scene, [*outputs, *gradients])


def _is_of_tf_keras(program: RandomProgram) -> bool:
    return program.update.startswith(("tf_keras", "legacy"))


def _lower(manager: LossScaleManager | None) -> Any:
    """Has a loss scale begin where gradients of a few units do not overflow."""
    return tf.no_op() if manager is None else manager.variables[0].assign(INITIAL_SCALE)


def _require_no_skip(manager: LossScaleManager | None, session: Any = None) -> None:
    if manager is not None and manager.state(session).skipped_steps:
        raise SkippedStepError


def _run_fit(program: RandomProgram, scene: Scene) -> Outcome:
    """The `train_step` of a model, which `fit` calls."""
    library = tf_keras if _is_of_tf_keras(program) else keras

    class Trained(library.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.built = True

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x

        def train_step(self, data: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            step = step_of(program, scene, _minimize_in_fit(program, self.optimizer))
            return {"objective": step(*(data[name] for name in program.values()))[0]}

    model = Trained()
    model.compile(UPDATES[program.update](), jit_compile=False)
    _lower(manager_of(model.optimizer))
    data = tf.data.Dataset.from_generator(
        lambda: (program.values() for _ in range(STEPS)), output_signature=program.specs()
    )
    fitted = model.fit(data, verbose=0)
    _require_no_skip(manager_of(model.optimizer))
    return _gathered(scene, [np.float32(fitted.history["objective"][-1])])


def _minimize_in_fit(program: RandomProgram, optimizer: Any) -> Minimize:
    if not _is_of_tf_keras(program):
        return by_optimizer(lambda: optimizer, scales=True)

    def minimize(scene: Scene, tape: tf.GradientTape, loss: tf.Tensor) -> list[Any]:
        scene.optimizer(lambda: optimizer)
        optimizer.minimize(loss, list(scene.trained.values()), tape=tape)
        scene.count_slots()
        return []

    return minimize


def _run_scaled(program: RandomProgram, scene: Scene) -> Outcome:
    """A loop of its own, whose optimizer was given a loss scale by a call."""
    optimizer = wrap_optimizer(UPDATES[program.update](), INITIAL_SCALE)
    outcome = _run_function(program, scene, by_optimizer(lambda: optimizer, scales=True))
    _require_no_skip(optimizer.manager)
    return outcome


def _minimize_of_v1(scene: Scene, _: tf.GradientTape, loss: tf.Tensor) -> list[Any]:
    optimizer = scene.optimizer(lambda: v1.train.GradientDescentOptimizer(RATE))
    return [optimizer.minimize(loss, var_list=list(scene.trained.values()))]


def _run_session(program: RandomProgram, scene: Scene) -> Outcome:
    """A graph in a session of TensorFlow 1, with control flow of version 1 or 2."""
    is_v1 = program.route == "v1 session"
    if is_v1:
        v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            fed = [
                v1.placeholder(spec.dtype, spec.shape, spec.name)
                for spec in program.specs().values()
            ]
            step = step_of(program, scene, _minimize_of_v1 if program.route in SCALED else None)
            outputs = [tf.identity(t) for t in step(*fed)]
            start = v1.global_variables_initializer()
            reads = {where: v.read_value() for where, v in scene.variables.items()}
            manager = manager_of(wrapper_of(scene.layers.get("optimizer")))
            lower = _lower(manager)
        with v1.Session(graph=graph) as session:
            session.run(start)
            session.run(lower)
            feeds = dict(zip(fed, program.values().values(), strict=True))
            for _ in range(STEPS):
                found = session.run(outputs, feeds)
            held = session.run(reads)
            _require_no_skip(manager, session)
    finally:
        v1.enable_control_flow_v2()
    return {f"output {n}": value for n, value in enumerate(found)} | held


ROUTES: Mapping[str, Callable[[RandomProgram, Scene], Outcome]] = {
    "function": _run_function,
    "xla": _run_function,
    "saved": run_saved,
    "converted": run_saved,
    "tape outside": _run_outside,
    "session": _run_session,
    "v1 session": _run_session,
    "v1 minimize": _run_session,
    "fit": _run_fit,
    "scaled loop": _run_scaled,
}
"""How a program is run but for the offline rewrite, which `rewrite_checks` knows."""
