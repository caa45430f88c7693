"""Cost tables in files: those that are shipped, those of the user, and what is wrong with one."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest
from small_cost_table import SMALL

from graph_passes.policy.cost_table import (
    BROADCAST,
    CHANNELS_FIRST,
    CHANNELS_FIRST_DEEP,
    CHANNELS_FIRST_POINTWISE,
    DOUBT,
    GROUPED_WIDE,
    RAGGED,
    STRIDED,
    WIDE,
    WIDE_STRIDED,
    compiled_class,
)
from graph_passes.policy.cost_table_files import (
    CostTableError,
    format_table,
    load_table,
    parse_table,
    shipped_table,
    table_name,
)

CLASSES = ("cpu-amx_bf16", "cpu-avx512_bf16")


def test_a_table_says_how_much_slower_counts() -> None:
    strict = dataclasses.replace(SMALL, doubt=1.25)
    assert "doubt = 1.25" in format_table(strict)
    assert parse_table(format_table(strict), "again").doubt == 1.25
    assert parse_table(format_table(SMALL), "again").doubt == DOUBT
    for fused in (True, False):
        text = format_table(dataclasses.replace(SMALL, fused_tails=fused))
        assert parse_table(text, "again").fused_tails is fused


def test_a_table_says_whether_xla_compiled_what_was_measured() -> None:
    compiled = dataclasses.replace(SMALL, compiled=True)
    assert parse_table(format_table(compiled), "again").compiled
    assert not parse_table(format_table(SMALL), "again").compiled


@pytest.mark.parametrize("device_class", CLASSES)
@pytest.mark.parametrize("release", ["2.18", "2.19", "2.20", "2.21"])
def test_a_table_for_xla_is_shipped_where_it_has_no_low_products(
    release: str, device_class: str
) -> None:
    shipped = shipped_table(compiled_class(device_class, release), "bfloat16")
    assert shipped is not None
    assert shipped.compiled
    assert f"TensorFlow {release}." in shipped.measured_on
    for op in ("MatMul", "BatchMatMulV2", "Conv2D"):
        cost = dict(shipped.rows)[op]
        assert cost.gain_beyond(cost.float32.sizes[-1], 1.1) <= 0


@pytest.mark.parametrize("device_class", CLASSES)
def test_the_xla_of_tensorflow_2_17_has_low_matrix_products_but_no_convolutions(
    device_class: str,
) -> None:
    shipped = shipped_table(compiled_class(device_class, "2.17"), "bfloat16")
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
            "\nfused_tails = 0\n[casts]",
            "'fused_tails' must be true or false; received 0",
        ),
        (
            "\n[casts]",
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


@pytest.mark.parametrize("device_class", CLASSES)
def test_the_shipped_tables_are_whole(device_class: str) -> None:
    table = shipped_table(device_class, "bfloat16")
    assert table is not None
    assert (table.device, table.target_dtype) == ("CPU", "bfloat16")
    for op in ("MatMul", "BatchMatMulV2", "Conv2D", "Relu", "AddV2", "FusedBatchNormV3", "Sigmoid"):
        assert table.cost_of(op) is not None, op
    # What decides on MobileNet: a kernel that is tens of times slower in bfloat16.
    strided = table.cost_of("DepthwiseConv2dNativeBackpropInput", STRIDED)
    assert strided is not None
    assert strided.low.seconds[-1] > 10 * strided.float32.seconds[-1]


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        ("DepthwiseConv2dNativeBackpropFilter", WIDE),
        ("DepthwiseConv2dNativeBackpropFilter", WIDE_STRIDED),
        ("FusedBatchNormV3", RAGGED),
        ("FusedBatchNormGradV3", RAGGED),
    ],
)
def test_what_decides_on_networks_with_wide_filters_and_ragged_channels(
    op: str, variant: str
) -> None:
    table = shipped_table("cpu-avx512_bf16", "bfloat16")
    assert table is not None
    cost = table.variants_of(op)[variant]
    assert cost.low.seconds[-1] > 1.8 * cost.float32.seconds[-1]


def test_what_decides_on_networks_with_groups() -> None:
    table = shipped_table("cpu-avx512_bf16", "bfloat16")
    assert table is not None
    forward = table.variants_of("Conv2D")[GROUPED_WIDE]
    backward = table.variants_of("Conv2DBackpropFilter")[GROUPED_WIDE]
    assert forward.low.seconds[-1] < forward.float32.seconds[-1]
    assert backward.low.seconds[0] > 1.5 * backward.float32.seconds[0]


@pytest.mark.parametrize("part", ["", "BackpropInput", "BackpropFilter"])
def test_what_decides_on_networks_with_channels_first(part: str) -> None:
    table = shipped_table("cpu-avx512_bf16", "bfloat16")
    assert table is not None
    variants = table.variants_of(f"Conv2D{part}")
    few = variants[CHANNELS_FIRST]
    assert few.gain(few.low.sizes[-1]) < 0
    assert few.gain(few.low.sizes[-2]) < 0
    for variant in (CHANNELS_FIRST_DEEP, CHANNELS_FIRST_POINTWISE):
        cost = variants[variant]
        assert cost.gain(cost.low.sizes[-1]) > 0
    depthwise = table.variants_of(f"DepthwiseConv2dNative{part}")[CHANNELS_FIRST]
    for size in depthwise.low.sizes:
        assert depthwise.low.at(size) > 1.5 * depthwise.float32.at(size)


def test_no_table_is_shipped_for_what_was_not_measured() -> None:
    assert table_name("gpu-9.0", "float16") == "gpu-9.0-float16.toml"
    assert shipped_table("gpu-9.0", "float16") is None
