"""Casts, the bytes they move, and the share of the arithmetic converted, beside TensorFlow's pass.

    python benchmarks/cast_bytes.py CORPUS_DIRECTORY

The corpus has MetaGraphDefs NAME.pb with sidecars NAME.json ("batch") and NAME.shapes.json.gz (the
static shapes of tracing, which our pass gets as the function host gives them to it; TensorFlow's
infers them). A cast moves what it reads and what it writes. The casts that a pass has added are
counted once a step: those in functions once for each function that can be reached, those in loops
once. An unknown dimension counts as the batch size; casts whose shape cannot be told count as casts
without bytes, and the table says how many there are.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from oracle_environment import DTYPES, oracle_environment
from results import RESULTS, geometric_mean, print_table, write_json
from worker_channel import Message, Worker, serve

# What imports TensorFlow is imported by the functions that the workers run: the oracle needs its
# environment set first.


@dataclasses.dataclass
class Cost:
    """What a pass has made of one graph.

    Attributes:
        casts: casts added.
        megabytes: MB (10^6 bytes) that they read and write in a step.
        unknown: those of the casts whose shape cannot be told.
        math_low: matrix multiplications and convolutions in the target dtype, functions included.
        math_total: the same in any floating-point dtype.
    """

    casts: int = 0
    megabytes: float = 0.0
    unknown: int = 0
    math_low: int = 0
    math_total: int = 0


def measure(request: Message, directory: Path, dtype: str) -> Message:
    """Runs both passes on one graph, in a worker.

    Args:
        request: `name`, that of the graph.
        directory: the corpus.
        dtype: the target dtype.

    Returns:
        "nodes", and a `Cost` for "oracle" and "ours". In place of the oracle's None where it failed
        on the graph; for a rewrite of ours that was given up "failure".
    """
    import oracle
    from tensor_shapes import body_shapes, static_shapes

    from graph_passes import PrecisionConfig, rewrite_graph_def

    meta_graph = oracle.read_graph(directory, request["name"])
    batch, shapes = oracle.read_shapes(directory, request["name"])
    before = meta_graph.graph_def
    try:
        theirs = oracle.run_oracle(meta_graph, dtype)
    except oracle.OracleError:
        theirs = None
    config = PrecisionConfig(target_dtype=dtype, device=oracle.DEVICES[dtype])
    result = rewrite_graph_def(
        before,
        config,
        preserve=oracle.fetches(meta_graph),
        shapes=static_shapes(shapes.get("", {})),
        function_shapes=body_shapes(before.library.function, shapes),
    )
    answer: Message = {
        "nodes": len(before.node) + sum(len(f.node_def) for f in before.library.function),
        "oracle": None
        if theirs is None
        else dataclasses.asdict(cost_of(before, theirs, shapes, batch, dtype)),
        "ours": dataclasses.asdict(cost_of(before, result.graph_def, shapes, batch, dtype)),
    }
    if result.failure is not None:
        answer["failure"] = result.failure
    return answer


def cost_of(before: Any, after: Any, shapes: dict[str, Any], batch: int, dtype: str) -> Cost:
    """Counts what a pass has added.

    Args:
        before: the original GraphDef.
        after: the rewritten one.
        shapes: function name, "" for the graph itself -> node name -> shapes of its outputs.
        batch: what stands for an unknown dimension.
        dtype: the target dtype.
    """
    import tensorflow as tf
    from function_evidence import is_product
    from tensor_shapes import TensorShapes, argument_shapes

    target = tf.as_dtype(dtype).as_datatype_enum
    floats = {target, tf.float32.as_datatype_enum}
    original = {"": {node.name for node in before.node}}
    original |= {f.signature.name: {n.name for n in f.node_def} for f in before.library.function}
    arguments = {f.signature.name: argument_shapes(f) for f in after.library.function}
    cost = Cost()
    for scope, nodes in _bodies(after):
        source = _original_of(scope, original)
        known = TensorShapes(nodes, shapes.get(source, {}) | arguments.get(scope, {}), batch)
        names = original.get(source, frozenset())
        for node in nodes:
            if is_product(node) and node.attr["T"].type in floats:
                cost.math_total += 1
                cost.math_low += node.attr["T"].type == target
            if node.op != "Cast" or node.name in names:
                continue
            cost.casts += 1
            elements = known.elements(node.input[0])
            if elements is None:
                cost.unknown += 1
                continue
            sizes = (tf.as_dtype(node.attr[attr].type).size for attr in ("SrcT", "DstT"))
            cost.megabytes += elements * sum(sizes) / 1e6
    return cost


def _original_of(scope: str, original: Collection[str]) -> str:
    """Returns the function that a body was made from, itself where no pass has made it."""
    if scope in original:
        return scope
    # A clone has the original's name and something after it.
    return max(
        (name for name in original if name and scope.startswith(name)), key=len, default=scope
    )


def _bodies(graph_def: Any) -> Iterator[tuple[str, Any]]:
    """Gives the nodes of the graph and of each function that can be reached from it."""
    from function_evidence import function_names

    library = {f.signature.name: f.node_def for f in graph_def.library.function}
    todo, seen = [("", graph_def.node)], {""}
    while todo:
        scope, nodes = todo.pop()
        yield scope, nodes
        for node in nodes:
            for name in function_names(node):
                if name in library and name not in seen:
                    seen.add(name)
                    todo.append((name, library[name]))


def _row(name: str, found: Message) -> list[object]:
    theirs, ours = found["oracle"], found["ours"]
    remarks = [found["failure"]] if "failure" in found else []
    if theirs is None:
        math = f"{ours['math_low']}/{ours['math_total']}"
        remarks.append("the oracle's result is no valid graph")
        casts, megabytes = f"- / {ours['casts']}", f"- / {ours['megabytes']:.1f}"
        return [name, found["nodes"], casts, None, megabytes, None, None, math, "; ".join(remarks)]
    unknown = theirs["unknown"] + ours["unknown"]
    if unknown:
        remarks.append(f"{unknown} casts of unknown shape")
    return [
        name,
        found["nodes"],
        f"{theirs['casts']} / {ours['casts']}",
        _ratio(ours["casts"], theirs["casts"]),
        f"{theirs['megabytes']:.1f} / {ours['megabytes']:.1f}",
        _ratio(ours["megabytes"], theirs["megabytes"]),
        f"{theirs['math_low']}/{theirs['math_total']}",
        f"{ours['math_low']}/{ours['math_total']}",
        "; ".join(remarks),
    ]


def _ratio(ours: float, theirs: float) -> str | None:
    return f"{ours / theirs:.2f}" if theirs else None


def _means(graphs: dict[str, Message]) -> dict[str, Any]:
    """Geometric means over the graphs to which both passes have added something.

    A graph on which our pass failed has no casts of ours and is left out, so that a failure cannot
    pass for an improvement; the table names it.
    """
    both = {name: found for name, found in graphs.items() if found["oracle"] is not None}
    good = [found for found in both.values() if "failure" not in found]
    means: dict[str, Any] = {
        "graphs": len(good),
        "our_failures": [name for name, found in graphs.items() if "failure" in found],
        "oracle_failures": sorted(graphs.keys() - both.keys()),
        "graphs_with_less_math_than_the_oracle": [
            name
            for name, found in both.items()
            if _math_share(found["ours"]) < _math_share(found["oracle"])
        ],
    }
    for key in ("casts", "megabytes"):
        pairs = [(found["ours"][key], found["oracle"][key]) for found in good]
        means[key] = geometric_mean([ours / theirs for ours, theirs in pairs if ours and theirs])
    return means


def _math_share(cost: Message) -> float:
    return cost["math_low"] / cost["math_total"] if cost["math_total"] else 0.0


def _measure_all(dtype: str, names: list[str], options: argparse.Namespace) -> dict[str, Message]:
    worker = Worker([__file__, str(options.corpus), "--worker", dtype], oracle_environment(dtype))
    found = {}
    try:
        for name in names:
            print(f"\r\033[K{dtype}: {name}", end="", file=sys.stderr, flush=True)
            found[name] = worker.ask(name=name)
    finally:
        worker.close()
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, help="directory of NAME.pb and its sidecars")
    parser.add_argument("--graphs", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--json", type=Path, default=RESULTS / "cast_bytes.json")
    parser.add_argument("--worker", choices=DTYPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(lambda request: measure(request, options.corpus, options.worker))
        return
    names = options.graphs or sorted(path.stem for path in options.corpus.glob("*.pb"))
    missing = [name for name in names if not os.path.exists(options.corpus / f"{name}.pb")]
    if missing or not names:
        parser.error(f"no graphs {', '.join(missing)} in {str(options.corpus)!r}")

    headers = ["graph", "nodes", "casts oracle / ours", "ratio", "MB oracle / ours", "ratio"]
    headers += ["math low, oracle", "ours", "remark"]
    payload: dict[str, Any] = {}
    for dtype in options.dtypes:
        found = _measure_all(dtype, names, options)
        means = _means(found)
        payload[dtype] = {"graphs": found, "geometric_means": means}
        print(f"\n{dtype}")
        print_table(headers, [_row(name, entry) for name, entry in found.items()])
        for key, title in (("casts", "casts"), ("megabytes", "cast bytes")):
            if means[key] is not None:
                print(f"{dtype} {title}: geometric mean {means[key]:.3f} of the oracle's")
        less = means["graphs_with_less_math_than_the_oracle"]
        print(f"{dtype} less math converted than the oracle: {', '.join(less) or 'on no graph'}")
    write_json(options.json, payload)


if __name__ == "__main__":
    main()
