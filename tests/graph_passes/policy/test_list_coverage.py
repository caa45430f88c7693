"""The op lists against the op registry, and against the lists of TensorFlow's own pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2, op_def_pb2, types_pb2
from tensorflow.python.framework import kernels, op_def_registry

import graph_passes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LISTS = Path(graph_passes.__file__).parent / "lists"
DTYPES = {"float16": types_pb2.DT_HALF, "bfloat16": types_pb2.DT_BFLOAT16}
DEVICE_TYPES = ("CPU", "GPU", "DEFAULT")
LIST_NAMES = ("allow", "infer", "clear", "deny", "unlisted")
FIELDS = {"list", "reason", "upstream", "devices"}
NOT_REGISTERED = "Not registered in TensorFlow 2.21"
HOW_TO_CHOOSE = """\
Add a table for each to graph_passes/lists/{dtype}.toml, in its alphabetical place: the list, and
one sentence why.
  allow     its time goes into matrix products or convolutions whose sums stay float32 inside
  infer     arithmetic that amplifies rounding little: element-wise ops, activations, gradients
  clear     moves, picks or compares values: a {dtype} input gives exactly the same result
  deny      leaves the range, cancels, or adds up many terms in {dtype}: what follows must stay
            float32 too
  unlisted  anything else: touches variables, carries a dtype in a handle, calls a function, draws
            random numbers, serves people, or needs float32 itself while its result may be cast
Where the answer holds on one device only, add devices = ["GPU"] or ["CPU"]. A table looks so:
  [{example}]
  list = "infer"
  reason = "Element-wise quotient with one rounding."
"""

on_the_reference_version = pytest.mark.skipif(
    not tf.__version__.startswith("2.21."),
    reason="the files are complete for the registry of TensorFlow 2.21",
)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def rows(dtype: str) -> dict[str, dict[str, Any]]:
    """The tables of one file; a name that occurs twice is an error of the TOML reader."""
    return tomllib.loads((LISTS / f"{dtype}.toml").read_text())


def float_attrs(op_def: op_def_pb2.OpDef, dtype: int) -> Iterator[str]:
    """The type attributes of an op that admit both float32 and the dtype."""
    for attr in op_def.attr:
        if attr.type in ("type", "list(type)"):
            legal = set(attr.allowed_values.list.type)
            if not legal or {types_pb2.DT_FLOAT, dtype} <= legal:
                yield attr.name


def takes(kernel: kernel_def_pb2.KernelDef, attr: str, dtype: int) -> bool:
    """Whether a kernel takes the dtype for an attr; one without a constraint takes any."""
    return all(
        dtype in constraint.allowed_values.list.type
        for constraint in kernel.constraint
        if constraint.name == attr and constraint.allowed_values.list.type
    )


def convertible_ops(registered: Iterable[kernel_def_pb2.KernelDef], dtype: int) -> set[str]:
    """The ops with a kernel that could run in the dtype where it runs in float32 today."""
    by_op: dict[str, list[kernel_def_pb2.KernelDef]] = {}
    for kernel in registered:
        if kernel.device_type in DEVICE_TYPES:
            by_op.setdefault(kernel.op, []).append(kernel)
    found = set()
    for op, candidates in by_op.items():
        op_def = op_def_registry.get(op)
        if op_def is not None and any(
            takes(kernel, attr, dtype)
            for attr in float_attrs(op_def, dtype)
            for kernel in candidates
        ):
            found.add(op)
    return found


def lesson_on_missing(needed: Iterable[str], known: Iterable[str], dtype: str) -> str:
    """Names the ops without a table and says how to write one; empty if there are none."""
    missing = sorted(set(needed) - set(known))
    if not missing:
        return ""
    return (
        f"{len(missing)} ops have a {dtype} kernel but no table in {dtype}.toml: "
        f"{', '.join(missing)}\n" + HOW_TO_CHOOSE.format(dtype=dtype, example=missing[0])
    )


def left_out_of_this_build() -> tuple[str, ...]:
    """Prefixes of ops that exist in some builds of TensorFlow only, and not in this one."""
    prefixes: list[str] = []
    if op_def_registry.get("_MklMatMul") is None:
        prefixes += ["_Mkl", "__Mkl"]
    if not tf.test.is_built_with_cuda():
        prefixes += ["_CopyFromGpuToHost", "_CopyFromHostToGpu"]
    return tuple(prefixes)


def unexpected_unknowns(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Ops of a file that this registry lacks, though nothing says that it may."""
    left_out = left_out_of_this_build()
    return [
        op
        for op, row in table.items()
        if op_def_registry.get(op) is None
        and not row["reason"].startswith(NOT_REGISTERED)
        and not op.startswith(left_out)
    ]


@pytest.fixture(scope="module")
def all_kernels() -> list[kernel_def_pb2.KernelDef]:
    return list(kernels.get_all_registered_kernels().kernel)


@both_dtypes
@on_the_reference_version
def test_every_op_with_a_low_precision_kernel_has_a_table(
    dtype: str, all_kernels: list[kernel_def_pb2.KernelDef]
) -> None:
    needed = convertible_ops(all_kernels, DTYPES[dtype])
    assert len(needed) > 300, "the registry was not read"
    lesson = lesson_on_missing(needed, rows(dtype), dtype)
    assert not lesson, lesson


@both_dtypes
@on_the_reference_version
def test_a_build_without_gpu_kernels_needs_no_more(
    dtype: str, all_kernels: list[kernel_def_pb2.KernelDef]
) -> None:
    cpu_only = [kernel for kernel in all_kernels if kernel.device_type == "CPU"]
    needed = convertible_ops(cpu_only, DTYPES[dtype])
    assert needed and needed <= rows(dtype).keys()


@both_dtypes
def test_the_lesson_names_the_missing_op_and_every_list(
    dtype: str, all_kernels: list[kernel_def_pb2.KernelDef]
) -> None:
    known = rows(dtype).keys() - {"Tanh"}
    lesson = lesson_on_missing({"Tanh", "MatMul"}, known, dtype)
    assert "Tanh" in lesson and "MatMul" not in lesson and f"{dtype}.toml" in lesson
    assert all(f"\n  {name} " in lesson for name in LIST_NAMES)
    assert "Tanh" in convertible_ops(all_kernels, DTYPES[dtype])


@both_dtypes
@on_the_reference_version
def test_only_ops_marked_so_are_unknown_to_the_registry(dtype: str) -> None:
    table = rows(dtype)
    assert unexpected_unknowns(table) == [], (
        f"this TensorFlow has no such op: a typo, or begin the reason with {NOT_REGISTERED!r}"
    )
    marked = [op for op, row in table.items() if row["reason"].startswith(NOT_REGISTERED)]
    assert marked and [op for op in marked if op_def_registry.get(op) is not None] == []


def test_a_misspelt_op_is_noticed() -> None:
    assert unexpected_unknowns({"MatMull": {"reason": "Matrix product."}}) == ["MatMull"]


@both_dtypes
def test_tables_are_well_formed(dtype: str) -> None:
    table = rows(dtype)
    assert list(table) == sorted(table)
    for op, row in table.items():
        where = f"[{op}] in {dtype}.toml: {row}"
        assert row.keys() <= FIELDS, where
        assert row["list"] in LIST_NAMES, where
        assert len(row["reason"].split()) >= 4 and row["reason"].endswith("."), where
        if "upstream" in row:
            agreed = {"unlisted": "none"}.get(row["list"], row["list"])
            assert row["upstream"] in (*LIST_NAMES[:4], "none"), where
            assert row["upstream"] != agreed, f"{where}: leave out what is equal"
        if "devices" in row:
            assert row["list"] != "unlisted" and row["devices"] in (["CPU"], ["GPU"]), where


@both_dtypes
def test_what_goes_low_is_low_in_what_xla_compiles(dtype: str) -> None:
    # The first function that is compiled registers the kernels.
    tf.function(lambda x: x + 1, jit_compile=True)(tf.constant(1.0))
    by_op: dict[str, list[kernel_def_pb2.KernelDef]] = {}
    for kernel in kernels.get_all_registered_kernels().kernel:
        if kernel.device_type in ("XLA_CPU_JIT", "XLA_GPU_JIT"):
            by_op.setdefault(f"{kernel.op} {kernel.device_type}", []).append(kernel)
    assert "MatMul XLA_CPU_JIT" in by_op
    table, float32_only = rows(dtype), []
    for name, candidates in by_op.items():
        op = name.split()[0]
        if table.get(op, {}).get("list") in ("allow", "infer", "clear"):
            float32_only += [
                f"{name} {attr}"
                for attr in float_attrs(op_def_registry.get(op), DTYPES[dtype])
                if any(takes(kernel, attr, types_pb2.DT_FLOAT) for kernel in candidates)
                and not any(takes(kernel, attr, DTYPES[dtype]) for kernel in candidates)
            ]
    assert float32_only == []


_WINDOWS: dict[str, Any] = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
_SUMS_IN_FLOAT32 = {
    "AvgPool": lambda x: tf.raw_ops.AvgPool(value=x, **_WINDOWS),
    "AvgPoolGrad": lambda x: tf.raw_ops.AvgPoolGrad(
        orig_input_shape=[2, 8, 8, 4], grad=x, **_WINDOWS
    ),
    "BiasAddGrad": lambda x: tf.raw_ops.BiasAddGrad(out_backprop=x),
    "Cumsum": lambda x: tf.raw_ops.Cumsum(x=x, axis=1),
    "FusedBatchNormV3": lambda x: (
        tf.raw_ops.FusedBatchNormV3(
            x=x, scale=tf.ones(4), offset=tf.ones(4), mean=tf.ones(4), variance=tf.ones(4)
        ).y
    ),
    "LRN": lambda x: tf.raw_ops.LRN(input=x),
    "LRNGrad": lambda x: tf.raw_ops.LRNGrad(input_grads=x, input_image=x, output_image=x),
    "MaxPoolGrad": lambda x: tf.raw_ops.MaxPoolGrad(
        orig_input=tf.tile(x, [1, 2, 2, 1]), orig_output=x, grad=x, **_WINDOWS
    ),
    "ResizeBilinearGrad": lambda x: tf.raw_ops.ResizeBilinearGrad(
        grads=tf.ones([2, 8, 8, 4]), original_image=x, half_pixel_centers=True
    ),
    "Softmax": lambda x: tf.raw_ops.Softmax(logits=x),
}
"""Ops that XLA computes in float32 whatever they are given, each of images [2, 4, 4, 4]."""


@pytest.mark.parametrize("op", _SUMS_IN_FLOAT32)
@both_dtypes
def test_what_goes_low_has_the_type_that_it_declares_in_what_xla_compiles(
    op: str, dtype: str
) -> None:
    function = _SUMS_IN_FLOAT32[op]
    compiled = tf.function(lambda x: tf.nn.relu(function(x)), jit_compile=True)
    images = tf.ones([2, 4, 4, 4], dtype)
    if rows(dtype).get(op, {}).get("list") in ("allow", "infer", "clear"):
        assert compiled(images).dtype == dtype
    elif op in ("LRN", "LRNGrad", "ResizeBilinearGrad"):  # not for nothing
        with pytest.raises(tf.errors.OpError, match="different precisions"):
            compiled(images)


@pytest.mark.parametrize("op", ["If", "StatelessIf", "While", "StatelessWhile", "PartitionedCall"])
@both_dtypes
def test_ops_that_call_functions_are_on_no_list(op: str, dtype: str) -> None:
    # Retyping a loop without its body makes a graph that TensorFlow refuses.
    assert rows(dtype)[op]["list"] == "unlisted"


@pytest.mark.parametrize("op", ["Sum", "Mean", "Log", "LogSoftmax", "DivNoNan", "L2Loss", "SaveV2"])
@both_dtypes
def test_what_reported_losses_are_made_of_is_denied(op: str, dtype: str) -> None:
    assert rows(dtype)[op]["list"] == "deny"


@pytest.mark.parametrize("prefix", ["ResourceApply", "ResourceSparseApply", "ResourceScatter"])
@both_dtypes
def test_updates_of_variables_are_on_no_list(prefix: str, dtype: str) -> None:
    lists = {row["list"] for op, row in rows(dtype).items() if op.startswith(prefix)}
    assert lists == {"unlisted"}


DUMP_LISTS = """
import json, pathlib, sys
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer

log_path, option, device = sys.argv[1:]
meta_graph = meta_graph_pb2.MetaGraphDef()
with tf.Graph().as_default() as graph:
    with tf.device(device or None):
        x = tf.compat.v1.placeholder(tf.float32, [8, 8])
        tf.identity(tf.nn.relu(tf.matmul(x, x)), name="out")
meta_graph.graph_def.CopyFrom(graph.as_graph_def())
meta_graph.collection_def["train_op"].node_list.value.append("out")
config = config_pb2.ConfigProto()
rewrites = config.graph_options.rewrite_options
for field in rewrites.DESCRIPTOR.fields:
    if field.enum_type is not None and field.enum_type.name == "Toggle":
        setattr(rewrites, field.name, rewriter_config_pb2.RewriterConfig.OFF)
rewrites.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
setattr(rewrites, option, rewriter_config_pb2.RewriterConfig.ON)
rewrites.min_graph_nodes = -1
rewrites.disable_model_pruning = True
rewrites.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
tf_optimizer.OptimizeGraph(config, meta_graph)
lists = {}
for dump in pathlib.Path(log_path).glob("paintbuckets_*.txt"):
    for line in dump.read_text().splitlines():
        if line.endswith("List:"):
            current = lists.setdefault(line[: -len("List:")].lower(), [])
        elif line.strip():
            current.append(line.strip())
print(json.dumps(lists))
"""


@pytest.mark.parametrize(
    ("dtype", "option", "device"),
    [
        ("float16", "auto_mixed_precision", ""),
        ("bfloat16", "auto_mixed_precision_onednn_bfloat16", "/cpu:0"),
        ("float16", "auto_mixed_precision_cpu", "/cpu:0"),
    ],
    ids=["float16-gpu", "bfloat16-cpu", "float16-cpu"],
)
@on_the_reference_version
def test_the_upstream_fields_are_the_lists_of_tensorflows_own_pass(
    dtype: str,
    option: str,
    device: str,
    run_forked: Callable[..., Any],
    tmp_path: Path,
) -> None:
    if dtype == "float16" and not tf.test.is_built_with_cuda():
        pytest.skip("TensorFlow's float16 lists depend on the CUDA version it was built with")
    done = run_forked(
        DUMP_LISTS,
        env={
            "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_SIMULATE_GPU": "1",
            "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH": str(tmp_path),
        },
        args=(str(tmp_path), option, device),
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    if not theirs and dtype == "bfloat16":
        pytest.skip("TensorFlow runs its bfloat16 pass only on a CPU that has bfloat16 units")
    assert theirs.keys() == {"allow", "infer", "clear", "deny"}
    ours: dict[str, set[str]] = {name: set() for name in theirs}
    for op, row in rows(dtype).items():
        upstream = row.get("upstream", row["list"])
        if upstream not in ("unlisted", "none"):
            ours[upstream].add(op)
    assert {name: sorted(ops) for name, ops in ours.items()} == {
        name: sorted(set(ops)) for name, ops in theirs.items()
    }
