"""Signatures of models as steps that can be run on the side."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_amp.comparison.callables import Arrays, Signature
from tf_amp.diagnosis.step import Step


def step_of(signature: Signature) -> Step:
    """A signature of a model, traced for inputs of any of its shapes; it has no inputs yet."""
    function = tf.function(lambda fed: signature.call(fed), autograph=False)
    return Step(function.get_concrete_function(dict(signature.inputs)), [], {})


def fed(step: Step, signature: Signature, sample: Arrays) -> Step:
    """A traced signature with one batch as its inputs."""
    return dataclasses.replace(step, inputs=tf.nest.flatten(signature.feed(sample)))
