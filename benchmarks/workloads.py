"""The networks whose steps are timed: Keras 3 models with optimizer and synthetic data.

Six are small: a float32 training step takes 0.1 to 0.7 s on two cores. Three transformers have the
size under which they are known (`bert_base`, `gpt2_small`, `vit_base`: 1 to 4 s), `ddim` is the
U-Net of a diffusion model, and `recommender` is mostly the table of its embedding. Each model ends
in an activation of dtype float32, as the Keras guide on mixed precision asks for: it costs float32
nothing and keeps the losses of all variants comparable.

Seven of them exist for a GPU as well, as large as they are trained there, and tiny, to show that a
way of measuring them works.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

SEED = 0

Batch = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Workload:
    """One network with what it takes to train it.

    Attributes:
        model: builds the model, which returns logits; called under the dtype policy in force.
        optimizer: builds the optimizer.
        batch: makes one batch (inputs, integer labels) from a random generator.
    """

    model: Callable[[], keras.Model]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    batch: Callable[[np.random.Generator], Batch]

    def compiled(self, *, jit_compile: bool) -> tuple[keras.Model, Batch]:
        """Returns the model, ready to train, and one batch; the same ones every time."""
        keras.utils.set_random_seed(SEED)
        model = self.model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(self.optimizer(), loss, jit_compile=jit_compile)
        return model, self.batch(np.random.default_rng(SEED))


def _images(batch: int, size: int, classes: int) -> Callable[[np.random.Generator], Batch]:
    def make(rng: np.random.Generator) -> Batch:
        images = rng.standard_normal((batch, size, size, 3), dtype=np.float32)
        return images, rng.integers(classes, size=batch, dtype=np.int32)

    return make


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[np.random.Generator], Batch]:
    def make(rng: np.random.Generator) -> Batch:
        text = rng.integers(vocabulary, size=(batch, length + 1), dtype=np.int32)
        return text[:, :-1], text[:, 1:]

    return make


def float32_logits(inputs: Any, outputs: Any) -> keras.Model:
    """A model that ends in an activation of dtype float32."""
    return keras.Model(inputs, layers.Activation("linear", dtype="float32")(outputs))


def _application(name: str, size: int) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        network = getattr(keras.applications, name)(
            weights=None, input_shape=(size, size, 3), classes=1000, classifier_activation=None
        )
        return float32_logits(network.input, network.output)

    return build


def _unet(
    size: int = 128, width: int = 16, classes: int = 4, depth: int = 4, normalized: bool = True
) -> keras.Model:
    """Without normalizations convolutions have biases, and pixels are repeated on the way up."""

    def block(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=not normalized)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x) if normalized else x)
        return x

    def upsampled(x: Any, filters: int) -> Any:
        layer = layers.Conv2DTranspose(filters, 2, strides=2)
        return layer(x) if normalized else layers.UpSampling2D()(x)

    inputs = keras.Input((size, size, 3))
    x, skips = inputs, []
    for level in range(depth):
        x = block(x, width << level)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = block(x, width << depth)
    for level in reversed(range(depth)):
        x = upsampled(x, width << level)
        x = block(layers.Concatenate()([skips[level], x]), width << level)
    return float32_logits(inputs, layers.Conv2D(classes, 1)(x))


def _pixel_labels(batch: int, size: int, classes: int) -> Callable[[np.random.Generator], Batch]:
    def make(rng: np.random.Generator) -> Batch:
        images = rng.standard_normal((batch, size, size, 3), dtype=np.float32)
        return images, rng.integers(classes, size=(batch, size, size), dtype=np.int32)

    return make


def _encoder(
    blocks: int = 4, width: int = 384, heads: int = 6, vocabulary: int = 4000, length: int = 128
) -> keras.Model:
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)
    x = x + layers.Embedding(length, width)(keras.ops.arange(length))
    x = layers.Dropout(0.1)(layers.LayerNormalization(epsilon=1e-6)(x))
    for _ in range(blocks):
        attended = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(x, x)
        x = layers.LayerNormalization(epsilon=1e-6)(x + attended)
        hidden = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
        x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.1)(hidden))
    return float32_logits(tokens, layers.Dense(vocabulary)(x))


def _bert_base() -> keras.Model:
    return _encoder(blocks=12, width=768, heads=12, vocabulary=30522)


def _pre_norm_blocks(x: Any, blocks: int, heads: int, dropout: float, causal: bool) -> Any:
    """Transformer blocks that normalize what enters attention and the two dense layers."""
    width = x.shape[-1]
    for _ in range(blocks):
        normed = layers.LayerNormalization(epsilon=1e-5)(x)
        attention = layers.MultiHeadAttention(heads, width // heads, dropout=dropout)
        attended = attention(normed, normed, use_causal_mask=causal)
        x = x + layers.Dropout(dropout)(attended)
        normed = layers.LayerNormalization(epsilon=1e-5)(x)
        hidden = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(normed))
        x = x + layers.Dropout(dropout)(hidden)
    return layers.LayerNormalization(epsilon=1e-5)(x)


def _gpt2_small(
    vocabulary: int = 50257,
    width: int = 768,
    length: int = 128,
    blocks: int = 12,
    heads: int = 12,
) -> keras.Model:
    tokens = keras.Input((length,), dtype="int32")
    embedding = layers.ReversibleEmbedding(vocabulary, width)
    x = embedding(tokens)
    x = x + layers.Embedding(length, width)(keras.ops.arange(length))
    x = layers.Dropout(0.1)(x)
    x = _pre_norm_blocks(x, blocks=blocks, heads=heads, dropout=0.1, causal=True)
    return float32_logits(tokens, embedding(x, reverse=True))


def _vit_base(size: int = 224, patch: int = 16, width: int = 768, classes: int = 1000) -> Any:
    images = keras.Input((size, size, 3))
    x = layers.Conv2D(width, patch, strides=patch)(images)
    x = layers.Reshape((-1, width))(x)
    x = x + layers.Embedding(x.shape[1], width)(keras.ops.arange(x.shape[1]))
    x = _pre_norm_blocks(layers.Dropout(0.1)(x), blocks=12, heads=12, dropout=0.1, causal=False)
    return float32_logits(images, layers.Dense(classes)(layers.GlobalAveragePooling1D()(x)))


def _ddim(size: int = 64, widths: tuple[int, ...] = (32, 64, 96), middle: int = 128) -> Any:
    """Residual U-Net with swish, batch normalization without scale, and resized skips."""

    def residual(x: Any, width: int) -> Any:
        straight = x if x.shape[-1] == width else layers.Conv2D(width, 1)(x)
        x = layers.BatchNormalization(center=False, scale=False)(x)
        x = layers.Conv2D(width, 3, padding="same", activation="swish")(x)
        return straight + layers.Conv2D(width, 3, padding="same")(x)

    images = keras.Input((size, size, 3))
    x, skips = layers.Conv2D(widths[0], 1)(images), []
    for width in widths:
        for _ in range(2):
            x = residual(x, width)
            skips.append(x)
        x = layers.AveragePooling2D(2)(x)
    for _ in range(2):
        x = residual(x, middle)
    for width in reversed(widths):
        x = layers.UpSampling2D(interpolation="bilinear")(x)
        for _ in range(2):
            x = residual(layers.Concatenate()([x, skips.pop()]), width)
    return float32_logits(images, layers.Conv2D(4, 1, kernel_initializer="zeros")(x))


def _lstm(vocabulary: int = 8000, length: int = 64, width: int = 512) -> keras.Model:
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width // 2)(tokens)
    for _ in range(2):
        x = layers.LSTM(width, return_sequences=True)(x)
    return float32_logits(tokens, layers.Dense(vocabulary)(x))


def _mlp(features: int = 1024, width: int = 2048, classes: int = 100) -> keras.Model:
    inputs = keras.Input((features,))
    x = inputs
    for _ in range(4):
        x = layers.Dense(width, activation="relu")(x)
    return float32_logits(inputs, layers.Dense(classes)(layers.Dropout(0.2)(x)))


def _features(batch: int, features: int, classes: int) -> Callable[[np.random.Generator], Batch]:
    def make(rng: np.random.Generator) -> Batch:
        x = rng.standard_normal((batch, features), dtype=np.float32)
        return x, rng.integers(classes, size=batch, dtype=np.int32)

    return make


def _recommender(rows: int = 500_000, fields: int = 8, width: int = 32) -> keras.Model:
    inputs = keras.Input((fields,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(rows, width)(inputs))
    for units in (512, 256):
        x = layers.Dense(units, activation="relu")(x)
    return float32_logits(inputs, layers.Dense(2)(x))


def _fields(batch: int, fields: int, rows: int) -> Callable[[np.random.Generator], Batch]:
    def make(rng: np.random.Generator) -> Batch:
        few_often = rng.zipf(1.2, size=(batch, fields)) % rows
        return few_often.astype(np.int32), rng.integers(2, size=batch, dtype=np.int32)

    return make


def _momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3)


def _adamw() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(1e-3, weight_decay=1e-4)


def _adamw_clipped() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(1e-4, global_clipnorm=1.0)


WORKLOADS = {
    "resnet50": Workload(_application("ResNet50", 128), _momentum, _images(16, 128, 1000)),
    "mobilenetv2": Workload(_application("MobileNetV2", 128), _momentum, _images(16, 128, 1000)),
    "unet": Workload(_unet, _adam, _pixel_labels(8, 128, 4)),
    "encoder": Workload(_encoder, _adamw_clipped, _tokens(8, 128, 4000)),
    "lstm": Workload(_lstm, _adam, _tokens(16, 64, 8000)),
    "mlp": Workload(_mlp, _momentum, _features(512, 1024, 100)),
    "bert_base": Workload(_bert_base, _adam, _tokens(4, 128, 30522)),
    "gpt2_small": Workload(_gpt2_small, _adam, _tokens(4, 128, 50257)),
    "vit_base": Workload(_vit_base, _adam, _images(4, 224, 1000)),
    "ddim": Workload(_ddim, _adamw, _pixel_labels(16, 64, 4)),
    "plain_unet": Workload(
        functools.partial(_unet, width=32, depth=3, normalized=False),
        _adam,
        _pixel_labels(8, 128, 4),
    ),
    "efficientnet": Workload(_application("EfficientNetB0", 128), _adamw, _images(16, 128, 1000)),
    "mobilenetv3": Workload(_application("MobileNetV3Large", 128), _adamw, _images(16, 128, 1000)),
    "convnext": Workload(_application("ConvNeXtTiny", 96), _adamw, _images(8, 96, 1000)),
    "recommender": Workload(_recommender, _adam, _fields(1024, 8, 500_000)),
}
"""Name -> workload; the names are those of ``--workloads``."""

_GPU_BERT = functools.partial(_encoder, blocks=12, width=768, heads=12, vocabulary=30522)
_GPU_GPT2 = functools.partial(_gpt2_small, length=512)
_GPU_LSTM = functools.partial(_lstm, length=128, width=1024)

GPU_WORKLOADS = {
    "resnet50": Workload(_application("ResNet50", 224), _momentum, _images(128, 224, 1000)),
    "mobilenetv2": Workload(_application("MobileNetV2", 224), _momentum, _images(128, 224, 1000)),
    "unet": Workload(
        functools.partial(_unet, size=256, width=64), _adam, _pixel_labels(16, 256, 4)
    ),
    "encoder": Workload(_GPU_BERT, _adamw_clipped, _tokens(64, 128, 30522)),
    "gpt2_small": Workload(_GPU_GPT2, _adam, _tokens(8, 512, 50257)),
    "lstm": Workload(_GPU_LSTM, _adam, _tokens(128, 128, 8000)),
    "mlp": Workload(functools.partial(_mlp, width=4096), _momentum, _features(4096, 1024, 100)),
}
"""Of a size that occupies a GPU of a data centre."""

_TINY_ENCODER = functools.partial(_encoder, blocks=1, width=32, heads=2, vocabulary=64, length=16)
_TINY_GPT2 = functools.partial(_gpt2_small, vocabulary=64, width=32, length=16, blocks=1, heads=2)
_TINY_LSTM = functools.partial(_lstm, vocabulary=64, length=8, width=32)
_TINY_MLP = functools.partial(_mlp, features=32, width=64, classes=10)

TINY_WORKLOADS = {
    "resnet50": Workload(_application("ResNet50", 64), _momentum, _images(4, 64, 1000)),
    "mobilenetv2": Workload(_application("MobileNetV2", 64), _momentum, _images(4, 64, 1000)),
    "unet": Workload(
        functools.partial(_unet, size=32, width=8, depth=2), _adam, _pixel_labels(4, 32, 4)
    ),
    "encoder": Workload(_TINY_ENCODER, _adamw_clipped, _tokens(4, 16, 64)),
    "gpt2_small": Workload(_TINY_GPT2, _adam, _tokens(4, 16, 64)),
    "lstm": Workload(_TINY_LSTM, _adam, _tokens(4, 8, 64)),
    "mlp": Workload(_TINY_MLP, _momentum, _features(16, 32, 10)),
}
"""The same networks with few and narrow layers, or small images: every op, little work."""
