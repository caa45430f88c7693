"""Measuring a cost table on this machine."""

from __future__ import annotations

from collections import Counter

import pytest
from cpu_units import HAS_ONEDNN, NO_ONEDNN
from environments import RunPython

from graph_passes.policy.cost_table import CHANNELS_FIRST, STRIDED
from graph_passes.policy.cost_table_files import format_table, parse_table
from tf_amp.tuning import chosen_probes, measure_table

ROWS = ["MatMul", "Relu", "AddV2/broadcast", "FusedBatchNormV3", "AddN", "Split"]


def test_measured_tables_have_the_rows_asked_for_and_can_be_read_again() -> None:
    seen: list[str] = []
    table = measure_table("cpu-here", "CPU", "bfloat16", only=ROWS, rounds=1, on_probe=seen.append)
    assert sorted(seen) == sorted([*ROWS, "casts"])
    assert [key for key, _ in table.rows] == sorted(ROWS)
    again = parse_table(format_table(table), "again")
    for op, sizes in (("MatMul", 5), ("Relu", 4)):
        cost = again.cost_of(op)
        assert cost is not None
        assert len(cost.low.sizes) == len(cost.low.seconds) == sizes
        for curve in (cost.float32, cost.low):
            assert all(seconds > 0.0 for seconds in curve.seconds)
    assert again.cost_of("MatMul").measure == "flops"  # type: ignore[union-attr]
    assert again.to_low.sizes == again.to_float32.sizes
    assert "TensorFlow" in table.measured_on


def test_what_xla_compiles_is_measured_by_itself() -> None:
    rows = ["MatMul", "Einsum", "Conv3DBackpropInputV2"]
    table = measure_table("cpu-here", "CPU", "bfloat16", only=rows, rounds=1, compiled=True)
    assert table.compiled
    assert [key for key, _ in table.rows] == sorted(rows)
    for _, cost in table.rows:
        assert cost.measure == "flops"
        assert all(seconds > 0.0 for seconds in cost.low.seconds)


def test_channels_first_are_measured_in_the_same_sizes() -> None:
    by_key = {probe.key: probe for probe in chosen_probes()}
    for op in ("Conv3D", "DepthwiseConv2dNativeBackpropFilter"):
        last, first = by_key[op], by_key[f"{op}/{CHANNELS_FIRST}"]
        assert [case.size for case in first.cases] == [case.size for case in last.cases]
    for end in ("", "BackpropInput", "BackpropFilter"):
        arguments = by_key[f"Conv2D{end}/{CHANNELS_FIRST}"].cases[0].arguments
        assert arguments["data_format"] == "NCHW"
    assert arguments["input"].shape == arguments["out_backprop"].shape == (16, 32, 8, 8)
    assert arguments["filter_sizes"] == [3, 3, 32, 32]


@pytest.mark.skipif(not HAS_ONEDNN, reason=f"{NO_ONEDNN}, of which alone some take channels first")
def test_channels_first_are_measured() -> None:
    rows = [f"Conv2D/{CHANNELS_FIRST}", f"Conv3DBackpropInputV2/{CHANNELS_FIRST}"]
    table = measure_table("cpu-here", "CPU", "bfloat16", only=rows, rounds=1)
    assert [key for key, _ in table.rows] == rows


def test_an_op_without_a_kernel_for_the_dtype_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from tf_amp import tuning
    from tf_amp.tuning_probes import Case, Low, Probe

    matrix = Low((4, 4))
    none = Probe("MatrixInverse", "", "elements", (Case(16, {"input": matrix}),))
    some = Probe("Relu", "", "elements", (Case(16, {"features": matrix}),))
    monkeypatch.setattr(tuning, "probes", lambda: (none, some))
    table = measure_table("cpu-here", "CPU", "bfloat16", rounds=1)
    assert [key for key, _ in table.rows] == ["Relu"]


def test_one_slow_run_does_not_decide_how_often_an_op_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tf_amp import tuning

    run = tuning._run
    runs: Counter[object] = Counter()
    copies: set[int] = set()

    def slow_at_first(timed: tuning._Timed, repeats: int = 1) -> float:
        function, _, times = timed
        runs[function] += 1
        copies.add(times)
        # What is made is run before it is timed.
        return 1.0 if runs[function] == 2 else run(timed, repeats)

    monkeypatch.setattr(tuning, "_run", slow_at_first)
    measure_table("cpu-here", "CPU", "bfloat16", only=["Neg"], rounds=1)
    assert max(copies) > 1


def test_calling_a_function_is_no_part_of_what_an_op_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tf_amp import tuning

    def run(timed: tuning._Timed, repeats: int = 1) -> float:
        ops = [node.op for node in timed[0].function_def.node_def]  # type: ignore[attr-defined]
        return 2.0 + 0.5 * ops.count("Neg")

    monkeypatch.setattr(tuning, "_run", run)
    table = measure_table("cpu-here", "CPU", "bfloat16", only=["Neg"])
    assert set(table.cost_of("Neg").float32.seconds) == {0.5}  # type: ignore[union-attr]
    assert min(table.to_low.seconds) > 0, "no time can be 0, however short a Cast is"


@pytest.mark.parametrize("compiled", [False, True])
def test_probes_are_distinct_and_grow(compiled: bool) -> None:
    probes = chosen_probes(compiled=compiled)
    assert len({probe.key for probe in probes}) == len(probes)
    for probe in probes:
        sizes = [case.size for case in probe.cases]
        assert sizes == sorted(set(sizes)), probe.key
    keys = {probe.key for probe in probes}
    assert keys >= {"MatMul", "Einsum", "Conv3D", "Conv3DBackpropFilterV2"}
    assert f"DepthwiseConv2dNativeBackpropInput/{STRIDED}" in keys


def test_an_unknown_row_is_named_with_the_legal_ones() -> None:
    with pytest.raises(ValueError, match=r"no row 'Rleu'.*Relu"):
        chosen_probes(["Rleu"])


def test_it_refuses_to_measure_under_amp_and_leaves_the_optimizers_as_they_were(
    run_forked: RunPython,
) -> None:
    code = """
        import tensorflow as tf
        import tf_amp
        from tf_amp.tuning import measure_table

        tf.config.optimizer.set_experimental_options({"constant_folding": False})
        measure_table("cpu-here", "CPU", "bfloat16", only=["Neg"], rounds=1)
        options = tf.config.optimizer.get_experimental_options()
        assert options["constant_folding"] is False, options
        assert not options.get("disable_meta_optimizer"), options
        tf_amp.enable_mixed_precision_graph_rewrite()
        try:
            measure_table("cpu-here", "CPU", "bfloat16", only=["Neg"], rounds=1)
        except RuntimeError as error:
            print(error)
    """
    ignore = {"TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_IGNORE_PERFORMANCE": "1"}
    printed = run_forked(code, ignore).stdout
    assert "AMP is on" in printed
    assert "tf-amp tune" in printed
