"""Signatures of models as steps that can be run on the side."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping

import tensorflow as tf

from tf_amp.comparison.callables import Arrays, Signature
from tf_amp.diagnosis.step import Step
from tf_amp.hosts.function_kernels import draws_anew

_log = logging.getLogger("tf_amp")


def step_of(signature: Signature) -> Step:
    """A signature of a model, traced for inputs of any of its shapes; it has no inputs yet."""
    function = tf.function(lambda fed: signature.call(fed), autograph=False)
    return Step(function.get_concrete_function(dict(signature.inputs)), [], {})


def fed(step: Step, signature: Signature, sample: Arrays) -> Step:
    """A traced signature with one batch as its inputs."""
    return dataclasses.replace(step, inputs=tf.nest.flatten(signature.feed(sample)))


def warn_of_random_numbers(signatures: Mapping[str, Signature]) -> None:
    """Says of which signatures each run gives other values, whatever is converted."""
    for key, signature in signatures.items():
        graph = step_of(signature).concrete.graph.as_graph_def()
        bodies = (function.node_def for function in graph.library.function)
        for node in itertools.chain(graph.node, *bodies):
            if draws_anew(node):
                _log.warning(
                    "The signature %r draws random numbers anew in each run (%s %r): what depends "
                    "on them is far apart whatever is converted. Save the model without, as for "
                    "training=False, or with seeds.",
                    key,
                    node.op,
                    node.name,
                )
                break
