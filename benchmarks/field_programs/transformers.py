"""Hugging Face's transformers with TensorFlow classes: random weights, a custom loop or `fit`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from field_programs.program import LEGACY_KERAS, Program, Running

_VOCABULARY, _LENGTH, _BATCH = 500, 24, 4
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
_SEQUENCE = {
    "vocab_size": _VOCABULARY,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
}
_IMAGE = {"image_size": 64, "num_labels": 5}
_VIT = _TEXT | _IMAGE | {"patch_size": 16}
_STAGES = {"num_channels": 3, "num_labels": 5}


def _model(name: str, config_name: str, config: dict[str, Any]) -> Any:
    import tensorflow as tf
    import transformers

    tf.keras.utils.set_random_seed(1)
    return getattr(transformers, name)(getattr(transformers, config_name)(**config))


def _text(rng: np.random.Generator, labels: Any) -> dict[str, Any]:
    mask = np.ones((_BATCH, _LENGTH), "int32")
    mask[0, -5:] = 0
    tokens = rng.integers(3, _VOCABULARY, (_BATCH, _LENGTH))
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _batch(kind: str) -> dict[str, Any]:
    """Makes a batch of the kind that a model wants; labels are in it where its loss needs them."""
    rng = np.random.default_rng(1)
    if kind == "classified":
        return _text(rng, rng.integers(0, 2, _BATCH))
    if kind in ("tokens", "sequence"):
        return _text(rng, rng.integers(0, _VOCABULARY, (_BATCH, _LENGTH)))
    if kind == "image":
        images = rng.normal(size=(_BATCH, 3, 64, 64)).astype("float32")
        return {"pixel_values": images, "labels": rng.integers(0, 5, _BATCH)}
    if kind == "segmented":
        images = rng.normal(size=(_BATCH, 3, 64, 64)).astype("float32")
        return {"pixel_values": images, "labels": rng.integers(0, 5, (_BATCH, 64, 64))}
    if kind == "sound":
        return {"input_values": rng.normal(size=(_BATCH, 2000)).astype("float32")}
    if kind == "spectrum":
        return {
            "input_features": rng.normal(size=(_BATCH, 80, 64)).astype("float32"),
            "labels": rng.integers(0, _VOCABULARY, (_BATCH, 12)),
        }
    if kind == "both":
        text = _text(rng, None)
        del text["labels"]
        images = rng.normal(size=(_BATCH, 3, 64, 64)).astype("float32")
        return text | {"pixel_values": images, "return_loss": True}
    raise ValueError(f"Unknown kind of batch {kind!r}.")


def _loop(
    name: str, config_name: str, config: dict[str, Any], kind: str, *, xla: bool = False
) -> Running:
    """Trains in a loop of its own."""
    import tensorflow as tf

    model = _model(name, config_name, config)
    optimizer = tf.keras.optimizers.Adam(1e-4)
    batch = _batch(kind)

    def call(inputs: Mapping[str, Any], training: bool) -> Any:
        return model(**inputs, training=training)

    @tf.function(jit_compile=xla)
    def train(inputs: Mapping[str, Any]) -> Any:
        with tf.GradientTape() as tape:
            found = call(inputs, True)
            loss = found.get("loss")
            if loss is None:
                loss = tf.reduce_mean(tf.square(found[0]))
            loss = tf.reduce_mean(loss)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        optimizer.apply_gradients(pairs)
        return loss

    def tensors() -> dict[str, Any]:
        return {k: v if isinstance(v, bool) else tf.constant(v) for k, v in batch.items()}

    infer = tf.function(functools.partial(call, training=False))

    def outputs() -> dict[str, Any]:
        found = infer(tensors())
        logits = found.get("logits")
        return {"infer": found[0] if logits is None else logits}

    return Running(lambda: float(train(tensors())), outputs)


def _fit(name: str, config_name: str, config: dict[str, Any], kind: str) -> Running:
    """Trains by `compile` without a loss and `fit`, as the documentation of the package says."""
    import tensorflow as tf

    model = _model(name, config_name, config)
    model.compile(tf.keras.optimizers.Adam(1e-4))
    batch = _batch(kind)
    data = tf.data.Dataset.from_tensor_slices(batch).batch(3)
    return Running(
        lambda: model.fit(data, verbose=0).history["loss"][-1],
        lambda: {"predict": model.predict(data, verbose=0).logits},
    )


def _generate(name: str, config_name: str, config: dict[str, Any], kind: str) -> Running:
    """Generates: greedy, with beams, and in a graph; "loss" is that of the prompt."""
    import tensorflow as tf

    model = _model(name, config_name, config)
    batch = _batch(kind)
    prompt = tf.constant(batch["input_ids"][:2, :8])
    generate = tf.function(model.generate)

    def step() -> float:
        return float(tf.reduce_mean(infer(prompt).logits))

    answered = {"decoder_input_ids": prompt} if model.config.is_encoder_decoder else {}
    infer = tf.function(lambda tokens: model(tokens, training=False, **answered))

    def outputs() -> dict[str, Any]:
        settings = {"max_length": 16, "pad_token_id": 0}
        return {
            "greedy": model.generate(prompt, **settings),
            "beams": model.generate(prompt, num_beams=2, **settings),
            "graph": generate(prompt, **settings),
            "logits": infer(prompt).logits,
        }

    return Running(step, outputs)


_GPT2 = {"vocab_size": _VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 128,
    "d_ff": 256,
    "d_kv": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_CLIP = {
    "text_config": _TEXT | {"eos_token_id": _VOCABULARY - 1},
    "vision_config": _TEXT | {"image_size": 64, "patch_size": 16},
    "projection_dim": 64,
}
_WAV = _TEXT | {
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
_LOOPS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("TFBertForSequenceClassification", "BertConfig", _TEXT, "classified"),
    ("TFBertForMaskedLM", "BertConfig", _TEXT, "tokens"),
    (
        "TFAlbertForSequenceClassification",
        "AlbertConfig",
        _TEXT | {"embedding_size": 64},
        "classified",
    ),
    ("TFRobertaForSequenceClassification", "RobertaConfig", _TEXT, "classified"),
    ("TFElectraForMaskedLM", "ElectraConfig", _TEXT | {"embedding_size": 64}, "tokens"),
    (
        "TFDebertaForSequenceClassification",
        "DebertaConfig",
        _TEXT | {"relative_attention": True, "pos_att_type": "c2p|p2c"},
        "classified",
    ),
    (
        "TFDebertaV2ForSequenceClassification",
        "DebertaV2Config",
        _TEXT | {"relative_attention": True, "pos_att_type": "c2p|p2c"},
        "classified",
    ),
    ("TFMPNetForSequenceClassification", "MPNetConfig", _TEXT, "classified"),
    (
        "TFMobileBertForSequenceClassification",
        "MobileBertConfig",
        _TEXT | {"embedding_size": 64, "intra_bottleneck_size": 64},
        "classified",
    ),
    ("TFRoFormerForMaskedLM", "RoFormerConfig", _TEXT | {"embedding_size": 64}, "tokens"),
    (
        "TFConvBertForSequenceClassification",
        "ConvBertConfig",
        _TEXT | {"embedding_size": 64},
        "classified",
    ),
    (
        "TFFunnelForSequenceClassification",
        "FunnelConfig",
        {
            "vocab_size": _VOCABULARY,
            "d_model": 64,
            "n_head": 4,
            "d_head": 16,
            "d_inner": 128,
            "block_sizes": [1, 1],
        },
        "classified",
    ),
    (
        "TFXLNetForSequenceClassification",
        "XLNetConfig",
        {"vocab_size": _VOCABULARY, "d_model": 128, "n_layer": 2, "n_head": 4, "d_inner": 256},
        "classified",
    ),
    ("TFEsmForMaskedLM", "EsmConfig", _TEXT | {"pad_token_id": 1}, "tokens"),
    ("TFGPT2LMHeadModel", "GPT2Config", _GPT2, "tokens"),
    ("TFGPTJForCausalLM", "GPTJConfig", _GPT2 | {"rotary_dim": 16}, "tokens"),
    (
        "TFOPTForCausalLM",
        "OPTConfig",
        _TEXT | {"ffn_dim": 256, "word_embed_proj_dim": 128},
        "tokens",
    ),
    ("TFMistralForCausalLM", "MistralConfig", _TEXT | {"num_key_value_heads": 2}, "tokens"),
    ("TFT5ForConditionalGeneration", "T5Config", _T5, "sequence"),
    ("TFBartForConditionalGeneration", "BartConfig", _SEQUENCE, "sequence"),
    ("TFPegasusForConditionalGeneration", "PegasusConfig", _SEQUENCE, "sequence"),
    (
        "TFMarianMTModel",
        "MarianConfig",
        _SEQUENCE | {"pad_token_id": 0, "decoder_start_token_id": 0},
        "sequence",
    ),
    ("TFLEDForConditionalGeneration", "LEDConfig", _SEQUENCE | {"attention_window": 8}, "sequence"),
    ("TFViTForImageClassification", "ViTConfig", _VIT, "image"),
    ("TFDeiTForImageClassification", "DeiTConfig", _VIT, "image"),
    ("TFData2VecVisionForImageClassification", "Data2VecVisionConfig", _VIT, "image"),
    (
        "TFSwinForImageClassification",
        "SwinConfig",
        _IMAGE
        | {
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "image",
    ),
    (
        "TFConvNextForImageClassification",
        "ConvNextConfig",
        _STAGES | {"hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2},
        "image",
    ),
    (
        "TFRegNetForImageClassification",
        "RegNetConfig",
        _STAGES
        | {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 2], "groups_width": 16},
        "image",
    ),
    (
        "TFResNetForImageClassification",
        "ResNetConfig",
        _STAGES | {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [2, 2]},
        "image",
    ),
    ("TFMobileViTForImageClassification", "MobileViTConfig", _IMAGE, "image"),
    ("TFCvtForImageClassification", "CvtConfig", _STAGES | _IMAGE, "image"),
    ("TFSegformerForSemanticSegmentation", "SegformerConfig", _STAGES, "segmented"),
    ("TFCLIPModel", "CLIPConfig", _CLIP, "both"),
    (
        "TFWhisperForConditionalGeneration",
        "WhisperConfig",
        _SEQUENCE
        | {
            "max_source_positions": 32,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
        "spectrum",
    ),
    ("TFWav2Vec2Model", "Wav2Vec2Config", _WAV, "sound"),
    ("TFHubertModel", "HubertConfig", _WAV, "sound"),
)


def _program(suffix: str, run: Any, row: tuple[Any, ...], may_warn: str | None = None) -> Program:
    return Program(
        f"transformers/{row[0]}{suffix}",
        ("transformers", "tf_keras"),
        functools.partial(run, *row),
        LEGACY_KERAS,
        may_warn,
    )


PROGRAMS = [
    *(_program("", _loop, row) for row in _LOOPS),
    *(
        _program(".fit", _fit, row)
        for row in _LOOPS
        if row[0]
        in (
            "TFBertForSequenceClassification",
            "TFGPT2LMHeadModel",
            "TFViTForImageClassification",
        )
    ),
    *(
        _program(".generate", _generate, row)
        for row in _LOOPS
        if row[0]
        in (
            "TFGPT2LMHeadModel",
            "TFT5ForConditionalGeneration",
        )
    ),
    _program(
        ".xla",
        functools.partial(_loop, xla=True),
        (
            "TFDistilBertForSequenceClassification",
            "DistilBertConfig",
            {"vocab_size": _VOCABULARY, "dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256},
            "classified",
        ),
        may_warn="XLA",
    ),
]
