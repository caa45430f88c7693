"""A cost table from measurements that are made up here, with a known price of a Cast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu.cost_table import cast_price, describe, main, make_table

from graph_passes import PrecisionConfig
from graph_passes.policy.cost_table_files import load_table

_START_S, _BYTES_PER_S = 2e-6, 2.5e12
_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)


def _case(key: str, size: int, float32: float, low: float, group: str = "products") -> Any:
    ways = {"float32": {"seconds": float32}, "float16": {"seconds": low}}
    ways["bfloat16"] = {"seconds": low * 1.1}
    return {"group": group, "name": key, "key": key, "size": size, "copies": 8, "ways": ways}


def _results(**changes: Any) -> dict[str, Any]:
    casts = [
        {"dtype": dtype, "size": size, "cast_s": _START_S + 6 * size / _BYTES_PER_S}
        for dtype in ("float16", "bfloat16")
        for size in _SIZES
    ]
    cases = [
        _case("MatMul", 1 << 40, 4e-3, 1e-3),
        _case("MatMul", 1 << 21, 4e-6, 4e-6),
        _case("BatchMatMulV2", 1 << 30, 5e-5, 2e-5),
        _case("Conv2D/strided", 1 << 30, 5e-5, 2e-5, "convolutions"),
        _case("", 1 << 20, 1e-6, 1e-6, "reductions"),
    ]
    cases.append(_case("Conv2D", 1 << 30, 5e-5, 2e-5))
    cases[-1]["ways"] = {"float32": {"seconds": 1e-6}, "float16": {"error": "no kernel"}}
    facts = {
        "device": "NVIDIA H100",
        "compute_capability": "9.0",
        "jaxlib": "0.11.2",
        "float32_products": "TF32 (largest error 1.0e-04)",
        "nvidia_smi": {"driver_version": "580.1"},
    }
    return {"facts": facts, "casts": casts, "cases": cases, "dispatch_s": 1e-5} | changes


def test_the_tables_are_ones_that_the_pass_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "micro.json"
    source.write_text(json.dumps(_results()))
    monkeypatch.setattr("sys.argv", ["cost_table", str(source), "--output", str(tmp_path)])
    main()
    for dtype in ("float16", "bfloat16"):
        table = load_table(tmp_path / f"gpu-sm90-xla-{dtype}.toml")
        assert (table.device, table.target_dtype, table.compiled) == ("GPU", dtype, True)
        assert "NVIDIA H100, driver 580.1" in table.measured_on
        assert "TF32" in table.measured_on
        rows = {"BatchMatMul", "BatchMatMulV2", "Conv2D/strided", "MatMul"}
        assert {key for key, _ in table.rows} == rows
        product = table.cost_of("MatMul")
        assert product is not None
        assert product.float32.sizes == (1 << 21, 1 << 40)
        assert product.gain_beyond(1 << 40, 1.1) > 0 > product.gain_beyond(1 << 21, 1.1)
        PrecisionConfig(target_dtype=dtype, device="GPU", cost_table=table, fused=True)
    said = capsys.readouterr().out
    assert "a Cast takes 2.00 us to start and moves 2500 GB/s" in said
    assert 'CAST_START["GPU"] would be 5000' in said


def test_the_price_of_a_cast_is_found_in_disturbed_times() -> None:
    results = _results()
    for number, row in enumerate(results["casts"]):
        row["cast_s"] *= 1 + 0.02 * (-1) ** number
    price = cast_price(make_table([results], "float16").to_low)
    assert price.start_s == pytest.approx(_START_S, rel=0.05)
    assert price.start_bytes == pytest.approx(_START_S * _BYTES_PER_S, rel=0.1)


def test_what_was_measured_again_counts() -> None:
    again = _results(casts=[], cases=[_case("MatMul", 1 << 40, 4e-3, 2e-3)])
    table = make_table([_results(), again], "float16")
    assert dict(table.rows)["MatMul"].low.seconds == (4e-6, 2e-3)
    assert "MatMul: 1.00 2.00 times as fast" in describe(table)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"casts": []}, "no cast to float16 was measured"),
        ({"facts": {"device": "cpu", "compute_capability": None}}, "must be of one GPU"),
        ({"casts": [{"dtype": "float16", "size": 1024, "cast_s": -1e-9}]}, "of casts, there must"),
    ],
)
def test_a_table_is_not_made_up(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_table([_results(**changes)], "float16")


def test_results_of_two_devices_make_no_table() -> None:
    other = _results()
    other["facts"]["device"] = "NVIDIA H200"
    with pytest.raises(ValueError, match=r"must be of one GPU .*H100.*H200"):
        make_table([_results(), other], "float16")
