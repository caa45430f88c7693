"""Flags of programs that use absl."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from environments import RunPython

PROGRAM = """
from tf_amp import autoload
autoload.activate()
import tensorflow as tf
from absl import app
import tf_amp, tf_amp.flags

def main(argv):
    tf.function(lambda x: tf.matmul(x, x) * 2.0)(tf.ones([64, 64]))
    status = tf_amp.status()
    print(f"@{status.graph_rewrite} {status.target_dtype} {status.level} {argv[1:]}@")

app.run(main)
"""
HERE = ("--amp", "--amp_dtype=bfloat16", "--amp_ignore_performance")
LINE = r"^I\d{4} .*\] \S+: MatMul 1 of 1 in bfloat16"


@pytest.mark.parametrize(
    ("args", "env", "said", "line"),
    [
        ((*HERE, "rest"), {}, "@True bfloat16  ['rest']@", True),
        ((*HERE, "--verbosity=-1"), {}, "@True bfloat16  []@", False),
        # A flag wins over the environment.
        ((*HERE, "--amp_level=TENSOR_CORES_ONLY"), {"TF_ENABLE_AUTO_MIXED_PRECISION": "1"}, "", 1),
        (("--noamp",), {"TF_ENABLE_AUTO_MIXED_PRECISION": "1"}, "@False", False),
        ((), {}, "@False", False),
    ],
)
def test_flags_decide(
    run_forked: RunPython, args: tuple[str, ...], env: Mapping[str, str], said: str, line: bool
) -> None:
    done = run_forked(PROGRAM, env, args=args)
    assert said in done.stdout
    if "--amp_level=TENSOR_CORES_ONLY" in args:
        assert "TENSOR_CORES_ONLY" in done.stdout
    assert bool(re.search(LINE, done.stderr, re.MULTILINE)) == bool(line)


def test_what_says_how_needs_what_says_that(run_forked: RunPython) -> None:
    done = run_forked(PROGRAM, args=("--amp_dtype=float16",), check=False)
    assert done.returncode != 0
    assert "does nothing without --amp" in done.stderr
