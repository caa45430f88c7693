r"""Packages with few programs each: equations, Gaussian processes, graphs, quantization, audio.

Many pin versions that no TensorFlow of today has, so they are installed apart from what they use:

    pip install scipy networkx matplotlib scikit-image scikit-learn scikit-optimize pandas \
        check_shapes deprecated multipledispatch tabulate kt-legacy terminaltables
    pip install --no-deps deepxde gpflow deepctr keras-tcn keras-rs keras-tuner kapre larq \
        zookeeper==1.0b1 spektral tensorflow-lattice tensorflow-model-optimization tf-keras-vis \
        keras-unet-collection segmentation-models efficientnet==1.0.0 image-classifiers==1.0.0 \
        keras-applications==1.0.8
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from field_programs.program import LEGACY_KERAS, Program, Running, fitted

_LEGACY_MODELS = {**LEGACY_KERAS, "SM_FRAMEWORK": "tf.keras"}


def _classes(count: int, *shape: int, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    examples = rng.normal(size=(count, *shape)).astype("float32")
    return examples, rng.integers(0, classes, count)


def _on_arrays(model: Any, x: Any, y: Any, batch: int = 32, **options: Any) -> Running:
    return Running(
        step=lambda: model.fit(x, y, batch_size=batch, verbose=0, **options).history["loss"][-1],
        outputs=lambda: {"predict": model.predict(x, batch_size=batch, verbose=0)},
    )


def _seeded_deepxde() -> Any:
    """The package, whose initializers take their seeds when it is imported."""
    random.seed(1)
    import deepxde

    deepxde.config.set_random_seed(1)
    return deepxde


def _poisson() -> Running:
    """DeepXDE: a network that solves an equation has second derivatives in its loss."""
    dde = _seeded_deepxde()
    import tensorflow as tf

    def equation(x: Any, y: Any) -> Any:
        return -dde.grad.hessian(y, x) - np.pi**2 * tf.sin(np.pi * x)

    line = dde.geometry.Interval(-1, 1)
    ends = dde.icbc.DirichletBC(line, lambda x: 0, lambda _, on: on)
    data = dde.data.PDE(line, equation, ends, 512, 2, num_test=100)
    model = dde.Model(data, dde.nn.FNN([1, *[256] * 3, 1], "tanh", "Glorot uniform"))
    model.compile("adam", lr=1e-3, verbose=0)

    def step() -> float:
        history, _ = model.train(iterations=5, display_every=5, verbose=0)
        return float(np.sum(history.loss_train[-1]))

    return Running(step, lambda: {"solution": model.predict(np.linspace(-1, 1, 50)[:, None])})


def _operator() -> Running:
    """DeepXDE: DeepONet on a cartesian product of functions and points."""
    dde = _seeded_deepxde()
    rng = np.random.default_rng(1)
    functions = rng.normal(size=(150, 100)).astype("float32")
    points = np.linspace(0, 1, 100, dtype="float32")[:, None]
    sums = np.cumsum(functions, axis=1) / 100
    data = dde.data.TripleCartesianProd((functions, points), sums, (functions, points), sums)
    network = dde.nn.DeepONetCartesianProd([100, 256, 256], [1, 256, 256], "relu", "Glorot normal")
    model = dde.Model(data, network)
    model.compile("adam", lr=1e-3, verbose=0)

    def step() -> float:
        history, _ = model.train(iterations=5, display_every=5, verbose=0)
        return float(np.sum(history.loss_train[-1]))

    return Running(step, lambda: {"sums": model.predict((functions[:10], points))})


def _gaussian_process(default: str) -> Running:
    """GPflow: a sparse variational process, in float64 as it comes, or in float32."""
    import gpflow
    import tensorflow as tf

    gpflow.config.set_default_float(getattr(np, default))
    gpflow.config.set_default_jitter(1e-4)
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 6, (512, 4)).astype(default)
    y = np.sin(x[:, :1]).astype(default)
    model = gpflow.models.SVGP(
        gpflow.kernels.SquaredExponential(lengthscales=[1.0] * 4),
        gpflow.likelihoods.Gaussian(),
        inducing_variable=x[:128].copy(),
        num_data=512,
    )
    optimizer = tf.keras.optimizers.Adam(0.01)
    loss = model.training_loss_closure((x, y))

    @tf.function
    def trained() -> Any:
        optimizer.minimize(loss, model.trainable_variables)
        return loss()

    return Running(
        trained, lambda: dict(zip(("mean", "variance"), model.predict_f(x[:20]), strict=True))
    )


def _clicks(name: str) -> Running:
    """DeepCTR: what users click, from sparse and dense features."""
    import deepctr.models
    import tensorflow as tf
    from deepctr.feature_column import DenseFeat, SparseFeat, get_feature_names

    tf.keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    columns = [SparseFeat(f"C{n}", 100, embedding_dim=16) for n in range(8)]
    columns += [DenseFeat(f"I{n}", 1) for n in range(4)]
    model = getattr(deepctr.models, name)(columns, columns, task="binary")
    model.compile("adam", "binary_crossentropy")
    rows = {
        n: rng.integers(0, 100, 512) if n[0] == "C" else rng.normal(size=512).astype("float32")
        for n in get_feature_names(columns)
    }
    return _on_arrays(model, rows, rng.integers(0, 2, 512).astype("float32"), 256)


def _dilated() -> Running:
    """keras-tcn: dilated causal convolutions with weight normalization off and skips."""
    import keras
    from tcn import TCN

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((64, 16)), TCN(64, dropout_rate=0.1), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    x, _ = _classes(64, 64, 16)
    return _on_arrays(model, x, x[:, -1, :1])


def _crossed() -> Running:
    """Keras Recommenders: crossed features and dot interactions of embeddings."""
    import keras
    import keras_rs

    keras.utils.set_random_seed(1)
    inputs = [keras.Input((), name=f"f{n}", dtype="int32") for n in range(6)]
    embedded = [keras.layers.Embedding(100, 64)(one) for one in inputs]
    crossed = keras_rs.layers.FeatureCross(projection_dim=32)(keras.layers.Concatenate()(embedded))
    dots = keras_rs.layers.DotInteraction()(embedded)
    x = keras.layers.Dense(256, "relu")(keras.layers.Concatenate()([crossed, dots]))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("adagrad", "mse")
    rng = np.random.default_rng(1)
    rows = {f"f{n}": rng.integers(0, 100, 512).astype("int32") for n in range(6)}
    return _on_arrays(model, rows, rng.normal(size=512).astype("float32"), 128)


def _searched() -> Running:
    """Keras Tuner: several models in one process, each built, trained and thrown away."""
    import tempfile

    import keras
    import keras_tuner

    keras.utils.set_random_seed(1)
    x, y = _classes(128, 64)

    def build(choice: Any) -> Any:
        width = choice.Choice("width", [256, 512])
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(width, "relu")])
        model.add(keras.layers.Dense(width, "relu"))
        model.add(keras.layers.Dense(10))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(choice.Choice("rate", [1e-3, 1e-2])), loss)
        return model

    folder = tempfile.mkdtemp()
    tuner = keras_tuner.GridSearch(
        build, objective="val_loss", max_trials=3, directory=folder, seed=1, overwrite=True
    )
    tuner.search(x, y, epochs=1, validation_data=(x, y), verbose=0)
    (model,) = tuner.get_best_models(1)
    return _on_arrays(model, x, y)


def _calibrated() -> Running:
    """TensorFlow Lattice: monotonic calibration and a lattice, with constraints on weights."""
    import tensorflow as tf
    import tensorflow_lattice as tfl

    tf.keras.utils.set_random_seed(1)
    keypoints = np.linspace(-2.0, 2.0, 10)
    inputs = [tf.keras.Input((1,)) for _ in range(4)]
    calibrated = [
        tfl.layers.PWLCalibration(
            keypoints, output_min=0.0, output_max=1.0, monotonicity="increasing"
        )(one)
        for one in inputs
    ]
    lattice = tfl.layers.Lattice([2] * 4, monotonicities=["increasing"] * 4)(calibrated)
    model = tf.keras.Model(inputs, lattice)
    model.compile(tf.keras.optimizers.Adagrad(0.1), "mse")
    x, _ = _classes(256, 4)
    return _on_arrays(model, [x[:, n : n + 1] for n in range(4)], x.sum(1), 64)


def _messages(attention: bool) -> Running:
    """Spektral: convolutions over the nodes of one graph, which is a sparse or a dense matrix."""
    import tensorflow as tf
    from spektral.layers import GATConv, GCNConv
    from spektral.utils.convolution import gcn_filter

    tf.keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    x, y = _classes(256, 128)
    links = (rng.random((256, 256)) < 0.05).astype("float32")
    links = np.maximum(links, links.T)
    nodes = tf.keras.Input((128,))
    if attention:
        edges = tf.keras.Input((256,))
        hidden = GATConv(64, attn_heads=4, activation="elu")([nodes, edges])
        found = GATConv(10)([hidden, edges])
        matrix: Any = links
    else:
        from scipy import sparse
        from spektral.utils.sparse import sp_matrix_to_sp_tensor

        edges = tf.keras.Input((256,), sparse=True)
        hidden = GCNConv(256, activation="relu")([nodes, edges])
        found = GCNConv(10)([tf.keras.layers.Dropout(0.2)(hidden), edges])
        matrix = sp_matrix_to_sp_tensor(gcn_filter(sparse.csr_matrix(links)))
    model = tf.keras.Model([nodes, edges], found)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    data = tf.data.Dataset.from_tensors(((x, matrix), y))
    return Running(
        step=lambda: model.fit(data, verbose=0).history["loss"][-1],
        outputs=lambda: {"predict": model.predict(data, verbose=0)},
    )


def _small_network(tf: Any) -> Any:
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(64, 3, padding="same", input_shape=(32, 32, 3)),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.ReLU(),
            tf.keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )


def _quantized() -> Running:
    """Model Optimization: training that simulates int8."""
    import tensorflow as tf
    import tensorflow_model_optimization as tfmot

    model = tfmot.quantization.keras.quantize_model(_small_network(tf))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(1e-4), loss)
    return _on_arrays(model, *_classes(64, 32, 32, 3))


def _pruned() -> Running:
    """Model Optimization: weights pruned while they train, by a counter of steps."""
    import tensorflow as tf
    import tensorflow_model_optimization as tfmot

    schedule = tfmot.sparsity.keras.PolynomialDecay(0.0, 0.8, begin_step=0, end_step=6, frequency=1)
    model = tfmot.sparsity.keras.prune_low_magnitude(_small_network(tf), pruning_schedule=schedule)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(1e-4), loss)
    x, y = _classes(64, 32, 32, 3)
    running = _on_arrays(model, x, y, callbacks=[tfmot.sparsity.keras.UpdatePruningStep()])

    def outputs() -> Mapping[str, Any]:
        kernel = model.layers[-1].get_weights()[0]
        return {**running.outputs(), "pruned": np.float32((kernel == 0).mean())}

    return Running(running.step, outputs)


def _binary() -> Running:
    """Larq: weights and activations of -1 and 1, with gradients of their own."""
    import larq
    import tensorflow as tf

    tf.keras.utils.set_random_seed(1)
    binary = {
        "input_quantizer": "ste_sign",
        "kernel_quantizer": "ste_sign",
        "kernel_constraint": "weight_clip",
    }
    model = tf.keras.Sequential(
        [
            larq.layers.QuantConv2D(
                64, 3, kernel_quantizer="ste_sign", use_bias=False, input_shape=(32, 32, 3)
            ),
            tf.keras.layers.BatchNormalization(scale=False),
            larq.layers.QuantConv2D(64, 3, use_bias=False, **binary),
            tf.keras.layers.BatchNormalization(scale=False),
            tf.keras.layers.Flatten(),
            larq.layers.QuantDense(10, **binary),
            tf.keras.layers.Activation("softmax"),
        ]
    )
    model.compile(tf.keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy")
    return _on_arrays(model, *_classes(64, 32, 32, 3))


def _segmented(build: str) -> Running:
    """Segmentation networks of two packages, with losses on pixels."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(1)
    if build == "Unet":
        import segmentation_models

        model = segmentation_models.Unet(
            "resnet18",
            encoder_weights=None,
            classes=4,
            activation="softmax",
            input_shape=(64, 64, 3),
        )
        model.compile(tf.keras.optimizers.SGD(1e-4), segmentation_models.losses.cce_dice_loss)
    else:
        from keras_unet_collection import models

        given = {
            "att_unet_2d": {"filter_num": [32, 64, 128], "backbone": None},
            "swin_unet_2d": {
                "filter_num_begin": 32,
                "depth": 3,
                "stack_num_down": 2,
                "stack_num_up": 2,
                "patch_size": (2, 2),
                "num_heads": [4, 4, 4],
                "window_size": [4, 4, 4],
                "num_mlp": 128,
            },
        }[build]
        model = getattr(models, build)((64, 64, 3), n_labels=4, **given)
        model.compile(tf.keras.optimizers.SGD(1e-4), "categorical_crossentropy")
    rng = np.random.default_rng(1)
    images = rng.normal(size=(16, 64, 64, 3)).astype("float32")
    labels = np.eye(4, dtype="float32")[rng.integers(0, 4, (16, 64, 64))]
    return _on_arrays(model, images, labels, 8)


def _spectrograms() -> Running:
    """Kapre: spectrograms within the model, which are Fourier transforms."""
    import tensorflow as tf
    from kapre.composed import get_stft_magnitude_layer

    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [
            get_stft_magnitude_layer((8000, 1), n_fft=512, hop_length=128, return_decibel=True),
            tf.keras.layers.Conv2D(64, 3, activation="relu"),
            tf.keras.layers.Conv2D(64, 3, activation="relu"),
            tf.keras.layers.GlobalAveragePooling2D(),
            tf.keras.layers.Dense(10),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(1e-4), loss)
    return _on_arrays(model, *_classes(16, 8000, 1), 8)


def _attributed() -> Running:
    """tf-keras-vis: which pixels decide, by gradients of a trained model."""
    import tensorflow as tf
    from tf_keras_vis.saliency import Saliency
    from tf_keras_vis.utils.scores import CategoricalScore

    model = _small_network(tf)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(1e-3), loss)
    x, y = _classes(64, 32, 32, 3)
    score = CategoricalScore(list(range(4)))

    def outputs() -> Mapping[str, Any]:
        return {
            "saliency": Saliency(model, clone=True)(score, x[:4]),
            "smoothed": Saliency(model, clone=True)(score, x[:4], smooth_samples=8),
        }

    return Running(
        fitted(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(32), x).step, outputs
    )


def _programs() -> list[Program]:
    equations = {"DDE_BACKEND": "tensorflow"}
    sessions = {"DDE_BACKEND": "tensorflow.compat.v1"}
    keras_3 = {"KERAS_BACKEND": "tensorflow"}
    rows: list[tuple[str, str, Any, Mapping[str, str]]] = [
        ("deepxde/poisson", "deepxde", _poisson, equations),
        ("deepxde/deeponet", "deepxde", _operator, equations),
        ("deepxde/poisson v1", "deepxde", _poisson, sessions),
        ("deepxde/deeponet v1", "deepxde", _operator, sessions),
        ("gpflow/float64", "gpflow", functools.partial(_gaussian_process, "float64"), LEGACY_KERAS),
        ("gpflow/float32", "gpflow", functools.partial(_gaussian_process, "float32"), LEGACY_KERAS),
        *(
            (f"deepctr/{name}", "deepctr", functools.partial(_clicks, name), LEGACY_KERAS)
            for name in ("DeepFM", "xDeepFM", "DCNMix", "AutoInt", "FiBiNET")
        ),
        ("keras_tcn/TCN", "tcn", _dilated, keras_3),
        ("keras_rs/cross", "keras_rs", _crossed, keras_3),
        ("keras_tuner/grid", "keras_tuner", _searched, keras_3),
        ("tensorflow_lattice/lattice", "tensorflow_lattice", _calibrated, LEGACY_KERAS),
        ("spektral/GCN", "spektral", functools.partial(_messages, False), LEGACY_KERAS),
        ("spektral/GAT", "spektral", functools.partial(_messages, True), LEGACY_KERAS),
        ("tfmot/quantized", "tensorflow_model_optimization", _quantized, LEGACY_KERAS),
        ("tfmot/pruned", "tensorflow_model_optimization", _pruned, LEGACY_KERAS),
        ("larq/binary", "larq", _binary, LEGACY_KERAS),
        *(
            (f"{package}/{name}", package, functools.partial(_segmented, name), _LEGACY_MODELS)
            for package, name in (
                ("segmentation_models", "Unet"),
                ("keras_unet_collection", "att_unet_2d"),
                ("keras_unet_collection", "swin_unet_2d"),
            )
        ),
        ("kapre/spectrogram", "kapre", _spectrograms, LEGACY_KERAS),
        ("tf_keras_vis/attribution", "tf_keras_vis", _attributed, LEGACY_KERAS),
    ]
    return [
        Program(name, (module,), build, environment) for name, module, build, environment in rows
    ]


PROGRAMS = _programs()
