"""The reader of TOML, which Python has since 3.11."""

import functools
import importlib.resources
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["read_shipped", "tomllib"]


@functools.cache
def read_shipped(name: str) -> dict[str, Any]:
    """Reads data of the package, once, by the file's name in it, such as "lists/rules.toml"."""
    resource = importlib.resources.files("graph_passes") / name
    return tomllib.loads(resource.read_text(encoding="utf-8"))
