"""A training step tells its skipped steps to whoever runs it, also where it was not built."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tf_amp.loss_scale import wrap_optimizer
from tf_amp.loss_scale.host_call import call_where_built

WRITE_META = """
import sys
import tensorflow.compat.v1 as tf
tf.config.list_physical_devices("GPU")  # after which `init_scope` leaves an unentered graph
tf.disable_eager_execution()
from tf_amp.loss_scale import DynamicLossScale, wrap_optimizer
folder, resource = sys.argv[1:]
x = tf.placeholder(tf.float32, [], name="x")
with tf.variable_scope("model", use_resource=resource == "resource"):
    v = tf.get_variable("v", initializer=[1.0, 2.0])
optimizer = wrap_optimizer(tf.train.AdamOptimizer(0.5), DynamicLossScale(initial=64.0))
step = optimizer.minimize(tf.reduce_sum(v * x), name="step")
state = tf.identity(optimizer.manager.variables[0], name="scale")
tf.identity(v, name="v")
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    tf.train.Saver().save(session, folder + "/model")
"""
RUN_META = """
import sys
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
saver = tf.train.import_meta_graph(sys.argv[1] + "/model.meta")
with tf.Session() as session:
    saver.restore(session, sys.argv[1] + "/model")
    values = [float("nan"), 1.0, float("inf"), float("nan")]
    scales = [session.run("scale:0")]
    for value in values:
        session.run("step", {"x:0": value})
        scales.append(session.run("scale:0"))
    print([float(scale) for scale in scales])
    print([round(float(value), 2) for value in session.run("v:0")])
"""
MODULE = """
import sys
import keras
import numpy as np
import tensorflow as tf
from tf_amp.loss_scale import DynamicLossScale, wrap_optimizer

class Trained(tf.Module):
    def __init__(self):
        self.v = tf.Variable([1.0, 2.0])
        self.optimizer = keras.optimizers.SGD(0.5)
        self.optimizer.build([self.v])
        self.kept = [variable.value for variable in self.optimizer.variables]
        wrap_optimizer(self.optimizer, DynamicLossScale(initial=64.0))
        self.manager = self.optimizer.manager

    @tf.function(input_signature=[tf.TensorSpec([])])
    def train(self, x):
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(tf.reduce_sum(self.v * x))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, [self.v]), [self.v]))
        return self.manager.scale

module = Trained()
tf.saved_model.save(module, sys.argv[1])
"""
RUN_MODULE = """
import sys
import tensorflow as tf
module = tf.saved_model.load(sys.argv[1])
values = [float("nan"), 1.0, float("inf"), float("nan")]
print([64.0] + [float(module.train(tf.constant(value))) for value in values])
print([round(float(value), 2) for value in module.v.numpy()])
"""
SAID = "tf_amp: skipped a step, a gradient is not finite; loss scale"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "run", "args"),
    [
        (WRITE_META, RUN_META, ("reference",)),
        (WRITE_META, RUN_META, ("resource",)),
        (MODULE, RUN_MODULE, ()),
    ],
    ids=["reference", "resource", "module"],
)
def test_an_exported_step_skips_in_another_process(
    run_python, run_forked, tmp_path: Path, write: str, run: str, args: tuple[str, ...]
) -> None:
    run_forked(write, args=(str(tmp_path), *args))
    # This process knows nothing of the package.
    done = run_python(run, {"TF_CPP_MIN_LOG_LEVEL": "0"}, args=(str(tmp_path),))
    scales, values = done.stdout.splitlines()[-2:]
    assert scales == "[64.0, 32.0, 32.0, 16.0, 8.0]"
    assert values == "[0.5, 1.5]"
    said = [line.partition(SAID)[2] for line in done.stderr.splitlines() if SAID in line]
    assert said == [" 64 -> 32 (1 so far).", " 32 -> 16 (2 so far)."]


IN_THIS_PROCESS = """
import gc
import logging
import sys
import weakref
import tensorflow as tf
from tf_amp.loss_scale.host_call import call_where_built

class Host:
    def told(self, number):
        sys.stdout.write(f"told {int(number)}\\n")  # whole: the two may call at the same time
        sys.stdout.flush()
        return True

def elsewhere():
    return tf.constant(False)

host, other = Host(), Host()
graph = tf.Graph()
with graph.as_default():
    number = tf.compat.v1.placeholder(tf.int64, [], name="number")
    tf.identity(call_where_built(Host.told, host, [number], elsewhere), name="answer")
    tf.identity(call_where_built(Host.told, other, [number], elsewhere), name="of_other")
copy = tf.Graph()
with copy.as_default():
    tf.import_graph_def(graph.as_graph_def(), name="")
alive = weakref.ref(other)
with tf.compat.v1.Session(graph=copy) as session:
    print(*session.run(["answer:0", "of_other:0"], {"number:0": 7}))
    del other
    print(alive(), session.run("of_other:0", {"number:0": 8}))
    del graph, number
    gc.collect()
    print(session.run("answer:0", {"number:0": 9}))
"""


def test_a_copy_that_outlives_the_graph_or_whom_it_tells_does_not_call(run_forked) -> None:
    lines = run_forked(IN_THIS_PROCESS).stdout.splitlines()
    assert lines == ["told 7", "told 7", "True True", "None False", "False"]


class Host:
    def told(self, number: Any) -> bool:
        return True


def files() -> set[str]:
    return set(tf.io.gfile.glob("ram://tf_amp/*"))


def test_a_traced_step_goes_with_its_program() -> None:
    before = files()

    def train() -> list[Any]:
        optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
        wrap_optimizer(optimizer)
        variable = keras.Variable([1.0])

        @tf.function
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_sum(variable * x))
            optimizer.apply(tape.gradient(loss, [variable.value]), [variable])

        step(tf.constant(1.0))
        assert files() > before
        return [weakref.ref(one) for one in (optimizer, variable, optimizer.manager)]

    kept = train()
    gc.collect()
    assert [one() for one in kept] == [None] * 3
    assert files() <= before


def test_the_search_is_made_where_the_function_is_called() -> None:
    """In a cluster that is the process that asks for the step, not the one that runs it."""

    host = Host()

    @tf.function
    def step(number: tf.Tensor) -> tf.Tensor:
        return call_where_built(Host.told, host, [number], lambda: tf.constant(False))

    made = step.get_concrete_function(tf.TensorSpec([], tf.int64)).graph.as_graph_def()
    nodes = [
        *made.node,
        *(node for function in made.library.function for node in function.node_def),
    ]
    places = {node.op: node.device for node in nodes if node.op in ("MatchingFiles", "PyFunc")}
    assert len(places) == 2
    assert places["MatchingFiles"] == places["PyFunc"]
    assert "/task:0" in places["PyFunc"]
