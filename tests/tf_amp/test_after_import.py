from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tf_amp.after_import import AfterImport


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Writes a module that can be imported during the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        names.append(name)
        return name

    before = list(sys.meta_path)
    yield write
    sys.meta_path[:] = before
    for name in names:
        sys.modules.pop(name, None)


def test_a_module_imported_before_is_acted_on_at_once(write) -> None:
    name = write("awaited_early", "value = 1")
    module, seen = importlib.import_module(name), []
    waiting = AfterImport({name: seen.append})
    waiting.start()
    assert seen == [module]
    assert waiting not in sys.meta_path


def test_a_module_imported_later_is_acted_on_once_it_is_whole(write) -> None:
    name = write("awaited_late", "value = 1\nvalue += 1")
    seen: list[int] = []
    waiting = AfterImport({name: lambda module: seen.append(module.value)})
    waiting.start()
    assert seen == []
    module = importlib.import_module(name)
    assert seen == [2]
    assert type(module.__loader__).__module__ == "_frozen_importlib_external"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert waiting not in sys.meta_path
    importlib.reload(module)
    assert seen == [2]


def test_a_module_in_the_middle_of_its_import_is_waited_for(write) -> None:
    seen: list[int] = []

    def begin() -> None:
        AfterImport({name: lambda module: seen.append(module.value)}).start()

    helper = ModuleType("awaited_helper")
    helper.begin = begin  # type: ignore[attr-defined]
    sys.modules["awaited_helper"] = helper
    name = write("awaited_amid", "import awaited_helper\nawaited_helper.begin()\nvalue = 3")
    importlib.import_module(name)
    del sys.modules["awaited_helper"]
    assert seen == [3]


def test_a_check_stops_the_import_which_may_be_tried_again(write) -> None:
    name = write("awaited_checked", "value = 1")
    allowed: list[bool] = []
    seen: list[ModuleType] = []

    def check() -> None:
        if not allowed:
            raise ValueError("not yet")

    AfterImport({name: seen.append}, {name: check}).start()
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module(name)
    assert name not in sys.modules
    allowed.append(True)
    assert seen == []
    assert importlib.import_module(name) in seen


def test_after_stop_nothing_is_run(write) -> None:
    name = write("awaited_stopped", "value = 1")
    seen: list[ModuleType] = []
    waiting = AfterImport({name: seen.append})
    waiting.start()
    waiting.stop()
    importlib.import_module(name)
    assert seen == []
    assert waiting not in sys.meta_path
