"""Random programs: steps, a loss, gradients and effects, as people write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from hypothesis import strategies as st
from random_steps import CHANNELS, SHAPES, STEPS, Scene, Step, run_steps
from unit_layers import numbers

SCALED = ("fit", "scaled loop", "v1 minimize")
"""The routes on which float16 trains with a loss scale."""
ROUTES = (
    *("offline", "function", "session", "v1 session", "xla", "saved", "tape outside", "converted"),
    *SCALED,
)
SAVED = ("saved", "converted")
IN_SESSION = ("session", "v1 session", "v1 minimize")
DTYPES = ("bfloat16", "float16", "float32")
GRADIENTS = ("none", "first", "tf.gradients", "second", "trained")
LOSSES: Mapping[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "square": lambda rows, labels: tf.reduce_mean(tf.square(rows)),
    "cross entropy": lambda rows, labels: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, rows)
    ),
    "one hot": lambda rows, labels: tf.reduce_sum(
        tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(labels, CHANNELS), rows)
    ),
    "log softmax": lambda rows, labels: (
        -tf.reduce_mean(tf.gather(tf.nn.log_softmax(rows), labels, axis=1, batch_dims=1))
    ),
    "binary": lambda rows, labels: tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(tf.one_hot(labels, CHANNELS), rows)
    ),
    "l2": lambda rows, labels: tf.nn.l2_loss(rows) / 8.0,
    "huber": lambda rows, labels: tf.reduce_mean(
        tf.compat.v1.losses.huber_loss(tf.one_hot(labels, CHANNELS), rows)
    ),
    "probabilities": lambda rows, labels: (
        -tf.reduce_mean(
            tf.math.log(
                tf.reduce_sum(tf.nn.softmax(rows) * tf.one_hot(labels, CHANNELS), -1) + 1e-7
            )
        )
    ),
}
UPDATES: Mapping[str, Callable[[], Any]] = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Adam, clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    "Adam, averaged": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "Adam, decayed": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5), beta_1=0.8, epsilon=1e-4
    ),
    "Adam, accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipvalue=0.5),
    "Nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9),
    "RMSprop, centred": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "tf_keras Adam": lambda: tf_keras.optimizers.Adam(0.01),
    "tf_keras AdamW": lambda: tf_keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "tf_keras momentum": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "tf_keras RMSprop": lambda: tf_keras.optimizers.RMSprop(0.01, momentum=0.9),
    "legacy Adam": lambda: tf_keras.optimizers.legacy.Adam(0.01),
}
"""Optimizers, but for updates written by hand, whose name is empty."""
RATE = 0.1
"""The learning rate of updates by hand, and of the optimizer of version 1."""


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """A program and how it is run.

    Attributes:
        tensor: the kind of tensor that goes through the steps, a key of `SHAPES`.
        steps: what is done to it.
        loss: a key of `LOSSES`.
        gradients: one of `GRADIENTS`; "trained" also updates the weights.
        known: whether the batch size is known.
        dtype: the target dtype; "float32" where nothing is converted.
        route: one of `ROUTES`.
        device: whose kernels the offline rewrite asks for.
        rules: which rules of the rewrite are off: "painted" those that weigh costs, "default" none.
        update: by what weights are updated, a key of `UPDATES`, or "" by hand.
    """

    tensor: str
    steps: tuple[Step, ...]
    loss: str = "square"
    gradients: str = "none"
    known: bool = True
    dtype: str = "bfloat16"
    route: str = "offline"
    device: str = "CPU"
    rules: str = "painted"
    update: str = ""

    def values(self) -> dict[str, np.ndarray]:
        """What is fed, by name."""
        values = {
            "x": numbers(*SHAPES[self.tensor], seed=5),
            "labels": np.array([1, 6, 3, 0], np.int32),
            "trips": np.array(3, np.int32),
            "flag": np.array(True),
        }
        if self.uses("words"):
            values["words"] = np.array([b"one", b"three", b"", b"seven"], np.object_)
        return values

    def specs(self) -> dict[str, tf.TensorSpec]:
        """What the program is traced for, by name."""
        seen = {}
        for name, value in self.values().items():
            shape = value.shape if self.known or not value.ndim else (None, *value.shape[1:])
            seen[name] = tf.TensorSpec(shape, tf.as_dtype(value.dtype), name)
        return seen

    def uses(self, name: str) -> bool:
        """Whether a step is somewhere in the program."""
        return any(step.name == name for step in every_step(self.steps))


def every_step(steps: tuple[Step, ...]) -> list[Step]:
    """Steps and those in their bodies."""
    return [
        found
        for step in steps
        for found in (step, *(s for body in step.bodies for s in every_step(body)))
    ]


def forward(program: RandomProgram, scene: Scene, fed: Mapping[str, tf.Tensor]) -> Any:
    """The loss of a program and what it is made of."""
    scene.fed = fed
    y = run_steps(scene, fed["x"], program.steps, "s")
    rows = tf.reduce_mean(y, list(range(1, y.shape.rank - 1))) if y.shape.rank > 2 else y
    last = scene.weight("head", CHANNELS, CHANNELS, fan=CHANNELS)
    rows = tf.matmul(rows, last)
    loss = LOSSES[program.loss](rows, fed["labels"])
    return loss, [y, rows, tf.shape(y), tf.equal(fed["labels"], fed["trips"])]


Minimize = Callable[[Scene, tf.GradientTape, tf.Tensor], list[Any]]
"""Updates the weights of a scene; what is to be waited for where no function sees to it."""


def step_of(
    program: RandomProgram, scene: Scene, minimize: Minimize | None = None
) -> Callable[..., list[tf.Tensor]]:
    """The program as a function of what is fed, in the order of `values`.

    Args:
        program: the program.
        scene: its variables.
        minimize: how weights are updated where they are; default as the program says.
    """
    names = list(program.values())
    train = minimize or (by_optimizer(UPDATES[program.update]) if program.update else _by_hand)

    def step(*given: tf.Tensor) -> list[tf.Tensor]:
        fed = dict(zip(names, given, strict=True))
        how, x = program.gradients, fed["x"]
        if how == "none":
            loss, made = forward(program, scene, fed)
            return [loss, *made]
        if how == "second":
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss, made = forward(program, scene, fed)
                dx = inner.gradient(loss, x)
                if dx is not None:
                    loss += tf.reduce_mean(tf.square(dx)) * 8.0
            found = outer.gradient(loss, list(scene.trained.values()))
            return [loss, *made, *_dense(found)]
        if how == "tf.gradients":
            loss, made = forward(program, scene, fed)
            found = tf.gradients(loss, [x, *scene.trained.values()])
            return [loss, *made, *_dense(found)]
        with tf.GradientTape() as tape:
            loss, made = forward(program, scene, fed)
        if how == "trained":
            with tf.control_dependencies([loss, *made]):
                kept = train(scene, tape, loss)
            with tf.control_dependencies(kept):
                return [tf.identity(made) for made in (loss, *made)]
        found = tape.gradient(loss, list(scene.trained.values()))
        return [loss, *made, *_dense(found)]

    return step


def by_optimizer(make: Callable[[], Any], *, scales: bool = False) -> Minimize:
    """Updates by an optimizer of Keras or tf_keras, that may have a loss scale."""

    def minimize(scene: Scene, tape: tf.GradientTape, loss: tf.Tensor) -> list[Any]:
        optimizer = scene.optimizer(make)
        if scales:
            with tape:
                loss = optimizer.scale_loss(loss)
        found = _gradients(scene, tape, loss)
        if hasattr(optimizer, "build"):
            with tf.init_scope():
                optimizer.build([weight for _, weight in found])
        optimizer.apply_gradients(found)
        scene.count_slots()
        return []

    return minimize


def _by_hand(scene: Scene, tape: tf.GradientTape, loss: tf.Tensor) -> list[Any]:
    return [
        weight.assign_sub(RATE * tf.convert_to_tensor(gradient))
        for gradient, weight in _gradients(scene, tape, loss)
    ]


def _gradients(scene: Scene, tape: tf.GradientTape, loss: tf.Tensor) -> list[tuple[Any, Any]]:
    """Gradients and their weights, but for weights that have none."""
    weights = list(scene.trained.values())
    pairs = zip(tape.gradient(loss, weights), weights, strict=True)
    return [(gradient, weight) for gradient, weight in pairs if gradient is not None]


def _dense(gradients: list[Any]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(g) for g in gradients if g is not None]


@st.composite
def random_programs(
    draw: st.DrawFn,
    *,
    routes: tuple[str, ...] = ROUTES,
    dtypes: tuple[str, ...] = DTYPES,
    max_steps: int = 6,
    depth: int = 2,
) -> RandomProgram:
    """Programs of some steps in a row, with bodies in bodies up to a depth."""
    tensor = draw(st.sampled_from(sorted(SHAPES)))
    # The slow ways are rarer.
    weighted = [route for route in routes for _ in range(1 if route in ("xla", *SAVED) else 4)]
    route = draw(st.sampled_from(weighted))
    gradients = GRADIENTS
    if route == "tape outside":
        gradients = ("first",)
    if route == "xla":
        gradients = ("none", "first", "second", "trained")
    if route in SCALED:
        gradients = ("trained",)
    if route == "converted":
        dtypes = tuple(dtype for dtype in dtypes if dtype != "float32")
    dtype = draw(st.sampled_from(dtypes))
    if dtype == "float32" and "trained" in gradients:  # what is at work then are updates and norms
        gradients += ("trained",) * len(gradients)
    how = draw(st.sampled_from(gradients))

    update = ""
    if how == "trained" and route not in IN_SESSION:
        by_hand = () if route in SCALED else ("",)
        update = draw(st.sampled_from((*by_hand, *UPDATES)))

    def fits(name: str) -> bool:
        kind = STEPS[name]
        return (
            tensor in kind.tensors
            and (kind.compiles or route != "xla")
            and (kind.in_session or route not in IN_SESSION)
            and (kind.smooth or how != "second")
            and (name != "python" or route not in SAVED)
        )

    names = [name for name in STEPS if fits(name)]
    plain = [name for name in names if not STEPS[name].bodies]
    # Without products nothing is converted.
    products = [n for n in ("dense", "conv", "attention", "unit") if n in names] * 3

    def steps(depth: int, most: int) -> st.SearchStrategy[tuple[Step, ...]]:
        among = (names if depth else plain) + products

        @st.composite
        def one(draw: st.DrawFn) -> Step:
            name = draw(st.sampled_from(among))
            count = STEPS[name].bodies
            bodies = tuple(draw(steps(depth - 1, 3)) for _ in range(count))
            return Step(name, draw(st.integers(0, 63)), bodies)

        return st.lists(one(), min_size=1, max_size=most).map(tuple)

    devices = ("CPU", "GPU") if route == "offline" and dtype != "float32" else ("CPU",)
    return RandomProgram(
        tensor=tensor,
        steps=draw(steps(depth, max_steps)),
        loss=draw(st.sampled_from(sorted(LOSSES))),
        gradients=how,
        known=draw(st.booleans()),
        dtype=dtype,
        route=route,
        device=draw(st.sampled_from(devices)),
        rules=draw(st.sampled_from(("painted", "default"))),
        update=update,
    )
