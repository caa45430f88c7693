"""keras.applications, all networks, with random weights: `fit` on arrays, and `predict`."""

from __future__ import annotations

import functools

import numpy as np

from field_programs.program import Program, Running

# Eight images of this size leave most of the last batch normalizations 72 values a channel. Two of
# 64 pixels leave 8 and less, so that a rounding error changes signs, and most products are too
# small to be converted.
_IMAGE = (96, 96, 3)
_BATCH = 8
_NETWORKS = (
    *(f"ConvNeXt{size}" for size in ("Tiny", "Small", "Base", "Large", "XLarge")),
    *(f"DenseNet{depth}" for depth in (121, 169, 201)),
    *(f"EfficientNetB{number}" for number in range(8)),
    *(f"EfficientNetV2{size}" for size in ("B0", "B1", "B2", "B3", "S", "M", "L")),
    *("InceptionV3", "InceptionResNetV2", "Xception", "NASNetMobile", "NASNetLarge"),
    *("MobileNet", "MobileNetV2", "MobileNetV3Small", "MobileNetV3Large"),
    *(f"ResNet{depth}{version}" for depth in (50, 101, 152) for version in ("", "V2")),
    *("VGG16", "VGG19"),
)


def _classifier(network: str) -> Running:
    import keras

    keras.utils.set_random_seed(1)
    model = getattr(keras.applications, network)(weights=None, input_shape=_IMAGE, classes=10)
    # Most of these networks expect pixels of 0 to 255 or of -1 to 1; random weights do not care.
    # Gradients at random weights are large: at a rate of 1e-3 the last bit of a weight decides what
    # some of these networks predict a few steps later.
    model.compile(keras.optimizers.SGD(1e-6), "sparse_categorical_crossentropy")
    rng = np.random.default_rng(1)
    images = rng.normal(size=(2 * _BATCH, *_IMAGE)).astype("float32")
    labels = rng.integers(0, 10, 2 * _BATCH)
    return Running(
        step=lambda: model.fit(images, labels, batch_size=_BATCH, verbose=0).history["loss"][-1],
        outputs=lambda: {"predict": model.predict(images, batch_size=_BATCH, verbose=0)},
    )


PROGRAMS = [
    Program(f"keras.applications/{name}", ("keras",), functools.partial(_classifier, name))
    for name in _NETWORKS
]
