"""TensorFlow Recommenders: retrieval, ranking and cross networks, as in its tutorials."""

from __future__ import annotations

from typing import Any

import numpy as np

from field_programs.program import LEGACY_KERAS, Program, Running

_USERS, _ITEMS = 200, 500


def _ratings() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "user": rng.integers(0, _USERS, 300).astype(str),
        "item": rng.integers(0, _ITEMS, 300).astype(str),
        "rating": rng.integers(1, 6, 300).astype("float32"),
    }


def _tower(count: int) -> Any:
    import tensorflow as tf

    return tf.keras.Sequential(
        [
            tf.keras.layers.StringLookup(vocabulary=[str(n) for n in range(count)]),
            tf.keras.layers.Embedding(count + 1, 64),
            tf.keras.layers.Dense(256, activation="relu"),
            tf.keras.layers.Dense(64),
        ]
    )


def _two_towers() -> Running:
    """Retrieval with factorized top-K metrics, then an index by brute force."""
    import tensorflow as tf
    import tensorflow_recommenders as tfrs

    tf.keras.utils.set_random_seed(1)
    items = tf.data.Dataset.from_tensor_slices([str(n) for n in range(_ITEMS)])

    class Retrieval(tfrs.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = _tower(_USERS), _tower(_ITEMS)
            metrics = tfrs.metrics.FactorizedTopK(items.batch(128).map(self.items))
            self.task = tfrs.tasks.Retrieval(metrics=metrics)

        def compute_loss(self, features: Any, training: bool = False) -> Any:
            users, found = self.users(features["user"]), self.items(features["item"])
            return self.task(users, found, compute_metrics=not training)

    model = Retrieval()
    model.compile(tf.keras.optimizers.Adagrad(0.1))
    data = tf.data.Dataset.from_tensor_slices(_ratings()).batch(128)

    def outputs() -> dict[str, Any]:
        index = tfrs.layers.factorized_top_k.BruteForce(model.users, k=10)
        index.index_from_dataset(items.batch(100).map(lambda name: (name, model.items(name))))
        scores, _ = index(tf.constant(["1", "2", "3"]))
        return {"scores": scores, "loss": model.evaluate(data, verbose=0, return_dict=True)["loss"]}

    return Running(lambda: model.fit(data, verbose=0).history["loss"][-1], outputs)


def _ranking(cross: bool) -> Running:
    """Ratings by a dense network, or by a deep and cross network."""
    import tensorflow as tf
    import tensorflow_recommenders as tfrs

    tf.keras.utils.set_random_seed(1)

    class Ranking(tfrs.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = _tower(_USERS), _tower(_ITEMS)
            self.cross = tfrs.layers.dcn.Cross(projection_dim=32) if cross else None
            self.deep = tf.keras.Sequential(
                [
                    tf.keras.layers.Dense(256, activation="relu"),
                    tf.keras.layers.Dense(256, activation="relu"),
                    tf.keras.layers.Dense(1),
                ]
            )
            self.task = tfrs.tasks.Ranking(
                tf.keras.losses.MeanSquaredError(),
                metrics=[tf.keras.metrics.RootMeanSquaredError()],
            )

        def call(self, features: Any) -> Any:
            x = tf.concat([self.users(features["user"]), self.items(features["item"])], axis=1)
            return self.deep(self.cross(x) if self.cross is not None else x)

        def compute_loss(self, features: Any, training: bool = False) -> Any:
            features = dict(features)
            labels = features.pop("rating")
            return self.task(labels=labels, predictions=self(features))

    model = Ranking()
    model.compile(tf.keras.optimizers.Adam(1e-3))
    ratings = _ratings()
    data = tf.data.Dataset.from_tensor_slices(ratings).batch(128)
    features = {name: ratings[name] for name in ("user", "item")}
    return Running(
        lambda: model.fit(data, verbose=0).history["loss"][-1],
        lambda: {"predict": model.predict(features, verbose=0)},
    )


def _program(name: str, build: Any) -> Program:
    needs = ("tensorflow_recommenders", "tf_keras")
    return Program(f"tensorflow_recommenders/{name}", needs, build, LEGACY_KERAS)


PROGRAMS = [
    _program("retrieval", _two_towers),
    _program("ranking", lambda: _ranking(cross=False)),
    _program("cross_network", lambda: _ranking(cross=True)),
]
