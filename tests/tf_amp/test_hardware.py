"""Which dtype and device follow from the hardware, with probes injected."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_units import HAS_ONEDNN
from tensorflow.python.util import _pywrap_util_port

from tf_amp.env_config import Settings
from tf_amp.hardware import choose_target, has_onednn_kernels, probe_cpu_flags, probe_onednn

V100, A100, P100 = (7, 0), (8, 0), (6, 0)
PLAIN = ("avx2", "avx512f")


@pytest.mark.parametrize(
    ("asked", "gpus", "flags", "dtype", "device"),
    [
        ("auto", [V100], PLAIN, "float16", "GPU"),
        ("auto", [P100], PLAIN, None, "GPU"),
        ("auto", [P100], ("avx512_bf16",), None, "GPU"),
        ("auto", [], ("avx512_bf16",), "bfloat16", "CPU"),
        ("auto", [], ("amx_bf16",), "bfloat16", "CPU"),
        ("auto", [], PLAIN, None, "CPU"),
        ("auto", [], (), None, "CPU"),
        ("auto", [A100, P100], PLAIN, None, "GPU"),
        ("auto", [A100, V100], PLAIN, "float16", "GPU"),
        ("auto", [None], PLAIN, None, "GPU"),
        ("float16", [V100], PLAIN, "float16", "GPU"),
        ("float16", [], ("avx512_bf16",), None, "CPU"),
        ("float16", [], ("avx512_fp16", "amx_fp16"), None, "CPU"),
        ("bfloat16", [V100], ("avx512_bf16",), None, "GPU"),
        ("bfloat16", [A100], PLAIN, "bfloat16", "GPU"),
        ("bfloat16", [], PLAIN, None, "CPU"),
    ],
)
def test_fast_units_decide(
    asked: str,
    gpus: list[tuple[int, int] | None],
    flags: tuple[str, ...],
    dtype: str | None,
    device: str,
) -> None:
    settings = Settings(target_dtype=asked)
    target = choose_target(settings, gpu_capabilities=gpus, cpu_flags=flags, onednn=True)
    assert (target.target_dtype, target.device) == (dtype, device)


@pytest.mark.parametrize(
    ("asked", "gpus", "dtype", "device"),
    [
        ("auto", [P100], "float16", "GPU"),
        ("auto", [], "bfloat16", "CPU"),
        ("float16", [], "float16", "CPU"),
        ("bfloat16", [P100], "bfloat16", "GPU"),
    ],
)
def test_ignore_performance_rewrites_all_the_same(
    asked: str, gpus: list[tuple[int, int] | None], dtype: str, device: str
) -> None:
    settings = Settings(target_dtype=asked, ignore_performance=True)
    target = choose_target(settings, gpu_capabilities=gpus, cpu_flags=PLAIN)
    assert (target.target_dtype, target.device) == (dtype, device)
    assert "although" in target.reason


@pytest.mark.parametrize(
    ("asked", "gpus", "flags", "said"),
    [
        ("auto", [P100], PLAIN, ["6.0", "7.0"]),
        ("auto", [A100, P100], PLAIN, ["6.0", "lowest"]),
        ("auto", [None], PLAIN, ["compute capability"]),
        ("auto", [], PLAIN, ["AVX512_BF16", "AMX_BF16", "bfloat16"]),
        ("auto", [], (), ["/proc/cpuinfo"]),
        ("float16", [], PLAIN, ["no fast float16 on CPUs."]),
        ("float16", [], ("amx_bf16",), ["no fast float16 on CPUs (bfloat16 is fast on this one)."]),
        ("bfloat16", [V100], PLAIN, ["7.0", "8.0"]),
    ],
)
def test_a_refusal_says_what_is_missing_and_the_remedy(
    asked: str, gpus: list[tuple[int, int] | None], flags: tuple[str, ...], said: list[str]
) -> None:
    settings = Settings(target_dtype=asked)
    reason = choose_target(settings, gpu_capabilities=gpus, cpu_flags=flags, onednn=True).reason
    for part in [*said, "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_IGNORE_PERFORMANCE=1"]:
        assert part in reason


def test_units_that_tensorflow_does_not_use() -> None:
    """Its own kernels for bfloat16 take several times as long as those for float32."""
    given = {"gpu_capabilities": (), "cpu_flags": ("avx512_bf16",), "onednn": False}
    target = choose_target(Settings(), **given)
    assert target.target_dtype is None
    for part in ("AVX512_BF16", "oneDNN", "TF_ENABLE_ONEDNN_OPTS=0", "IGNORE_PERFORMANCE=1"):
        assert part in target.reason
    asked = choose_target(Settings(ignore_performance=True), **given)
    assert asked.target_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("variables", "used"),
    [
        ({}, HAS_ONEDNN),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, HAS_ONEDNN),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, False),
        ({"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, False),
        ({"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX512_CORE"}, HAS_ONEDNN),
    ],
)
def test_what_onednn_may_use(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], used: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert probe_onednn() == used


@pytest.mark.parametrize("value", ["", "1", "0", "False"])
def test_kernels_of_onednn_run_by_their_names_unless_none_are_wanted(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", value)
    built_in = _pywrap_util_port.IsX86Available()
    assert has_onednn_kernels() == (built_in and value in ("", "1"))


def test_flags_are_read_from_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: x\nflags\t\t: fpu avx512_bf16 amx_bf16\nprocessor\t: 1\n"
        "flags\t\t: other\n"
    )
    assert probe_cpu_flags(cpuinfo) == {"fpu", "avx512_bf16", "amx_bf16"}


def test_a_system_without_cpuinfo_has_no_flags(tmp_path: Path) -> None:
    assert probe_cpu_flags(tmp_path / "missing") == frozenset()
