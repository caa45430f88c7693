"""``tf-amp verify``: compares parity mode with TensorFlow's own pass on a model."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tf_amp.cli.numbers import count_or_none
from tf_amp.env_config import read_settings
from tf_amp.env_variables import DTYPE, LOG_PATH, REWRITE, EnvConfigError
from tf_amp.hardware import CPU_FLAGS, probe_cpu_flags, probe_onednn
from tf_amp.tool_error import ToolError

if TYPE_CHECKING:
    from graph_passes.policy.config import Level, TargetDtype

_SIMULATE_GPU = f"{REWRITE}_SIMULATE_GPU"
_SHOWN = 20
_EXIT_CODES = (
    "Exit status: 0 if both plans are the same; 1 if the model cannot be read, or one of the two "
    "passes gives up; 2 for a wrong call or setting; 3 if the plans differ. The differences that "
    "are on purpose are in graph_passes/parity_differences.md."
)


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "verify",
        help="compare with TensorFlow's own pass on a model",
        description="Plans a model as TensorFlow's own auto_mixed_precision pass does, has that "
        "pass rewrite it too, and prints what differs. Nothing else is executed. List edits and "
        "the level come from the environment, which both read; rules and units are ours alone and "
        "left out. No GPU is needed.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="as for `tf-amp plan`: a SavedModel, .pb, .keras"
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16"),
        help=f"float16 (for a GPU) or bfloat16 (for a CPU); default: {DTYPE}, else float16",
    )
    parser.add_argument(
        "--limit",
        type=count_or_none,
        default=_SHOWN,
        help=f"how many differences to print ({_SHOWN})",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON array, a graph each")
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Compares the two and prints the outcome."""
    settings = read_settings()
    asked = arguments.dtype or settings.target_dtype
    dtype = cast("TargetDtype", "float16" if asked == "auto" else asked)
    flags = probe_cpu_flags()  # none are known elsewhere than on Linux
    has_units = not flags or not flags.isdisjoint(CPU_FLAGS["bfloat16"])
    if dtype == "bfloat16" and not (has_units and probe_onednn()):
        raise ToolError(
            "TensorFlow's own pass converts nothing to bfloat16 on a CPU without units for it, or "
            f"without oneDNN's kernels, and here are no {'kernels' if has_units else 'units'}. "
            "Compare on a CPU with AVX512_BF16 or AMX_BF16 and without TF_ENABLE_ONEDNN_OPTS=0, or "
            "with --dtype float16."
        )
    # TensorFlow's pass reads these once a process, when it is first run.
    os.environ.pop(LOG_PATH, None)
    os.environ.pop(_SIMULATE_GPU, None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if dtype == "float16":
        os.environ[_SIMULATE_GPU] = "1"
    from graph_passes import PrecisionConfig
    from tf_amp.model_files import ends
    from tf_amp.tracing.models import read_graphs
    from tf_amp.tracing.upstream import DEVICES, compare

    try:
        config = PrecisionConfig(
            target_dtype=dtype,
            device=DEVICES[dtype],
            parity=True,
            level=cast("Level", settings.level),
            list_edits=settings.list_edits,
        )
    except ValueError as error:
        raise EnvConfigError(str(error)) from error
    graphs = [(name, graph) for name, graph, *_ in read_graphs(arguments.model)]
    found = [(name, compare(graph, ends(graph), config)) for name, graph in graphs]
    told = []
    for name, comparison in found:
        differences = [
            {"function": function, "node": node, "attr": attr, "ours": ours, "theirs": theirs}
            for (function, node, attr), (ours, theirs) in comparison.differences.items()
        ]
        told.append(
            {
                "graph": name,
                "type_attributes": comparison.type_attributes,
                "retyped": comparison.retyped,
                "differences": differences,
            }
        )
        if not arguments.json:
            print(
                f"{name}: {comparison.type_attributes} type attributes, {comparison.retyped} of "
                f"them in {dtype}, {comparison.casts} casts, {len(differences)} differences"
            )
            for each in differences[: arguments.limit]:
                where = "/".join(filter(None, (each["function"], each["node"])))
                print(f"  {where} {each['attr']}: {each['ours']}, TensorFlow: {each['theirs']}")
            if len(differences) > arguments.limit:
                print(f"  {len(differences) - arguments.limit} more; --limit prints them")
    if arguments.json:
        print(json.dumps(told, indent=1))
    return 3 if any(each["differences"] for each in told) else 0
