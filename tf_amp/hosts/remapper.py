"""Whether oneDNN's kernels run, and TensorFlow's remapper makes one of a product and its tail.

The rule `product-tail` writes biases and activations for it. Its GELU is no good by itself: near -1
nothing is left of 1 + Erf in bfloat16, where the kernel computes in float32.
"""

from __future__ import annotations

import dataclasses

from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context as context_lib

from graph_passes import PrecisionConfig
from graph_passes.units.product.product_tail import RULE
from tf_amp.hardware import probe_onednn

_OFF = rewriter_config_pb2.RewriterConfig.OFF


def runs_in_functions() -> bool:
    """Whether it runs, with oneDNN's kernels, on functions made from now on."""
    options = context_lib.context().get_optimizer_experimental_options()
    is_off = options.get("disable_meta_optimizer", False) or not options.get("remapping", True)
    return probe_onednn() and not is_off


def runs_in_session(config: config_pb2.ConfigProto) -> bool:
    """Whether it runs, with oneDNN's kernels, on the graphs of a session with a config."""
    is_off = config.graph_options.rewrite_options.remapping == _OFF
    return probe_onednn() and not is_off


def without_it(config: PrecisionConfig) -> PrecisionConfig:
    """The configuration for graphs on which it does not run."""
    return dataclasses.replace(config, disabled_rules=config.disabled_rules | {RULE})
