"""What this machine's CPU makes of bfloat16, for tests whose figures depend on it."""

from __future__ import annotations

import functools

import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from tf_amp.hardware import CPU_FLAGS, probe_cpu_flags

HAS_BFLOAT16_UNITS = not probe_cpu_flags().isdisjoint(CPU_FLAGS["bfloat16"])
NO_BFLOAT16_UNITS = "this CPU has none of " + ", ".join(CPU_FLAGS["bfloat16"])
# TensorFlow uses them by itself where the CPU has AVX512_VNNI or the like.
HAS_ONEDNN = bool(_pywrap_util_port.IsMklEnabled())
NO_ONEDNN = "TensorFlow does not use oneDNN's kernels on this CPU"


@functools.cache
def bfloat16_product_error() -> int:
    """The most that a bfloat16 product is off by, in half units of the last place.

    Products are added up in float32 everywhere. With bfloat16 units the sum is rounded to the
    nearest (1); without, TensorFlow's kernel cuts off its last 16 bits (2).
    """
    above = tf.constant([[1.0, 0.75 * 2**-7]], tf.bfloat16)
    return 2 if float(tf.matmul(above, tf.ones_like(above), transpose_b=True)[0, 0]) == 1 else 1


def bfloat16_errors_behind_products() -> int:
    """By which factor results of several bfloat16 products may be farther from float32.

    What is cut off always lies on the same side of the exact sum: errors that are twice as large
    add up where those of rounding cancel, here taken as twice as many.
    """
    return bfloat16_product_error() ** 2
