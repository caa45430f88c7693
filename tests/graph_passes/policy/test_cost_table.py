"""Cost tables: curves, look-ups, and the files they come from."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_passes import PrecisionConfig
from graph_passes.policy.cost_table import (
    BROADCAST,
    DOUBT,
    STRIDED,
    CostTable,
    CostTableError,
    Curve,
    OpCost,
    compiled_class,
    format_table,
    load_table,
    parse_table,
    shipped_table,
    table_name,
)

CURVE = Curve((1000, 100_000), (1e-6, 1e-4))
SMALL = CostTable(
    device_class="cpu-test",
    device="CPU",
    target_dtype="bfloat16",
    measured_on="nothing",
    to_low=CURVE,
    to_float32=Curve((1000, 100_000), (2e-6, 2e-4)),
    rows=(
        ("AddV2", OpCost("elements", CURVE, Curve((1000, 100_000), (2e-6, 5e-5)))),
        ("AddV2/broadcast", OpCost("elements", CURVE, Curve((1000, 100_000), (3e-6, 3e-4)))),
        ("MatMul", OpCost("flops", Curve((100,), (3e-6,)), Curve((100,), (1e-6,)))),
    ),
)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (1, 1e-6),
        (1000, 1e-6),
        (10_000, 1e-5),
        (100_000, 1e-4),
        (1_000_000, 1e-3),
    ],
)
def test_a_curve_between_below_and_above_what_was_measured(size: int, seconds: float) -> None:
    assert CURVE.at(size) == pytest.approx(seconds)


_times = st.lists(st.floats(1e-7, 10), min_size=1, max_size=6)


@given(times=_times, sizes=st.sets(st.integers(1, 10**9), min_size=6, max_size=6), at=st.data())
def test_a_curve_stays_between_its_neighbours(
    times: list[float], sizes: set[int], at: st.DataObject
) -> None:
    chosen = tuple(sorted(sizes))[: len(times)]
    curve = Curve(chosen, tuple(times))
    size = at.draw(st.integers(chosen[0], chosen[-1]))
    below = max(i for i, known in enumerate(chosen) if known <= size)
    ends = times[below : below + 2]
    assert min(ends) * 0.999 <= curve.at(size) <= max(ends) * 1.001


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ((), (), "one or more ascending"),
        ((0, 5), (1.0, 1.0), "at least 1"),
        ((5, 5), (1.0, 1.0), "ascending"),
        ((5, 6), (1.0,), "one time"),
        ((5,), (0.0,), "greater than 0"),
        ((5,), (float("nan"),), "greater than 0"),
    ],
)
def test_an_impossible_curve_is_refused(
    sizes: tuple[int, ...], seconds: tuple[float, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Curve(sizes, seconds)


def test_a_variant_falls_back_to_its_op() -> None:
    assert SMALL.cost_of("AddV2", BROADCAST) is dict(SMALL.rows)["AddV2/broadcast"]
    assert SMALL.cost_of("AddV2", STRIDED) is SMALL.cost_of("AddV2")
    assert SMALL.cost_of("Relu") is None
    assert SMALL.cost_of("Relu", BROADCAST) is None
    assert set(SMALL.variants_of("AddV2")) == {"", BROADCAST}
    assert not SMALL.variants_of("Relu")


def test_gain_is_the_difference_and_clear_only_if_it_has_one_sign() -> None:
    add, matmul = SMALL.cost_of("AddV2"), SMALL.cost_of("MatMul")
    assert add is not None
    assert matmul is not None
    assert add.gain(1000) == pytest.approx(-1e-6)
    assert add.gain(100_000) == pytest.approx(5e-5)
    assert add.clear_gain(100_000, 1.25) == 0
    assert matmul.clear_gain(100, 1.25) == pytest.approx(2e-6)
    assert matmul.clear_gain(100, 4) == 0


@pytest.mark.parametrize(
    ("low", "gain"), [(0.5e-6, 0.5e-6), (1e-6, 0), (1.5e-6, 0), (2e-6, -0.5e-6), (9e-6, -7.5e-6)]
)
def test_a_small_loss_is_in_doubt(low: float, gain: float) -> None:
    cost = OpCost("elements", Curve((1,), (1e-6,)), Curve((1,), (low,)))
    assert cost.gain(1, doubt=1.5) == pytest.approx(gain)


def test_a_gain_beyond_a_margin_is_less_and_may_be_a_loss() -> None:
    cost = OpCost("flops", Curve((1,), (4e-6,)), Curve((1,), (3e-6,)))
    assert cost.gain_beyond(1, 1.0) == pytest.approx(cost.gain(1))
    assert cost.gain_beyond(1, 1.1) == pytest.approx(0.7e-6)
    assert cost.gain_beyond(1, 1.5) == pytest.approx(-0.5e-6)


def test_one_size_alone_makes_no_gain_beyond_a_margin() -> None:
    sizes, full = (1, 10, 100), (1e-6, 1e-5, 1e-4)
    once = OpCost("flops", Curve(sizes, full), Curve(sizes, (1e-6, 1e-6, 1e-4)))
    assert once.gain_beyond(10, 1.1) == 0
    assert once.gain_beyond(100, 1.1) == pytest.approx(-1e-5)
    twice = OpCost("flops", Curve(sizes, full), Curve(sizes, (1e-6, 1e-6, 1e-5)))
    assert twice.gain_beyond(10, 1.1) == pytest.approx(8.9e-6)


def test_a_table_says_how_much_slower_counts() -> None:
    strict = dataclasses.replace(SMALL, doubt=1.25)
    assert "doubt = 1.25" in format_table(strict)
    assert parse_table(format_table(strict), "again").doubt == 1.25
    assert parse_table(format_table(SMALL), "again").doubt == DOUBT


def test_a_table_says_whether_xla_compiled_what_was_measured() -> None:
    compiled = dataclasses.replace(SMALL, compiled=True)
    assert parse_table(format_table(compiled), "again").compiled
    assert not parse_table(format_table(SMALL), "again").compiled


@pytest.mark.parametrize("release", ["2.18", "2.19", "2.20", "2.21"])
def test_a_table_for_xla_is_shipped_where_it_has_no_low_products(release: str) -> None:
    shipped = shipped_table(compiled_class("cpu-avx512_bf16", release), "bfloat16")
    assert shipped is not None
    assert shipped.compiled
    assert f"TensorFlow {release}." in shipped.measured_on
    for op in ("MatMul", "BatchMatMulV2", "Conv2D"):
        cost = dict(shipped.rows)[op]
        assert cost.gain_beyond(cost.float32.sizes[-1], 1.1) <= 0


def test_the_xla_of_tensorflow_2_17_has_low_matrix_products_but_no_convolutions() -> None:
    shipped = shipped_table(compiled_class("cpu-avx512_bf16", "2.17"), "bfloat16")
    assert shipped is not None
    assert shipped.compiled
    gains = {
        op: cost.gain_beyond(cost.float32.sizes[-1], 1.1) > 0
        for op, cost in shipped.rows
        if op in ("MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "Conv2DBackpropInput")
    }
    assert gains == {
        "MatMul": True,
        "BatchMatMulV2": True,
        "Einsum": True,
        "Conv2D": False,
        "Conv2DBackpropInput": False,
    }


def test_a_table_survives_being_written_and_read() -> None:
    again = parse_table(format_table(SMALL), "again")
    assert format_table(again) == format_table(SMALL)
    assert [key for key, _ in again.rows] == [key for key, _ in SMALL.rows]
    assert again.cost_of("AddV2", BROADCAST).gain(1000) == pytest.approx(-2e-6)  # type: ignore[union-attr]
    assert dataclasses.replace(again, rows=()) != again
    assert {again: 1}[parse_table(format_table(SMALL), "third")] == 1
    assert pickle.loads(pickle.dumps(again)) == again


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('device_class = "cpu-test"', "", "'device_class' must be a text"),
        ('device = "CPU"', 'device = "TPU"', "one of GPU, CPU; received 'TPU'"),
        ('"bfloat16"', '"float8"', "float16, bfloat16; received 'float8'"),
        ("[casts]", "[cast]", "no section 'casts'"),
        ("to_low_us = [1.0,", "to_low_us = [-1.0,", "'casts', 'to_low_us': there must be one time"),
        ("to_low_us = [1.0,", 'to_low_us = ["1",', "received [1000, 100000] and ['1'"),
        (
            "\n\n[casts]",
            "\ndoubt = 0.5\n[casts]",
            "'doubt' must be a number of at least 1; received 0.5",
        ),
        ("\n\n[casts]", "\ncompiled = 1\n[casts]", "'compiled' must be true or false; received 1"),
        ('measure = "flops"', 'measure = "bytes"', "elements, flops; received 'bytes'"),
        ("[ops.MatMul]", "[ops.MatMul", "is no TOML"),
    ],
)
def test_a_file_of_another_form_is_named_with_what_is_wrong(old: str, new: str, said: str) -> None:
    text = format_table(SMALL)
    assert old in text
    with pytest.raises(CostTableError) as caught:
        parse_table(text.replace(old, new, 1), "mine.toml")
    assert said in str(caught.value)
    assert "'mine.toml'" in str(caught.value)
    assert "tf-amp tune" in str(caught.value)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CostTableError, match=r"nowhere\.toml.*cannot be read"):
        load_table(tmp_path / "nowhere.toml")


def test_the_shipped_table_is_whole() -> None:
    table = shipped_table("cpu-avx512_bf16", "bfloat16")
    assert table is not None
    assert (table.device, table.target_dtype) == ("CPU", "bfloat16")
    for op in ("MatMul", "BatchMatMulV2", "Conv2D", "Relu", "AddV2", "FusedBatchNormV3", "Sigmoid"):
        assert table.cost_of(op) is not None, op
    # What decides on MobileNet: a kernel that is tens of times slower in bfloat16.
    strided = table.cost_of("DepthwiseConv2dNativeBackpropInput", STRIDED)
    assert strided is not None
    assert strided.low.seconds[-1] > 10 * strided.float32.seconds[-1]


def test_no_table_is_shipped_for_what_was_not_measured() -> None:
    assert table_name("gpu-9.0", "float16") == "gpu-9.0-float16.toml"
    assert shipped_table("gpu-9.0", "float16") is None


def test_a_config_takes_a_table_of_its_dtype_and_device_only() -> None:
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", cost_table=SMALL)
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(ValueError, match=r"bfloat16 on CPU.*float16 on GPU"):
        PrecisionConfig(cost_table=SMALL)
