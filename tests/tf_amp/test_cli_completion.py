"""What a shell completes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from environments import RunPython

from tf_amp.cli.main import main


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("pro",), {"profile"}),
        (("plan", "--dev"), {"--device"}),
        (("plan", "--device", ""), {"CPU", "GPU"}),
    ],
)
def test_bash_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], found: set[str]
) -> None:
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    typed = " ".join(f"'{word}'" for word in ("tf-amp", *words))
    code = f"""
        source {script}
        COMP_WORDS=({typed}); COMP_CWORD={len(words)}
        name=$(complete -p tf-amp | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        $name tf-amp '{words[-1]}' '{("tf-amp", *words)[-2]}'
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run([bash, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == found, done.stderr


def test_without_shtab_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'tf-amp[completion]'" in capsys.readouterr().err


def test_verbosity_hides_lines(run_forked: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import tensorflow as tf\ntf.function(lambda x: tf.matmul(x, x))(tf.ones([64, 64]))\n"
    )
    main_code = "import sys; from tf_amp.cli.main import main; sys.exit(main())"
    options = ("run", "--dtype", "bfloat16", "--ignore-performance", str(script))
    assert "tf_amp: AMP on" in run_forked(main_code, args=options).stderr
    quiet = run_forked(main_code, args=("--verbosity", "warning", *options)).stderr
    assert "tf_amp: " not in quiet
