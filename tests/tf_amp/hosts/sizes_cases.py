"""Scripts for `test_function_sizes`: what runs for a batch that tracing did not know."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from function_harness import compute_types, node_types, report, running, switch_on, weights
from tensorflow.python.eager import context, execute
from tensorflow.python.saved_model import loader_impl

from graph_passes import FunctionRemarks
from tf_amp import installation
from tf_amp.hosts import function, function_calls
from tf_amp.hosts.function_redirects import called_names

WIDTH = 64
UNKNOWN = tf.TensorSpec((None, WIDTH), tf.float32)


def ran(call: Any) -> list[int]:
    """The dtypes of the products of the functions that the runtime is asked to run by a call."""
    names: list[str] = []

    def recording(original: Any) -> Any:
        def record(op_name: str, *args: Any, **kwargs: Any) -> Any:
            names.append(op_name)
            return original(op_name, *args, **kwargs)

        return record

    # The second one is that of a coordinator.
    with contextlib.ExitStack() as patches:
        for name in ("execute", "execute_with_cancellation"):
            wrapped = recording(getattr(execute, name))
            patches.enter_context(mock.patch.object(execute, name, wrapped))
        call()
    found: set[int] = set()
    for name in names:  # those that functions call are found on the way
        if context.context().has_function(name):
            found.update(compute_types(running(name)))
            names.extend({*called_names(running(name))}.difference(names))
    return sorted(found)


def variants() -> dict[str, list[int]]:
    """The dtypes of the products of all variants in the runtime, by the end of their names."""
    names = [name for name in context.context().list_function_names() if "tf_amp_size" in name]
    return {name.rpartition("_")[2]: compute_types(running(name)) for name in sorted(names)}


@contextlib.contextmanager
def planned() -> Iterator[list[int]]:
    """Collects the sizes for which functions with products are planned."""
    sizes: list[int] = []
    rewrite = function_calls.rewrite_function_def

    def noting(definition: Any, **options: Any) -> Any:
        if any(node.op == "MatMul" for node in definition.node_def):
            sizes.append(options["config"].unknown_dimension)
        return rewrite(definition, **options)

    with mock.patch.object(function_calls, "rewrite_function_def", noting):
        yield sizes


def hear() -> list[str]:
    """Collects the lines that are said at INFO or above, from now on."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tf_amp").addHandler(handler)
    return lines


class Dense(tf.Module):
    def __init__(self) -> None:
        self.weights = tf.Variable(weights(shape=(WIDTH, WIDTH)))

    @tf.function(input_signature=[UNKNOWN])
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self.weights)


def arguments() -> None:
    """A function whose argument shows the size."""
    installed = switch_on(cost_table=sys.argv[1])
    said = hear()
    layer = Dense()
    few, many = tf.ones((32, WIDTH)), tf.constant(weights(1, (3000, WIDTH)))
    report("traced", types=compute_types(running(layer.__call__.get_concrete_function().name)))
    report("not said", lines=list(said))
    report("few", ran=ran(functools.partial(layer, few)), variants=variants())
    report("many", ran=ran(functools.partial(layer, many)), variants=variants())
    again = ran(functools.partial(layer, few))
    result = layer(many)
    report(
        "again",
        few=again,
        many=ran(functools.partial(layer, many)),
        dtype=result.dtype.name,
        error=float(tf.reduce_max(tf.abs(result - tf.matmul(many, layer.weights)))),
        status=installed.status().as_dict(),
    )
    # What lasts gets a variant of its own, and an odd batch in between does not.
    layer(tf.ones((2, WIDTH)))
    report("odd one", variants=variants())
    layer(tf.ones((2, WIDTH)))
    report("two of them", variants=variants())
    report("said", lines=list(said))

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(many))
    tape.gradient(loss, layer.weights)

    tf.saved_model.save(layer, sys.argv[2])
    library = loader_impl.parse_saved_model(sys.argv[2]).meta_graphs[0].graph_def.library
    report(
        "exported",
        names=[f.signature.name for f in library.function if "tf_amp" in f.signature.name],
        types=node_types([node for f in library.function for node in f.node_def]),
    )
    installation.uninstall()
    report("off", ran=ran(functools.partial(layer, many)))
    del layer, tape, loss
    gc.collect()
    report("gone", variants=variants())


def loaded() -> None:
    """The functions of a SavedModel: nothing shows their sizes before they are called."""
    installed = switch_on(cost_table=sys.argv[1])
    said = hear()
    with planned() as plans:
        model = tf.saved_model.load(sys.argv[2])
        status = installed.status
        named = [f.name for f in status().functions]
        report("loaded", lines=list(said), named=named, planned=list(plans))
        signature = model.signatures["serving_default"]
        signature(tf.constant(weights(1, (3000, WIDTH))))
    named = [f.name for f in status().functions]
    report("called", lines=list(said), named=named, planned=plans)


def exported_only() -> None:
    """What is traced to be written, and never called."""
    import keras

    installed = switch_on(cost_table=sys.argv[1])
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
    with planned() as plans:
        model.export(sys.argv[2])
        tf.lite.TFLiteConverter.from_saved_model(sys.argv[2]).convert()
    report("written", planned=plans, rows=[f.name for f in installed.status().functions])


def iterators(which: str, given: str) -> None:
    """`fit` on data whose last batch is smaller, so that no batch is known."""
    if which == "keras":
        import keras
    else:
        import tf_keras as keras
    switch_on(cost_table=sys.argv[1])
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, use_bias=False)])
    model.compile("sgd", "mse", jit_compile=False)
    rows = 5 * 2048 + 7
    x, y = (np.ones((rows, WIDTH), np.float32) for _ in range(2))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2048).prefetch(1)
    if given == "generator":
        spec = data.element_spec
        data = tf.data.Dataset.from_generator(lambda b=data: iter(b), output_signature=spec)
    weights_before = model.get_weights()
    said = hear()

    def fit(batches: int) -> Any:
        if given == "arrays":
            kept = slice((batches - 1) * 2048 + 7)
            return lambda: model.fit(x[kept], y[kept], batch_size=2048, verbose=0)
        return lambda: model.fit(data.take(batches), verbose=0)

    with planned() as plans:
        first, rest, after = ran(fit(2)), ran(fit(6)), ran(fit(5))
    report(
        "fit",
        plans=plans,
        first=first,
        rest=rest,
        after=after,
        sizes=sorted(variants()),
        said=said,
        moved=not np.array_equal(weights_before[0], model.get_weights()[0]),
        finite=bool(np.isfinite(model.get_weights()[0]).all()),
    )


def loops() -> None:
    """Loops over batches in functions, which show their size to nobody."""
    switch_on(cost_table=sys.argv[1])
    weight = tf.Variable(weights(shape=(WIDTH, WIDTH)))
    rows = weights(1, (2 * 2048 + 7, WIDTH))

    def batches(size: int) -> Any:
        return tf.data.Dataset.from_tensor_slices(rows).batch(size)

    def total(data: Any) -> tf.Tensor:
        found = tf.zeros((WIDTH,))
        for x in data:
            found += tf.reduce_sum(tf.matmul(x, weight), 0)
        return found

    def from_iterator(data: Any) -> tf.Tensor:
        found = tf.zeros((WIDTH,))
        for _ in tf.range(3):
            found += tf.reduce_sum(tf.matmul(next(data), weight), 0)
        return found

    def until(data: Any) -> tf.Tensor:
        found = tf.zeros((WIDTH,))
        for x in data.map(lambda x: tf.matmul(x, tf.eye(WIDTH))):
            found += tf.reduce_sum(tf.matmul(x, weight), 0)
            if tf.reduce_any(found > 1e9):
                break
        return found

    inner = tf.function(lambda x: tf.matmul(x, weight))

    def through(data: Any) -> tf.Tensor:
        found = tf.zeros((WIDTH,))
        for x in data:
            found += tf.reduce_sum(inner(x), 0)
        return found

    exact = tf.reduce_sum(tf.matmul(rows, weight), 0)
    many, few, untold = batches(2048), batches(2), batches(2048)
    tell = untold.element_spec
    untold = tf.data.Dataset.from_generator(lambda b=untold: iter(b), output_signature=tell)

    def calls_of(body: Any, given: Any = lambda data: data) -> list[Any]:
        step = tf.function(body)
        return [lambda data=data: step(given(data)) for data in (many, few, untold, many)]

    def small_ones(split: Any) -> list[Any]:
        step = tf.function(total)
        return [lambda: step(split(many))]

    kinds = {
        "rebatch": small_ones(lambda data: data.rebatch(2)),
        "within": small_ones(
            lambda data: data.flat_map(lambda x: tf.data.Dataset.from_tensor_slices(x).batch(2))
        ),
        "argument": calls_of(total),
        "break": calls_of(until),
        "calls": calls_of(through),
        "captured": [tf.function(lambda: total(many))],
        "iterator": calls_of(from_iterator, iter),
    }
    for kind, calls in kinds.items():
        said = hear()
        with planned() as plans:
            seen = [ran(call) for call in calls]
        error = float(tf.reduce_max(tf.abs(calls[-1]() - exact)) / tf.reduce_max(tf.abs(exact)))
        report(kind, seen=seen, said=said, error=error, plans=plans)


def beside() -> None:
    """A step that reads a batch from an iterator, and loops over another data set."""
    switch_on(cost_table=sys.argv[1])
    said = hear()
    weight = tf.Variable(weights(shape=(WIDTH, WIDTH)))
    batches = tf.data.Dataset.from_tensor_slices(weights(1, (2 * 2048, WIDTH))).batch(2048)

    @tf.function
    def step(iterator: Any) -> tf.Tensor:
        found = tf.reduce_sum(tf.matmul(next(iterator), weight))
        for x in batches:
            found += tf.reduce_sum(tf.matmul(x, weight))
        return found

    report("beside", ran=ran(lambda: step(iter(batches))), said=said)


def in_callback(which: str) -> None:
    """A callback that goes through batches of its own, while `fit` has larger ones."""
    if which == "keras":
        import keras
    else:
        import tf_keras as keras
    switch_on(cost_table=sys.argv[1])
    weight = tf.Variable(weights(shape=(WIDTH, WIDTH)))
    rows = weights(1, (2048, WIDTH))
    few = tf.data.Dataset.from_tensor_slices(rows[:7]).batch(2)

    @tf.function
    def total(data: Any) -> tf.Tensor:
        found = tf.zeros(())
        for x in data:
            found += tf.reduce_sum(tf.matmul(x, weight))
        return found

    seen: list[int] = []

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.extend(ran(lambda: total(iter(few))))

    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(rows, rows, batch_size=2048, verbose=0, callbacks=[Own()])
    report("callback", seen=seen)


def steps_per_execution(which: str) -> None:
    """`fit` that takes several steps in one call."""
    if which == "keras":
        import keras
    else:
        import tf_keras as keras
    switch_on(cost_table=sys.argv[1])
    said = hear()
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, use_bias=False)])
    model.compile("sgd", "mse", jit_compile=False, steps_per_execution=2)
    x, y = (np.ones((5 * 2048 + 7, WIDTH), np.float32) for _ in range(2))
    seen = ran(lambda: model.fit(x, y, batch_size=2048, verbose=0))
    report("steps", seen=seen, said=said)


def sequence() -> None:
    """`fit` on what makes its batches in Python."""
    import tf_keras as keras

    switch_on(cost_table=sys.argv[1])
    said = hear()

    class Batches(keras.utils.Sequence):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, _: int) -> Any:
            return tuple(np.ones((256, 64, 16), np.float32) for _ in range(2))

    model = keras.Sequential([keras.Input((64, 16)), keras.layers.Dense(16)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(Batches(), verbose=0)
    report("sequence", said=said)


def replicas(which: str) -> None:
    """`fit` under a strategy, where a branch decides whether a replica gets anything."""
    if which == "keras":
        import keras
    else:
        import tf_keras as keras
    cpus = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
    switch_on(cost_table=sys.argv[1])
    keras.utils.set_random_seed(0)
    said = hear()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, use_bias=False)])
        model.compile("sgd", "mse")
    rows = 4 * 4096 + 1  # of the last one a replica gets nothing
    x, y = (np.ones((rows, WIDTH), np.float32) for _ in range(2))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4096)
    first = ran(lambda: model.fit(data.take(1), verbose=0))
    rest = ran(lambda: model.fit(data, verbose=0))
    loss = model.evaluate(data, verbose=0)
    report("replicas", first=first, rest=rest, said=said, finite=bool(np.isfinite(loss)))


SERVER = """
import os, sys
import tensorflow as tf
job, index, worker, ps = sys.argv[1:]
cluster = {"worker": [worker], "ps": [ps]}
tf.distribute.Server(cluster, job_name=job, task_index=int(index))
sys.stdin.read()  # ends with the coordinator, however that ends
os._exit(0)
"""


def servers() -> None:
    """A step that runs in the process of a worker, which is asked once for the size."""
    switch_on(cost_table=sys.argv[1])
    addresses = [f"localhost:{port}" for port in sys.argv[2:4]]
    cluster = dict(zip(("worker", "ps"), ([address] for address in addresses), strict=True))
    for job in cluster:
        command = [sys.executable, "-c", SERVER, job, "0", *addresses]
        subprocess.Popen(command, stdin=subprocess.PIPE)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    said = hear()
    with strategy.scope():
        weight = tf.Variable(weights(shape=(WIDTH, WIDTH)))
    x = weights(1, (2048, WIDTH))

    def batches() -> Any:
        return tf.data.Dataset.from_tensor_slices(x).batch(2048).repeat()

    @tf.function
    def step(iterator: Any) -> tf.Tensor:
        return strategy.run(lambda x: tf.matmul(x, weight), args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    results = []

    def call() -> None:
        results.append(coordinator.schedule(step, args=(iterator,)))
        coordinator.join()

    calls = [ran(call) for _ in range(3)]
    exact = tf.matmul(x, weight)
    errors = [float(tf.reduce_max(tf.abs(coordinator.fetch(r) - exact))) for r in results]
    report("servers", calls=calls, errors=errors, said=said)
    os._exit(0)  # servers are never joined


def called_later() -> None:
    """A function that was planned for a size before another one that calls it was traced."""
    installed = switch_on(cost_table=sys.argv[1])
    weight, x = tf.Variable(weights(shape=(WIDTH, WIDTH))), tf.constant(weights(1, (3000, WIDTH)))

    @tf.function(input_signature=[UNKNOWN])
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.matmul(x, weight))

    @tf.function(input_signature=[UNKNOWN])
    def outer(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(2):
            x = inner(x)
        return x

    for each in (inner, outer):
        each(x)
        report(each.__name__, rows=[row.name for row in installed.status().functions])


def traced() -> None:
    """A function that calls another one by its name, which has a plan of its own for each size."""
    import keras

    switch_on(cost_table=sys.argv[1], log_path=sys.argv[2])
    weight = tf.Variable(weights(shape=(WIDTH, WIDTH)))

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.matmul(x, weight))

    @tf.function(input_signature=[UNKNOWN])
    def outer(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(2):
            x = inner(x)
        return x

    @tf.function(input_signature=[UNKNOWN])
    def any_rows(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.matmul(x, weight))

    @tf.function
    def known_rows(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(2):
            x = tf.ensure_shape(any_rows(x), x.shape)
        return x

    many = weights(1, (2048, WIDTH))
    outer(tf.constant(many))
    known_rows(tf.constant(many))
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(tf.data.Dataset.from_tensor_slices((many, many)).batch(2048), verbose=0)
    found = {}
    for path in sorted(pathlib.Path(sys.argv[2]).glob("*/remarks_*")):
        remarks = FunctionRemarks.from_lines(path.read_text().splitlines())
        products = [r.kind for r in remarks.remarks if r.op == "MatMul"]
        found[remarks.name] = [remarks.unknown_dimension, products]
    report("traced", found=found)


def faults() -> None:
    """A plan for a size that raises costs nothing but the plan."""
    switch_on(cost_table=sys.argv[1])
    layer, wide = Dense(), Dense()
    wide.weights = tf.Variable(weights(shape=(WIDTH, 64 * WIDTH)))
    few, many = tf.ones((32, WIDTH)), tf.constant(weights(1, (2048, WIDTH)))
    layer(few)
    wide(few)
    said = hear()

    def fail(*_: Any) -> Any:
        raise tf.errors.InternalError(None, None, "planted")

    @tf.function
    def step(iterator: Any) -> tf.Tensor:
        return tf.matmul(next(iterator), layer.weights)

    function_calls.plan_anew = fail
    exact = tf.matmul(many, layer.weights)
    untold = tf.data.Dataset.from_generator(lambda: iter([many] * 3), output_signature=UNKNOWN)
    iterator = iter(untold)
    for name, call in (("fault", lambda: layer(many)), ("later", lambda: step(iterator))):
        error = float(tf.reduce_max(tf.abs(call() - exact)))
        status = installation.current().status()
        report(name, error=error, failed=status["graphs_failed"])
    report("low", ran=ran(lambda: wide(many)), said=[line for line in said if "fault" in line])


def reentrant() -> None:
    """Calls from handlers: of a signal while the function is planned, of the line about it."""
    switch_on(cost_table=sys.argv[1])
    faulthandler.dump_traceback_later(60, exit=True)
    layer, many = Dense(), tf.constant(weights(1, (3000, WIDTH)))
    within: list[tf.Tensor] = []
    waited: list[bool] = []
    real = function.plan_anew

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return real(*args)

    def call_elsewhere(_: logging.LogRecord) -> None:
        thread = threading.Thread(target=layer, args=(many,), daemon=True)
        thread.start()
        thread.join(20)
        waited.append(thread.is_alive())

    signal.signal(signal.SIGUSR1, lambda *_: within.append(layer(many)))
    function.plan_anew = interrupted
    said = hear()
    handler = logging.Handler(logging.INFO)
    handler.emit = call_elsewhere  # type: ignore[method-assign]
    logging.getLogger("tf_amp").addHandler(handler)
    exact = tf.matmul(many, layer.weights)
    error = float(tf.reduce_max(tf.abs(layer(many) - exact)))
    of_handler = [float(tf.reduce_max(tf.abs(each - exact))) for each in within]
    report(
        "reentrant",
        error=error,
        of_handler=of_handler,
        said=said,
        waited=waited,
        sizes=[*variants()],
    )


def small() -> None:
    """A function of which a part pays for a middling batch, and nothing for a small one."""
    switch_on(cost_table=sys.argv[1])
    layer = Dense()
    layer.weights = tf.Variable(weights(shape=(WIDTH, 64 * WIDTH)))
    middling, few = tf.ones((32, WIDTH)), tf.ones((2, WIDTH))

    @tf.function(input_signature=[UNKNOWN])
    def around(x: tf.Tensor) -> tf.Tensor:
        return layer(x)

    around.get_concrete_function()
    report("small", middling=ran(lambda: around(middling)), few=ran(lambda: around(few)))


def known_callers() -> None:
    """Functions of known shapes that call one which was traced without its batch."""
    switch_on(cost_table=sys.argv[1])
    said = hear()
    layer = Dense()

    @tf.function(input_signature=[UNKNOWN])
    def around(x: tf.Tensor) -> tf.Tensor:
        return layer(x)

    def call(x: tf.Tensor) -> tf.Tensor:
        return layer(x)

    def deep(x: tf.Tensor) -> tf.Tensor:
        return around(x)

    def loop(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(2):
            x = layer(x) / float(WIDTH)
        return x

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, layer.weights)

    for body in (call, deep, loop, gradient):
        seen = {}
        for rows in (2048, 2):
            step = tf.function(body, input_signature=[tf.TensorSpec((rows, WIDTH))])
            seen[str(rows)] = ran(functools.partial(step, tf.ones((rows, WIDTH))))
        report(body.__name__, seen=seen)
    report("alone", ran=ran(lambda: layer(tf.ones((2, WIDTH)))), said=said)


def near() -> None:
    """A batch near to the one that is assumed, where another plan is better."""
    switch_on(cost_table=sys.argv[1])
    layer = Dense()
    layer.weights = tf.Variable(weights(shape=(WIDTH, 6 * WIDTH)))
    types = compute_types(running(layer.__call__.get_concrete_function().name))
    report("near", assumed=types, seen=ran(lambda: layer(tf.ones((60, WIDTH)))))


def seeds() -> None:
    """A function whose random numbers a seed determines: they are those of the program as it is."""
    rows = tf.ones((2048, WIDTH))

    def draws() -> list[float]:
        layer = Dense()
        tf.random.set_seed(1)

        @tf.function
        def inner(x: tf.Tensor) -> tf.Tensor:
            return tf.random.uniform((), seed=2) + 0.0 * tf.reduce_sum(layer(x))

        step = tf.function(lambda x: inner(x), input_signature=[UNKNOWN])
        few = [float(step(rows[:2])) for _ in range(2)]
        return few + [float(step(rows)) for _ in range(3)]

    plain = draws()
    switch_on(cost_table=sys.argv[1])
    report("seeds", plain=plain, drawn=draws())


def states() -> None:
    """Functions that count in a kernel, or in what others find by its name, which stays."""
    rows, v1 = tf.ones((2048, WIDTH)), tf.compat.v1

    def iterator() -> tf.Tensor:
        return v1.data.make_one_shot_iterator(tf.data.Dataset.range(9)).get_next()

    def variable() -> tf.Tensor:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=(), shared_name="count")
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)

    def table() -> tf.Tensor:
        handle = tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64, value_dtype=tf.int64, use_node_name_sharing=True
        )
        return tf.raw_ops.LookupTableSizeV2(table_handle=handle)

    def counts(count: Any) -> list[int]:
        layer = Dense()
        inner = tf.function(lambda x: (count(), layer(x)))
        step = tf.function(lambda x: inner(x)[0], input_signature=[UNKNOWN])
        few = [int(step(rows[:2])) for _ in range(2)]
        return few + [int(step(rows)) for _ in range(3)]

    handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=(), shared_name="count")
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(7, tf.int64))
    switch_on(cost_table=sys.argv[1])
    said = hear()
    for count in (iterator, variable, table):
        counted = counts(count)
        kept = [line for line in said if "not planned again" in line]
        report(count.__name__, counted=counted, said=kept)
        said.clear()


def saved_with_seeds() -> None:
    """A model with dropout by a seed: what is traced to be saved, or loaded, is not called."""
    import tf_keras

    switch_on(cost_table=sys.argv[1])
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tf_amp").addHandler(handler)
    logging.getLogger("tf_amp").setLevel(logging.INFO)

    def said() -> list[str]:
        found = [line for line in lines if "not planned again" in line]
        lines.clear()
        return found

    tf_keras.utils.set_random_seed(1)
    block = tf_keras.Sequential(
        [tf_keras.layers.Dense(WIDTH, input_shape=(WIDTH,)), tf_keras.layers.Dropout(0.1, seed=3)]
    )
    model = tf_keras.Sequential([tf_keras.Input((WIDTH,)), block, tf_keras.layers.Dense(WIDTH)])
    run = tf.function(lambda x: model(x, training=True), input_signature=[UNKNOWN])
    run(tf.ones((2048, WIDTH)))
    called = said()
    model.save(sys.argv[2], save_format="tf")
    tf.saved_model.load(sys.argv[2])
    report("said", called=called, saved_and_loaded=said())
