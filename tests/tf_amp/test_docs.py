"""README and docs: what they tell readers to type is run, or at least understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from graph_passes.policy.rules import load_rules
from tf_amp.cli.main import parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "env_config.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRELUDE = """
import keras, numpy as np, tensorflow as tf, tf_amp
from tf_amp.loss_scale import wrap_optimizer

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
model.compile(wrap_optimizer(keras.optimizers.Adam(1e-3)), "mse", jit_compile=False)
data = tf.data.Dataset.from_tensors((np.ones((16, 8), "f"), np.ones((16, 4), "f"))).repeat(3)
features, weights, batch = tf.ones((16, 8)), tf.Variable(tf.ones((8, 4))), tf.ones((16, 8))

@tf.function
def train_step(batch):
    return tf.reduce_sum(tf.matmul(batch, weights))
"""


def blocks(language: str) -> list[object]:
    """The code of a language in all pages."""
    found = [
        pytest.param(code, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (of, code) in enumerate(BLOCK.findall(page.read_text()))
        if of == language
    ]
    return found or [pytest.param(None, marks=pytest.mark.skip(reason="the pages are not here"))]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(run_forked, code):
    run_forked(PRELUDE + code, {"TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DTYPE": "bfloat16"})


@pytest.mark.parametrize("code", blocks("toml"))
def test_rules_are_legal(tmp_path, code):
    path = tmp_path / "rules.toml"
    path.write_text(code)
    assert load_rules(str(path), "call")


@pytest.mark.parametrize("code", blocks("sh"))
def test_commands_are_understood(code):
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["tf-amp"]:
            assert callable(parser().parse_args(words[1:]).run)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    if not page.exists():
        pytest.skip("the pages are not here")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert all((page.parent / link).exists() for link in links), links
