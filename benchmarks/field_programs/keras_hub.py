"""KerasHub: backbones and tasks of small presets with random weights; nothing is downloaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from field_programs.program import Program, Running, fitted

_VOCABULARY, _LENGTH, _SAMPLES = 500, 32, 4096
# Wide enough that products are worth converting at all.
_ENCODER = {
    "vocabulary_size": _VOCABULARY,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 128,
    "intermediate_dim": 512,
}
_DECODER = {
    "vocabulary_size": _VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 128,
    "intermediate_dim": 512,
}
_MOE = {"num_experts": 4, "top_k": 2}
_SMOL = {
    "vocabulary_size": _VOCABULARY,
    "hidden_dim": 128,
    "intermediate_dim": 512,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_layer_enabled_list": [True, False],
    "layer_types": ["attention"] * 2,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
}
_T5_GEMMA = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {
        "hidden_dim": 128,
        "intermediate_dim": 512,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    }.items()
}
_IMAGE = (64, 64, 3)
_VIT = {
    "image_shape": _IMAGE,
    "patch_size": (16, 16),
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 128,
}


def _classified_text(prefix: str, backbone: dict[str, Any]) -> Running:
    """Fine-tunes a classifier with a data set whose last batch is smaller."""
    import keras
    import keras_hub
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    network = getattr(keras_hub.models, f"{prefix}Backbone")(**backbone)
    model = getattr(keras_hub.models, f"{prefix}TextClassifier")(
        backbone=network, num_classes=3, preprocessor=None
    )
    model.compile(
        keras.optimizers.AdamW(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    features = _inputs(network, rng, 10)
    data = tf.data.Dataset.from_tensor_slices((features, rng.integers(0, 3, 10))).batch(4)
    return fitted(model, data, features)


def _masked_text(prefix: str, backbone: dict[str, Any]) -> Running:
    """Trains a masked language model with weights for the masked places."""
    import keras
    import keras_hub

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    network = getattr(keras_hub.models, f"{prefix}Backbone")(**backbone)
    model = getattr(keras_hub.models, f"{prefix}MaskedLM")(backbone=network, preprocessor=None)
    features = _inputs(network, rng, 8)
    features["mask_positions"] = rng.integers(0, _LENGTH, (8, 5))
    labels = rng.integers(0, _VOCABULARY, (8, 5))
    weights = np.ones((8, 5), "float32")
    model.compile(
        keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return Running(
        step=lambda: model.fit(
            features, labels, sample_weight=weights, batch_size=4, verbose=0
        ).history["loss"][-1],
        outputs=lambda: {"predict": model.predict(features, batch_size=4, verbose=0)},
    )


def _causal_text(prefix: str, backbone: dict[str, Any], task: str = "CausalLM") -> Running:
    """Trains a language model, and generates with its cache."""
    import keras
    import keras_hub
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    network = getattr(keras_hub.models, f"{prefix}Backbone")(**backbone)
    model = getattr(keras_hub.models, f"{prefix}{task}")(backbone=network, preprocessor=None)
    features = _inputs(network, rng, 10)
    labels = rng.integers(0, _VOCABULARY, (10, _LENGTH))
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(4)

    def outputs() -> dict[str, Any]:
        prompt = {name: value[:2] for name, value in features.items()}
        if "padding_mask" in prompt:
            prompt["padding_mask"] = (np.arange(_LENGTH) < 8)[None].repeat(2, axis=0)
        if "decoder_padding_mask" in prompt:
            prompt["decoder_padding_mask"] = (np.arange(_LENGTH) < 8)[None].repeat(2, axis=0)
        generated = model.generate(prompt, stop_token_ids=None)
        return {
            "predict": model.predict(features, batch_size=4, verbose=0),
            "generated": generated,
        }

    return Running(lambda: model.fit(data, verbose=0).history["loss"][-1], outputs)


def _classified_images(prefix: str, backbone: dict[str, Any], **task: Any) -> Running:
    """Trains an image classifier, saves it, and predicts with what was loaded."""
    import tempfile
    from pathlib import Path

    import keras
    import keras_hub
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    network = getattr(keras_hub.models, f"{prefix}Backbone")(**backbone)
    model = getattr(keras_hub.models, f"{prefix}ImageClassifier")(
        backbone=network, num_classes=5, preprocessor=None, **task
    )
    model.compile(
        keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    images = rng.normal(size=(10, *_IMAGE)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((images, rng.integers(0, 5, 10))).batch(4)

    def outputs() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            model.save(path)
            loaded = keras.models.load_model(path)
        return {
            "predict": model.predict(images, batch_size=4, verbose=0),
            "loaded": loaded.predict(images, batch_size=4, verbose=0),
        }

    return Running(lambda: model.fit(data, verbose=0).history["loss"][-1], outputs)


def _features(make: Callable[[], Any]) -> Running:
    """Trains whatever a backbone gives towards random targets, in a loop of its own."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    network = make()
    features = _inputs(network, rng, 4)
    optimizer = keras.optimizers.Adam(1e-4)
    optimizer.build(network.trainable_variables)

    @tf.function
    def train(features: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(network(features, training=True))
            loss = tf.add_n([tf.reduce_mean(tf.square(o)) for o in outputs if o.dtype.is_floating])
        variables = network.trainable_variables
        gradients = tape.gradient(loss, variables)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        optimizer.apply_gradients(pairs)
        return loss

    def step() -> float:
        return float(train(tf.nest.map_structure(tf.constant, features)))

    def outputs() -> dict[str, Any]:
        return {"predict": network.predict(features, batch_size=2, verbose=0)}

    return Running(step, outputs)


def _inputs(network: Any, rng: np.random.Generator, batch: int) -> Any:
    """Makes inputs for a backbone from the names and shapes that it says."""
    found: dict[str, Any] = {}
    given = network.input
    if not isinstance(given, dict):
        shape = [size or 64 for size in given.shape[1:]]
        return rng.normal(size=(batch, *shape)).astype("float32")
    for name, tensor in given.items():
        is_sound = name.startswith("encoder") and "encoder_input_values" in given
        shape = [size or (_SAMPLES if is_sound else _LENGTH) for size in tensor.shape[1:]]
        if "mask" in name:
            found[name] = np.ones((batch, *shape), "int32")
            found[name][0, -4:] = 0
        elif "segment" in name:
            found[name] = np.zeros((batch, *shape), "int32")
        elif "float" in str(tensor.dtype):
            found[name] = rng.normal(size=(batch, *shape)).astype("float32")
        else:
            found[name] = rng.integers(3, _VOCABULARY, (batch, *shape)).astype("int32")
    return found


def _backbone(prefix: str, arguments: dict[str, Any]) -> Any:
    import keras_hub

    return getattr(keras_hub.models, f"{prefix}Backbone")(**arguments)


_ALBERT = _ENCODER | {"embedding_dim": 64, "num_groups": 1}
_ELECTRA = {("vocab_size" if k == "vocabulary_size" else k): v for k, v in _ENCODER.items()}
_ELECTRA["embedding_dim"] = 64
_FNET = {k: v for k, v in _ENCODER.items() if k != "num_heads"}
_FALCON = {("num_attention_heads" if k == "num_heads" else k): v for k, v in _ENCODER.items()}
_GEMMA = _DECODER | {"head_dim": 32}
_CLASSIFIERS = {
    **dict.fromkeys(("Bert", "Roberta", "DistilBert", "XLMRoberta"), _ENCODER),
    "Albert": _ALBERT,
    "DebertaV3": _ENCODER | {"bucket_size": 16, "max_sequence_length": _LENGTH},
    "FNet": _FNET,
    "RoformerV2": _ENCODER | {"head_size": 32},
}
_MASKED = {
    **dict.fromkeys(("Bert", "Roberta", "DistilBert", "XLMRoberta"), _ENCODER),
    "Albert": _ALBERT,
    "DebertaV3": _CLASSIFIERS["DebertaV3"],
    "FNet": _FNET,
}
_CAUSAL = {
    **dict.fromkeys(("GPT2", "OPT", "Bloom", "GPTNeoX"), _ENCODER),
    **dict.fromkeys(("Llama", "Llama3", "Mistral", "Phi3", "Qwen", "Qwen2"), _DECODER),
    "Falcon": _FALCON,
    "Gemma": _GEMMA,
    "Mixtral": _DECODER | _MOE,
    "GptOss": _DECODER | _MOE,
    "Qwen3": _DECODER | {"head_dim": 32},
    "Qwen3Moe": _DECODER | {"moe_intermediate_dim": 128, "head_dim": 32} | _MOE,
    "QwenMoe": _DECODER
    | {"moe_intermediate_dim": 128, "shared_expert_intermediate_dim": 256}
    | _MOE,
    "SmolLM3": _SMOL,
}
_SEQUENCE = {
    "Bart": _ENCODER,
    "T5Gemma": {"vocabulary_size": _VOCABULARY, "sliding_window": 16} | _T5_GEMMA,
}
_BACKBONES = {
    "T5": _ENCODER,
    "XLNet": _ENCODER,
    "Electra": _ELECTRA,
    "ESM2": _ENCODER,
    "RWKV7": {
        "hidden_size": 128,
        "head_size": 32,
        "num_layers": 2,
        "vocabulary_size": _VOCABULARY,
        "intermediate_dim": 256,
    },
    "Whisper": _ENCODER | {"max_encoder_sequence_length": 64, "max_decoder_sequence_length": 32},
    "Moonshine": {
        "vocabulary_size": _VOCABULARY,
        "filter_dim": 64,
        "encoder_num_layers": 2,
        "decoder_num_layers": 2,
        "hidden_dim": 64,
        "intermediate_dim": 256,
        "encoder_num_heads": 4,
        "decoder_num_heads": 4,
    },
    "PaliGemma": _GEMMA
    | {
        "image_size": 32,
        "vit_patch_size": 8,
        "vit_num_heads": 4,
        "vit_hidden_dim": 64,
        "vit_num_layers": 2,
    },
    "ViTDet": {
        "hidden_size": 64,
        "num_layers": 2,
        "intermediate_dim": 256,
        "num_heads": 4,
        "global_attention_layer_indices": [1],
        "image_shape": _IMAGE,
        "patch_size": 16,
        "num_output_channels": 32,
        "window_size": 2,
    },
    "DINOV2": {
        "patch_size": 16,
        "num_layers": 2,
        "hidden_dim": 64,
        "num_heads": 4,
        "intermediate_dim": 256,
        "image_shape": _IMAGE,
        "position_embedding_shape": _IMAGE,
    },
    "DINOV3": {
        "patch_size": 16,
        "num_layers": 2,
        "hidden_dim": 64,
        "num_heads": 4,
        "intermediate_dim": 256,
        "image_shape": _IMAGE,
    },
}
_IMAGE_CLASSIFIERS = {
    "ResNet": {
        "input_conv_filters": [32],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 64, 128],
        "stackwise_num_blocks": [2, 2, 2],
        "stackwise_num_strides": [1, 2, 2],
        "block_type": "bottleneck_block_vd",
        "image_shape": _IMAGE,
    },
    "ViT": _VIT | {"mlp_dim": 256},
    "DeiT": _VIT | {"patch_size": 16, "intermediate_dim": 256},
    "DenseNet": {"stackwise_num_repeats": [3, 3, 3], "image_shape": _IMAGE},
    "VGG": {
        "stackwise_num_repeats": [1, 1, 2],
        "stackwise_num_filters": [32, 64, 128],
        "image_shape": _IMAGE,
    },
    "CSPNet": {
        "stem_filters": 32,
        "stem_kernel_size": 3,
        "stem_strides": 1,
        "stackwise_depth": [1, 2, 2],
        "stackwise_strides": [1, 2, 2],
        "stackwise_num_filters": [32, 64, 128],
        "stage_type": "csp",
        "expand_ratio": [2.0],
        "bottle_ratio": [0.5],
        "block_type": "dark_block",
        "image_shape": _IMAGE,
    },
    "MiT": {
        "layerwise_depths": [2, 2],
        "num_layers": 2,
        "layerwise_num_heads": [1, 2],
        "layerwise_sr_ratios": [8, 4],
        "max_drop_path_rate": 0.1,
        "layerwise_patch_sizes": [7, 3],
        "layerwise_strides": [4, 2],
        "hidden_dims": [32, 64],
        "image_shape": _IMAGE,
    },
    "SwinTransformer": {
        "image_shape": _IMAGE,
        "embed_dim": 48,
        "depths": [2, 2],
        "num_heads": [3, 6],
        "window_size": 4,
    },
    "Xception": {
        "stackwise_conv_filters": [[32, 64], [64, 128, 128], [128, 256, 256]],
        "stackwise_pooling": [False, True, True],
        "image_shape": _IMAGE,
    },
}


def _programs(
    what: str, run: Callable[..., Running], table: dict[str, dict[str, Any]]
) -> list[Program]:
    return [
        Program(
            f"keras_hub/{prefix}{what}", ("keras_hub",), functools.partial(run, prefix, arguments)
        )
        for prefix, arguments in table.items()
    ]


PROGRAMS = [
    *_programs("TextClassifier", _classified_text, _CLASSIFIERS),
    *_programs("MaskedLM", _masked_text, _MASKED),
    *_programs("CausalLM", _causal_text, _CAUSAL),
    *_programs("Seq2SeqLM", functools.partial(_causal_text, task="Seq2SeqLM"), _SEQUENCE),
    *_programs("ImageClassifier", _classified_images, _IMAGE_CLASSIFIERS),
    *_programs(
        "Backbone",
        lambda prefix, arguments: _features(functools.partial(_backbone, prefix, arguments)),
        _BACKBONES,
    ),
]
