"""What pyproject.toml cannot say: the .pth file, and the optional shared object.

Everything else about the build stands in pyproject.toml.
"""

from __future__ import annotations

import os

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

AUTOLOAD = "tf_amp_autoload.pth"
PLUGIN_SOURCE = "tf_amp/hosts/graph_plugin.c"


class BuildPyWithAutoload(build_py):
    """Puts the .pth file at the top of site-packages, for a wheel and for an editable install."""

    def run(self) -> None:
        """Builds the packages, then copies the file."""
        super().run()
        if self.editable_mode:
            # Nothing of build_lib goes into an editable wheel; its install root does.
            root = self.get_finalized_command("install").install_lib
        else:
            root = self.build_lib
        self.copy_file(AUTOLOAD, os.path.join(root, AUTOLOAD))

    def get_source_files(self) -> list[str]:
        """Names the file as a source too, so that a source distribution holds it."""
        return [*super().get_source_files(), AUTOLOAD]


class BuildSharedObject(build_ext):
    """Builds a plain shared object: it is loaded by TensorFlow, not imported by Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Leaves out the interpreter's suffix: the file suits every Python."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Exports what the source marks, and no PyInit function, which it has not."""
        return ext.export_symbols


class WheelForAnyPython(bdist_wheel):
    """Tags the wheel py3-none-<platform>: the shared object uses no Python version's headers."""

    def get_tag(self) -> tuple[str, str, str]:
        """Keeps the platform of the usual tag and drops the interpreter."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        # Without a compiler the package installs all the same; v1 sessions then stay in float32.
        Extension("tf_amp.hosts.libtf_amp", sources=[PLUGIN_SOURCE], optional=True)
    ]
    if os.path.exists(PLUGIN_SOURCE)
    else [],
    cmdclass={
        "build_py": BuildPyWithAutoload,
        "build_ext": BuildSharedObject,
        "bdist_wheel": WheelForAnyPython,
    },
)
