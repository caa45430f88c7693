"""Main program of every Bazel test: runs pytest on the one file that it is given."""

from __future__ import annotations

import os
import sys

import pytest

if __name__ == "__main__":
    arguments = ["-p", "no:cacheprovider", "-m", "not slow", *sys.argv[1:]]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        arguments.append(f"--junitxml={report}")
    sys.exit(pytest.main(arguments))
