"""A version 1 script switches AMP on by the documented call."""

from __future__ import annotations

import os

import session_harness as harness


def by_call(dtype: str) -> None:
    """Trains with the wrapped optimizer, and once more after AMP was switched off."""
    import tensorflow.compat.v1 as tf

    import tf_amp

    os.environ.update(harness.settings(dtype))
    optimizer = tf_amp.enable_mixed_precision_graph_rewrite(tf.train.MomentumOptimizer(0.05, 0.9))
    import session_script

    harness.report("script", **session_script.train(optimizer))
    harness.report("status", **tf_amp.status())
    tf_amp.disable_mixed_precision_graph_rewrite()
    with tf.Graph().as_default():
        plain = session_script.train(tf.train.MomentumOptimizer(0.05, 0.9))
    harness.report("plain", **plain)
