"""The SavedModels that `conversions.py` converts, each written with a batch of inputs.

python benchmarks/served_models.py NAME DIRECTORY --inputs FILE.npz --steps 6
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

KERAS = ("resnet50", "mobilenetv2", "unet", "encoder", "lstm")
TRANSFORMERS = ("hf_bert", "hf_gpt2")
NAMES = (*KERAS, "v1", "hub_v1", *TRANSFORMERS)
_ROWS, _TOKENS = 4, 128


def keras_model(name: str, path: Path, steps: int) -> dict[str, np.ndarray]:
    """A network of `workloads.py`, after some steps on one batch: its outputs are not all alike."""
    import tensorflow as tf
    from workloads import WORKLOADS

    model, (inputs, labels) = WORKLOADS[name].compiled(jit_compile=False)
    for _ in range(steps):
        model.train_on_batch(inputs, labels)
    model.export(str(path), verbose=False)
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    return {next(iter(signature.structured_input_signature[1])): inputs}


def v1(path: Path) -> dict[str, np.ndarray]:
    """A perceptron of TensorFlow 1."""
    import tensorflow as tf

    v1 = tf.compat.v1
    rng = np.random.default_rng(0)
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 1024], name="x")
        y = x
        for number, width in enumerate((2048, 2048, 2048, 100)):
            shape = [int(y.shape[-1]), width]
            w = v1.get_variable(f"w{number}", shape, use_resource=True)
            b = v1.get_variable(f"b{number}", [width], use_resource=True)
            y = tf.nn.bias_add(tf.matmul(y, w), b)
            y = tf.nn.relu(y) if number < 3 else y
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(path), {"x": x}, {"y": tf.identity(y)})
    return {"x": rng.standard_normal((128, 1024)).astype(np.float32)}


def hub_v1(path: Path) -> dict[str, np.ndarray]:
    """What hub.Module of TensorFlow 1 exports: a graph without tags and one for training.

    The signature is called "default"; collections name variables, updates and losses; variables are
    references; batch normalization takes its mode from the graph.
    """
    import tensorflow as tf

    v1 = tf.compat.v1
    sizes = (32, 64, 128, 128)

    def body(training: bool) -> tuple[Any, Any, Any]:
        images = v1.placeholder(tf.float32, [None, 64, 64, 3], name="hub_input/images")
        x = images
        for number, size in enumerate(sizes):
            with v1.variable_scope(f"module/block{number}"):
                shape = [3, 3, int(x.shape[-1]), size]
                kernel = v1.get_variable("kernel", shape)
                x = tf.nn.conv2d(x, kernel, 2 if number else 1, "SAME")
                scale = v1.get_variable("gamma", [size], initializer=v1.ones_initializer())
                offset = v1.get_variable("beta", [size], initializer=v1.zeros_initializer())
                mean = v1.get_variable(
                    "moving_mean", [size], initializer=v1.zeros_initializer(), trainable=False
                )
                variance = v1.get_variable(
                    "moving_variance", [size], initializer=v1.ones_initializer(), trainable=False
                )
                used = (None, None) if training else (mean, variance)
                x, new_mean, _ = v1.nn.fused_batch_norm(
                    x, scale, offset, *used, is_training=training
                )
                if training:
                    v1.add_to_collection("update_ops", mean.assign(0.9 * mean + 0.1 * new_mean))
                v1.add_to_collection("regularization_losses", 1e-4 * tf.nn.l2_loss(kernel))
                x = tf.nn.relu(x)
        features = tf.reduce_mean(x, [1, 2], name="module/features")
        weight = v1.get_variable("module/logits/weights", [sizes[-1], 1000])
        return images, features, tf.matmul(features, weight, name="module/logits/MatMul")

    builder = v1.saved_model.Builder(str(path))
    for tags, training in (([], False), (["train"], True)):
        with tf.Graph().as_default(), v1.Session() as session:
            v1.set_random_seed(1)
            images, features, logits = body(training)
            infos = v1.saved_model.build_tensor_info
            signature = v1.saved_model.build_signature_def(
                {"images": infos(images)}, {"default": infos(features), "logits": infos(logits)}
            )
            if tags:
                builder.add_meta_graph(tags, signature_def_map={"default": signature})
            else:
                session.run(v1.global_variables_initializer())
                builder.add_meta_graph_and_variables(
                    session, tags, signature_def_map={"default": signature}
                )
    builder.save()
    (path / "tfhub_module.pb").write_bytes(b"\x08\x03")  # the format's version
    return {"images": np.random.default_rng(0).random((16, 64, 64, 3)).astype(np.float32)}


def transformers_model(name: str, path: Path) -> dict[str, np.ndarray]:
    """A TensorFlow model of Hugging Face's transformers, with random weights, of four layers."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf
    import transformers

    tf.keras.utils.set_random_seed(1)
    if name == "hf_bert":
        config = transformers.BertConfig(num_hidden_layers=4, num_labels=8)
        model, vocabulary = transformers.TFBertForSequenceClassification(config), 30522
    else:
        config = transformers.GPT2Config(n_layer=4, use_cache=False)
        model, vocabulary = transformers.TFGPT2LMHeadModel(config), 50257
    spec = tf.TensorSpec([None, _TOKENS], tf.int32)

    @tf.function
    def serve(input_ids: Any, attention_mask: Any) -> dict[str, Any]:
        found = model(input_ids=input_ids, attention_mask=attention_mask, training=False)
        return {"logits": found.logits}

    serving = serve.get_concrete_function(
        tf.TensorSpec(spec.shape, spec.dtype, "input_ids"),
        tf.TensorSpec(spec.shape, spec.dtype, "attention_mask"),
    )
    tf.saved_model.save(model, str(path), signatures={"serving_default": serving})
    tokens = np.random.default_rng(0).integers(vocabulary, size=(_ROWS, _TOKENS))
    return {"input_ids": tokens.astype(np.int32), "attention_mask": np.ones_like(tokens, np.int32)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.name in KERAS:
        inputs = keras_model(options.name, options.directory, options.steps)
    elif options.name in TRANSFORMERS:
        inputs = transformers_model(options.name, options.directory)
    else:
        inputs = {"v1": v1, "hub_v1": hub_v1}[options.name](options.directory)
    np.savez(options.inputs, **inputs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
