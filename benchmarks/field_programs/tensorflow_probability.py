"""TensorFlow Probability: regression, variational inference, flows, Markov chains, processes."""

from __future__ import annotations

from typing import Any

import numpy as np

from field_programs.program import LEGACY_KERAS, Program, Running


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(256, 16)).astype("float32")
    return x, (x @ rng.normal(size=(16, 1)) + 0.1).astype("float32")


def _probabilistic_regression() -> Running:
    """The regression of its tutorial: a network whose output is a distribution."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    tf.keras.utils.set_random_seed(1)
    x, y = _data()
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(256, activation="relu"),
            tf.keras.layers.Dense(256, activation="relu"),
            tf.keras.layers.Dense(2),
            tfp.layers.DistributionLambda(
                lambda t: tfp.distributions.Normal(t[..., :1], 1e-3 + tf.math.softplus(t[..., 1:]))
            ),
        ]
    )
    model.compile(tf.keras.optimizers.Adam(1e-3), lambda y, rv: -rv.log_prob(y))
    return Running(
        lambda: model.fit(x, y, batch_size=64, verbose=0).history["loss"][-1],
        lambda: {"mean": model(x).mean()},
    )


def _flipout() -> Running:
    """A Bayesian network with Flipout layers."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    tf.keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    model = tf.keras.Sequential(
        [
            tfp.layers.Convolution2DFlipout(32, 3, padding="same", activation="relu"),
            tf.keras.layers.GlobalAveragePooling2D(),
            tfp.layers.DenseFlipout(128, activation="relu"),
            tfp.layers.DenseReparameterization(5),
        ]
    )
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    images = rng.normal(size=(20, 16, 16, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((images, rng.integers(0, 5, 20))).batch(8)
    return Running(lambda: model.fit(data, verbose=0).history["loss"][-1], dict)


def _autoencoder() -> Running:
    """The variational autoencoder of its tutorial, with an independent Bernoulli output."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    tf.keras.utils.set_random_seed(1)
    layers, tfpl, tfd = tf.keras.layers, tfp.layers, tfp.distributions
    prior = tfd.Independent(tfd.Normal(tf.zeros(8), 1.0), 1)
    encoder = tf.keras.Sequential(
        [
            layers.Input((16, 16, 1)),
            layers.Conv2D(32, 5, 2, "same", activation="relu"),
            layers.Flatten(),
            layers.Dense(tfpl.MultivariateNormalTriL.params_size(8)),
            tfpl.MultivariateNormalTriL(
                8, activity_regularizer=tfpl.KLDivergenceRegularizer(prior, use_exact_kl=False)
            ),
        ]
    )
    decoder = tf.keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(8 * 8 * 32, activation="relu"),
            layers.Reshape((8, 8, 32)),
            layers.Conv2DTranspose(32, 5, 2, "same", activation="relu"),
            layers.Conv2D(1, 5, padding="same"),
            layers.Flatten(),
            tfpl.IndependentBernoulli((16, 16, 1), tfd.Bernoulli.logits),
        ]
    )
    model = tf.keras.Model(encoder.inputs, decoder(encoder.outputs[0]))
    model.compile(tf.keras.optimizers.Adam(1e-3), lambda x, rv: -rv.log_prob(x))
    images = np.random.default_rng(1).integers(0, 2, (20, 16, 16, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((images, images)).batch(8)
    return Running(
        lambda: model.fit(data, verbose=0).history["loss"][-1],
        lambda: {"encoded": encoder(images).mean()},
    )


def _flow(kind: str) -> Running:
    """A normalizing flow, trained by maximum likelihood in a loop of its own."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    tf.keras.utils.set_random_seed(1)
    tfb, tfd = tfp.bijectors, tfp.distributions
    x = tf.constant(_data()[0])
    if kind == "autoregressive":
        made = [tfb.AutoregressiveNetwork(2, hidden_units=[256, 256], activation="relu")]
        bijector: Any = tfb.MaskedAutoregressiveFlow(made[0])
    else:
        made = []
        for _ in range(3):
            made.append(tfb.real_nvp_default_template([256, 256]))
        parts = [tfb.RealNVP(num_masked=8, shift_and_log_scale_fn=part) for part in made]
        mixed = [tfb.Permute(list(range(15, -1, -1)))] * 3
        bijector = tfb.Chain([part for pair in zip(parts, mixed, strict=True) for part in pair])
    flow = tfd.TransformedDistribution(tfd.MultivariateNormalDiag(tf.zeros(16)), bijector)
    flow.log_prob(x)
    optimizer = tf.keras.optimizers.Adam(1e-3)

    @tf.function
    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(flow.log_prob(x))
        variables = [variable for network in made for variable in network.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    log_prob = tf.function(flow.log_prob)
    return Running(lambda: float(train(x)), lambda: {"log_prob": log_prob(x)})


def _hamiltonian(kernel: str) -> Running:
    """Logistic regression by Hamiltonian Monte Carlo, the whole chain in one tf.function."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    x, y = _data()
    labels = (y[:, 0] > 0).astype("float32")

    def log_prob(weights: Any) -> Any:
        prior = tf.reduce_sum(tfd.Normal(0.0, 1.0).log_prob(weights), -1)
        logits = tf.linalg.matvec(tf.constant(x), weights)
        return prior + tf.reduce_sum(tfd.Bernoulli(logits).log_prob(labels), -1)

    kernels = {
        "hmc": lambda: tfp.mcmc.HamiltonianMonteCarlo(log_prob, 0.02, 5),
        "nuts": lambda: tfp.mcmc.NoUTurnSampler(log_prob, 0.05, max_tree_depth=4),
    }

    @tf.function
    def sample() -> Any:
        return tfp.mcmc.sample_chain(
            60,
            tf.zeros(16),
            kernel=kernels[kernel](),
            num_burnin_steps=60,
            trace_fn=None,
            seed=(1, 2),
        )

    # A chain is chaotic: the posterior is compared, not the path.
    return Running(lambda: 1.0 + 0.01 * float(tf.reduce_mean(tf.square(sample()))), dict)


def _variational() -> Running:
    """`fit_surrogate_posterior` for a joint distribution."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    tf.keras.utils.set_random_seed(1)
    x, y = _data()
    model = tfd.JointDistributionSequentialAutoBatched(
        [
            tfd.Sample(tfd.Normal(0.0, 1.0), 16),
            lambda weights: tfd.Independent(
                tfd.Normal(tf.linalg.matvec(tf.constant(x), weights), 0.5), 1
            ),
        ]
    )
    pinned = model.experimental_pin(None, tf.constant(y[:, 0]))
    posterior = tfp.experimental.vi.build_factored_surrogate_posterior(
        event_shape=pinned.event_shape, bijector=None, seed=(1, 1)
    )

    def step() -> float:
        losses = tfp.vi.fit_surrogate_posterior(
            pinned.unnormalized_log_prob,
            posterior,
            optimizer=tf.keras.optimizers.Adam(0.05),
            num_steps=20,
            sample_size=4,
            seed=(1, 2),
        )
        return float(losses[-1])

    return Running(step, lambda: {"mean": posterior.mean()})


def _process() -> Running:
    """A Gaussian process: kernel parameters by gradient, then a posterior predictive."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    tfd, kernels = tfp.distributions, tfp.math.psd_kernels
    x, y = _data()
    positive = tfp.util.TransformedVariable
    softplus = tfp.bijectors.Softplus()
    amplitude, scale, noise = (positive(value, softplus) for value in (1.0, 3.0, 0.3))
    kernel = kernels.ExponentiatedQuadratic(amplitude, scale)
    process = tfd.GaussianProcess(kernel, x, observation_noise_variance=noise)
    optimizer = tf.keras.optimizers.Adam(0.01)

    @tf.function
    def train() -> Any:
        with tf.GradientTape() as tape:
            loss = -process.log_prob(y[:, 0])
        variables = process.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @tf.function
    def predict() -> Any:
        return tfd.GaussianProcessRegressionModel(
            kernel, x[:32] + 0.1, x, y[:, 0], observation_noise_variance=noise
        ).mean()

    return Running(lambda: float(train()), lambda: {"predict": predict()})


def _variational_layers() -> Running:
    """`DenseVariational` with a learned prior, as in its tutorial."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    tf.keras.utils.set_random_seed(1)
    x, y = _data()

    def posterior(kernel: int, bias: int, dtype: Any = None) -> Any:
        n = kernel + bias
        return tf.keras.Sequential(
            [
                tfp.layers.VariableLayer(2 * n, dtype=dtype),
                tfp.layers.DistributionLambda(
                    lambda t: tfd.Independent(
                        tfd.Normal(t[..., :n], 1e-5 + tf.nn.softplus(t[..., n:] - 3.0)), 1
                    )
                ),
            ]
        )

    def prior(kernel: int, bias: int, dtype: Any = None) -> Any:
        n = kernel + bias
        return tf.keras.Sequential(
            [
                tfp.layers.VariableLayer(n, dtype=dtype),
                tfp.layers.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t, 1.0), 1)),
            ]
        )

    model = tf.keras.Sequential(
        [
            tfp.layers.DenseVariational(128, posterior, prior, 1 / 256, activation="relu"),
            tf.keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(100)
    return Running(lambda: model.fit(data, verbose=0).history["loss"][-1], dict)


def _series() -> Running:
    """A structural time series: variational fit of a seasonal model."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    tf.keras.utils.set_random_seed(1)
    series = (np.sin(np.arange(80) * 2 * np.pi / 7) + np.arange(80) / 40).astype("float32")
    sts = tfp.sts
    model = sts.Sum(
        [
            sts.LocalLinearTrend(observed_time_series=series),
            sts.Seasonal(7, observed_time_series=series),
        ],
        observed_time_series=series,
    )
    posterior = sts.build_factored_surrogate_posterior(model, seed=(1, 1))
    joint = model.joint_distribution(observed_time_series=series)
    optimizer = tf.keras.optimizers.Adam(0.1)

    def step() -> float:
        losses = tfp.vi.fit_surrogate_posterior(
            joint.log_prob, posterior, optimizer, num_steps=5, seed=(1, 2), jit_compile=False
        )
        return float(losses[-1])

    return Running(step, dict)


def _program(name: str, build: Any) -> Program:
    return Program(
        f"tensorflow_probability/{name}",
        ("tensorflow_probability", "tf_keras"),
        build,
        LEGACY_KERAS,
    )


PROGRAMS = [
    _program("regression", _probabilistic_regression),
    _program("flipout", _flipout),
    _program("autoencoder", _autoencoder),
    _program("autoregressive_flow", lambda: _flow("autoregressive")),
    _program("real_nvp", lambda: _flow("real_nvp")),
    _program("hmc", lambda: _hamiltonian("hmc")),
    _program("nuts", lambda: _hamiltonian("nuts")),
    _program("surrogate_posterior", _variational),
    _program("gaussian_process", _process),
    _program("dense_variational", _variational_layers),
    _program("time_series", _series),
]
