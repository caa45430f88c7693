"""Which cost table holds: the user's own, the shipped one, or none."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from environments import AMP, REWRITE

from graph_passes.policy.cost_table_files import format_table, shipped_table
from tf_amp import cost_tables, hardware
from tf_amp.cost_tables import cached_table_path, choose_table, device_class
from tf_amp.env_config import EnvConfigError, read_settings
from tf_amp.env_variables import COST_TABLE, IGNORE_PERFORMANCE
from tf_amp.hardware import Target
from tf_amp.plan import make_plan

CPU = Target("bfloat16", "CPU", "")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("target", "gpus", "flags", "name"),
    [
        (CPU, (), ("avx2", "avx512_bf16"), "cpu-avx512_bf16"),
        (CPU, (), ("amx_bf16", "avx512_bf16"), "cpu-amx_bf16"),
        (CPU, (), ("avx2",), "cpu-plain"),
        (Target("float16", "CPU", ""), (), ("avx512_bf16", "avx512_fp16"), "cpu-plain"),
        (Target("float16", "GPU", ""), ((9, 0), (8, 0)), (), "gpu-8.0"),
        (Target("float16", "GPU", ""), (None,), (), "gpu-unknown"),
    ],
)
def test_classes_of_devices(
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
    gpus: tuple[tuple[int, int] | None, ...],
    flags: tuple[str, ...],
    name: str,
) -> None:
    monkeypatch.setattr(cost_tables, "probe_onednn", lambda: True)
    assert device_class(target, gpu_capabilities=gpus, cpu_flags=flags) == name
    monkeypatch.setattr(cost_tables, "probe_onednn", lambda: False)
    without = name if target.device == "GPU" else "cpu-plain"
    assert device_class(target, gpu_capabilities=gpus, cpu_flags=flags) == without


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "cpu-x-bfloat16.toml"
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cached_table_path("cpu-x", "bfloat16") == Path("/c/tf-amp/cost_tables") / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cached_table_path("cpu-x", "bfloat16") == Path("/h/.cache/tf-amp/cost_tables") / name


def test_the_users_table_wins_over_the_shipped_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cost_tables, "device_class", lambda _: "cpu-avx512_bf16")
    shipped = shipped_table("cpu-avx512_bf16", "bfloat16")
    assert shipped is not None
    choice = choose_table(read_settings({}), CPU)
    assert (choice.table, choice.reason) == (shipped, "shipped for cpu-avx512_bf16")

    path = cached_table_path("cpu-avx512_bf16", "bfloat16")
    path.parent.mkdir(parents=True)
    path.write_text(format_table(dataclasses.replace(shipped, measured_on="my own")))
    choice = choose_table(read_settings({}), CPU)
    assert choice.table is not None
    assert choice.table.measured_on == "my own"
    assert str(path) in choice.reason

    path.write_text("[casts")
    assert choose_table(read_settings({}), CPU).table == shipped
    assert str(path) in caplog.text


@pytest.mark.parametrize("member", ["exists", "read_text"])
def test_a_cache_that_cannot_be_read_leaves_the_shipped_table(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    member: str,
) -> None:
    monkeypatch.setattr(cost_tables, "device_class", lambda _: "cpu-avx512_bf16")
    shipped = shipped_table("cpu-avx512_bf16", "bfloat16")
    path = cached_table_path("cpu-avx512_bf16", "bfloat16")
    path.parent.mkdir(parents=True)
    path.write_text("")
    original = getattr(Path, member)

    def fail(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, member, fail)
    assert choose_table(read_settings({}), CPU).table == shipped
    # A cache of somebody else is none of this user's; a table in one's own is.
    assert ("Permission denied" in caplog.text) == (member == "read_text")


def test_what_xla_compiles_has_a_table_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_tables, "device_class", lambda _: "cpu-avx512_bf16")
    monkeypatch.setattr(cost_tables, "tensorflow_release", lambda: "2.21")
    automatic = read_settings({})
    plain = choose_table(automatic, CPU).table
    choice = choose_table(automatic, CPU, compiled=True)
    assert choice.reason == "shipped for cpu-avx512_bf16-xla2.21"
    assert choice.table is not None
    assert choice.table.compiled

    # The user's own, and a file that is named, each for functions of its kind alone.
    mine = dataclasses.replace(choice.table, measured_on="my own")
    path = cached_table_path("cpu-avx512_bf16-xla2.21", "bfloat16")
    path.parent.mkdir(parents=True)
    path.write_text(format_table(mine))
    assert choose_table(automatic, CPU).table == plain
    assert choose_table(automatic, CPU, compiled=True).table == mine
    for named, compiled in ((plain, False), (choice.table, True)):
        file = tmp_path / "named.toml"
        file.write_text(format_table(dataclasses.replace(named, measured_on="named")))
        settings = read_settings({COST_TABLE: str(file)})
        chosen = {c: choose_table(settings, CPU, compiled=c).table for c in (True, False)}
        assert chosen[compiled].measured_on == "named"
        assert chosen[not compiled] == (plain if compiled else mine)
    # XLA comes with TensorFlow: what was measured with one release says nothing of another.
    monkeypatch.setattr(cost_tables, "tensorflow_release", lambda: "2.99")
    other = choose_table(automatic, CPU, compiled=True)
    assert other.table is None
    assert "none is shipped for cpu-avx512_bf16-xla2.99; `tf-amp tune`" in other.reason
    off = read_settings({COST_TABLE: "off"})
    assert choose_table(off, CPU, compiled=True).table is None


def test_what_xla_compiles_on_a_gpu_goes_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_tables, "device_class", lambda _: "gpu-9.0")
    gpu = Target("float16", "GPU", "")
    found = choose_table(read_settings({}), gpu, compiled=True)
    assert (found.table, found.reason) == (None, "none is shipped for gpu-sm90-xla")
    cpu = shipped_table("cpu-avx512_bf16-xla2.21", "bfloat16")
    assert cpu is not None
    mine = dataclasses.replace(
        cpu, device_class="gpu-sm90-xla", device="GPU", target_dtype="float16"
    )
    path = cached_table_path("gpu-sm90-xla", "float16")
    path.parent.mkdir(parents=True)
    path.write_text(format_table(mine))
    assert choose_table(read_settings({}), gpu, compiled=True).table == mine
    assert choose_table(read_settings({}), gpu).table is None


def test_no_table_where_none_was_measured_or_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_tables, "device_class", lambda _: "gpu-9.0")
    gpu = Target("float16", "GPU", "")
    for settings, target, said in (
        (read_settings({}), gpu, "none is shipped for gpu-9.0; `tf-amp tune`"),
        (read_settings({COST_TABLE: "OFF"}), CPU, "switched off"),
        (read_settings({IGNORE_PERFORMANCE: "1"}), CPU, f"{IGNORE_PERFORMANCE} asks not to weigh"),
        (read_settings({}), Target(None, "CPU", ""), "nothing is converted"),
    ):
        choice = choose_table(settings, target)
        assert choice.table is None
        assert said in choice.reason


def test_a_file_that_is_no_table_is_an_error_that_names_variable_and_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    for text in (None, "device = 1"):
        if text is not None:
            path.write_text(text)
        with pytest.raises(EnvConfigError) as caught:
            choose_table(read_settings({COST_TABLE: str(path)}), CPU)
        assert COST_TABLE in str(caught.value)
        assert str(path) in str(caught.value)
        assert "auto or off" in str(caught.value)


def test_a_table_that_is_named_counts_though_performance_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_tables, "device_class", lambda _: "cpu-avx512_bf16")
    table = choose_table(read_settings({}), CPU).table
    assert table is not None
    path = tmp_path / "costs.toml"
    path.write_text(format_table(table))
    settings = read_settings({COST_TABLE: str(path), IGNORE_PERFORMANCE: "1"})
    assert choose_table(settings, CPU).table == table
    compiled = choose_table(settings, CPU, compiled=True)
    assert compiled.table is None
    assert IGNORE_PERFORMANCE in compiled.reason


def test_a_table_of_another_class_of_device_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.toml"
    table = shipped_table("cpu-avx512_bf16", "bfloat16")
    assert table is not None
    path.write_text(format_table(table))
    asked = {COST_TABLE: str(path), IGNORE_PERFORMANCE: "1", f"{REWRITE}_DTYPE": "bfloat16"}
    settings = read_settings({AMP: "1", **asked})
    monkeypatch.setattr(cost_tables, "device_class", lambda _: "cpu-avx512_bf16")
    assert not choose_table(settings, CPU).note
    monkeypatch.setattr(cost_tables, "device_class", lambda _: "cpu-plain")
    monkeypatch.setattr(hardware, "probe_gpu_capabilities", list)
    (note,) = make_plan(settings, "environment").notes
    for part in (str(path), "cpu-avx512_bf16", "cpu-plain", COST_TABLE):
        assert part in note
