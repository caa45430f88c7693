"""`tf-amp demo`: what it compares, what it says when it cannot, and one short real run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable

import pytest

from tf_amp.cli import demo
from tf_amp.cli.main import main
from tf_amp.tool_error import ToolError

DTYPE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DTYPE"
CONVERTED = {"graphs_rewritten": 2, "nodes_converted": 30, "casts": 11}


def _training(losses: tuple[float, ...], step: float, **status: int) -> demo.Training:
    said = ("tf_amp: AMP on",) if status else ()
    return demo.Training(losses, 0.75, step_seconds=step, status=status, messages=said)


def test_comparison_pairs_trainings_of_one_seed() -> None:
    baseline = [_training((2.0, 1.0), 0.020), _training((2.5, 1.125), 0.030)]
    mixed = [_training((2.0, 1.25), 0.010, **CONVERTED), _training((2.5, 1.0), 0.010, **CONVERTED)]
    lines = demo.comparison(baseline, mixed).splitlines()
    assert lines[1].split()[-2:] == ["0.7500", "0.7500"]
    assert lines[3].split()[-2:] == ["25.00", "10.00"]
    assert "2.50x (2.00, 3.00; float32 / AMP)" in lines[4]
    assert "at most 0.2500 apart (two float32 seeds: 0.5000)" in lines[5]
    assert [line.split()[-1] for line in lines[6:9]] == ["2", "30", "11"]
    assert lines[9:] == ["what AMP said:", "  tf_amp: AMP on"]


def test_comparison_says_when_nothing_was_converted() -> None:
    trainings = [_training((1.0, 0.5), 0.02), _training((1.0, 0.5), 0.02)]
    assert "WARNING: AMP was asked for but nothing was converted" in demo.comparison(
        trainings, trainings
    )


def test_missing_scikit_learn_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sklearn" else real(name)
    )
    assert main(["demo"]) == 1
    printed = capsys.readouterr().err
    assert "needs sklearn" in printed
    assert "-m pip install scikit-learn" in printed


@pytest.mark.parametrize("arguments", [["--epochs", "1"], ["--rounds", "0"], ["--epochs", "x"]])
def test_too_little_training_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", *arguments])
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_failed_training_is_told_with_its_last_lines() -> None:
    with pytest.raises(ToolError) as caught:
        demo._train(("-m", "tf_amp.no_such_training"), os.environ, "float32", lambda *_: None)
    assert "a training ended with status 1" in str(caught.value)
    assert "No module named tf_amp.no_such_training" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_short_real_run(
    run_python: Callable[..., subprocess.CompletedProcess[str]], dtype: str
) -> None:
    code = "import sys; from tf_amp.cli.main import main; sys.exit(main(sys.argv[1:]))"
    # Without fast units the demo asks for IGNORE_PERFORMANCE itself, and takes a narrower network.
    done = run_python(code, {DTYPE: dtype}, args=("demo", "--epochs", "3"), timeout=500)
    converted = re.search(r"nodes converted +(\d+)", done.stdout)
    assert converted is not None and int(converted[1]) > 20, done.stdout
    # The loss, not the accuracy: after 33 steps the stored statistics of the batch norms lag behind
    # the weights, and float32 alone is right for 11 to 78 % of the test images, by the seed.
    loss = re.search(r"last loss \(mean\) +([\d.]+) +([\d.]+)", done.stdout)
    assert loss is not None
    assert all(float(value) < 1.0 for value in loss.groups()), "ln(10) = 2.3 is chance"
    assert "12/12" in done.stderr
