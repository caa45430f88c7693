"""The tests under every supported TensorFlow: ``pip install -e '.[matrix]' && nox``.

Each release is taken with the Keras of its time under the oldest Python that it has wheels for, and
with the newest Keras under the newest Python. The first and the last release run the whole suite,
the others the tests of the hosts, which hold TensorFlow's private members, and of the table that
names these members. A row whose Python is not found is reported as skipped; nox finds what is on
PATH, so name a pyenv's folders there.

    nox --list
    nox -s 'tests(python="3.12", tensorflow="2.19", keras="3.15")' -- tests/tf_amp/hosts -x
"""

from __future__ import annotations

import nox

nox.options.error_on_missing_interpreters = False
nox.options.reuse_venv = "yes"

NEWEST_KERAS = "3.15"
# TensorFlow, the Keras of its time, its oldest and its newest Python of 3.10 to 3.13.
RELEASES = (
    ("2.17", "3.4", "3.10", "3.12"),
    ("2.18", "3.6", "3.10", "3.12"),
    ("2.19", "3.9", "3.10", "3.12"),
    ("2.20", "3.11", "3.10", "3.13"),
    ("2.21", "3.12", "3.10", "3.13"),
)
ENDS = (RELEASES[0][0], RELEASES[-1][0])
HOSTS = ("tests/tf_amp/hosts", "tests/tf_amp/test_compatibility.py")


@nox.session
@nox.parametrize(
    ("python", "tensorflow", "keras"),
    [
        row
        for tensorflow, keras, oldest, newest in RELEASES
        for row in ((oldest, tensorflow, keras), (newest, tensorflow, NEWEST_KERAS))
    ],
)
def tests(session: nox.Session, tensorflow: str, keras: str) -> None:
    """Runs the tests, or those of the command line."""
    session.install(
        f"tensorflow=={tensorflow}.*",
        f"keras=={keras}.*",
        f"tf_keras=={tensorflow}.*",
        # With 7, TensorFlow 2.20 fails by itself; the others say what they need.
        "protobuf<7" if tensorflow == "2.20" else "protobuf",
        "-e",
        ".[test]",
    )
    whole = ("tests",) if tensorflow in ENDS else HOSTS
    # `python -m` puts this folder on the path first: folders of tests have names of packages.
    session.run("python", "-m", "pytest", "-q", *(session.posargs or whole))
