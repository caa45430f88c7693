"""What the installed package costs a Python that does nothing: `python -c pass`.

    python benchmarks/python_start.py
    python benchmarks/python_start.py --runs 101

Builds the wheel, installs it in a virtual environment beside an empty one, and starts both
Pythons in turns, with the variable unset, `=0` and `=1`. The table has user and system CPU time
in milliseconds: the median, and how much more it is than without the package.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import RESULTS, print_table, write_json

_REPOSITORY = Path(__file__).resolve().parent.parent
_VARIABLE = "TF_ENABLE_AUTO_MIXED_PRECISION"
_BARE = "without the package"


def make_environments(folder: Path) -> tuple[Path, Path]:
    """Makes an empty virtual environment and one with the package, and returns their Pythons."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    pythons = []
    for name in ("bare", "installed"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / name], check=True)
        pythons.append(folder / name / "bin" / "python")
    build = [*pip, "wheel", "--no-deps", "--wheel-dir", folder, _REPOSITORY]
    subprocess.run([*build, "--no-build-isolation"], check=True)
    (wheel,) = folder.glob("*.whl")
    install = [*pip, "--python", pythons[1], "install", "--no-deps", wheel]
    subprocess.run(install, check=True)
    return pythons[0], pythons[1]


def cpu_milliseconds(python: Path, environment: dict[str, str]) -> float:
    """User and system time of one start."""
    started = os.posix_spawn(python, [str(python), "-c", "pass"], environment)
    _, status, usage = os.wait4(started, 0)
    if status:
        raise RuntimeError(f"{python} -c pass ended with status {status}.")
    return 1000.0 * (usage.ru_utime + usage.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=41, help="starts of every variant (41)")
    parser.add_argument("--json", type=Path, default=RESULTS / "python_start.json")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be at least 1; received {options.runs}")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TF_", "PYTHON", "COVERAGE"))
    }
    with tempfile.TemporaryDirectory() as folder:
        bare, installed = make_environments(Path(folder))
        variants = {
            _BARE: (bare, clean),
            "unset": (installed, clean),
            "=0": (installed, {**clean, _VARIABLE: "0"}),
            "=1": (installed, {**clean, _VARIABLE: "1"}),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(options.runs):
            for name, variant in variants.items():
                times[name].append(cpu_milliseconds(*variant))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        [name, f"{median:.2f}", f"{median - medians[_BARE]:+.2f}"]
        for name, median in medians.items()
    ]
    print_table(["variable", "median ms", "more"], rows)
    write_json(options.json, {"runs": options.runs, "median_ms": medians})


if __name__ == "__main__":
    main()
