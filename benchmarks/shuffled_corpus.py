"""Whether what the pass makes of a graph depends on the order of its nodes.

    python benchmarks/shuffled_corpus.py CORPUS_DIRECTORY

Each graph of a corpus (see `cast_bytes.py`) is rewritten as it is and with its nodes, and those of
its functions, shuffled. Counted are the nodes that differ in anything but their place, and the
units that were found in one order only.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from cast_bytes import DTYPES
from results import RESULTS, print_table, write_json

_CLONE = re.compile(rb"(_amp_)([0-9a-f]{12})")


def shuffled(graph_def: Any, seed: int) -> Any:
    """A copy of a graph with the nodes of all bodies in another order."""
    copy = type(graph_def).FromString(graph_def.SerializeToString())
    rng = random.Random(seed)
    for nodes in (copy.node, *(function.node_def for function in copy.library.function)):
        mixed = list(nodes)
        rng.shuffle(mixed)
        del nodes[:]
        nodes.extend(mixed)
    return copy


def nodes_of(graph_def: Any) -> dict[tuple[str, str], Any]:
    """(function, "" for the graph itself, node name) -> node.

    Clones of functions are named by what is in them, order included; here they are not.
    """
    text = graph_def.SerializeToString(deterministic=True)
    graph_def = type(graph_def).FromString(_CLONE.sub(_without_digits, text))
    nodes = {("", node.name): node for node in graph_def.node}
    for function in graph_def.library.function:
        nodes |= {(function.signature.name, node.name): node for node in function.node_def}
    return nodes


def _without_digits(match: re.Match[bytes]) -> bytes:
    return match[1] + b"0" * len(match[2])  # of the same length: the protos stay readable


def compare(graph: Any, config: Any, seed: int) -> dict[str, Any]:
    """What differs between a graph and one in another order, both rewritten.

    Returns:
        "nodes" in the rewritten graph, names of "differing" ones, and "units" of one order only.
    """
    straight = graph.rewrite(config)
    mixed = dataclasses.replace(graph, graph_def=shuffled(graph.graph_def, seed)).rewrite(config)
    left, right = nodes_of(straight.graph_def), nodes_of(mixed.graph_def)
    differing = [key for key in left.keys() | right.keys() if left.get(key) != right.get(key)]
    units = [Counter(result.report.fused_units) for result in (straight, mixed)]
    return {
        "nodes": len(left),
        "differing": sorted(": ".join(filter(None, key)) for key in differing),
        "units": sorted(((units[0] - units[1]) + (units[1] - units[0])).elements()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, help="directory of NAME.pb and its sidecars")
    parser.add_argument("--graphs", nargs="*", help="only these (default: all)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--seeds", type=int, default=2, help="orders of each graph (2)")
    parser.add_argument("--json", type=Path, default=RESULTS / "shuffled_corpus.json")
    options = parser.parse_args()
    from ablation import configuration
    from sample_graphs import corpus_graphs

    found: dict[str, list[dict[str, Any]]] = {}
    rows = []
    for graph in corpus_graphs(options.corpus, options.graphs):
        for dtype in options.dtypes:
            name = f"{graph.name} {dtype}"
            print(f"\r\033[K{name}", end="", file=sys.stderr, flush=True)
            config = configuration(dtype, None)
            found[name] = [compare(graph, config, seed) for seed in range(options.seeds)]
            differing = [len(entry["differing"]) for entry in found[name]]
            units = [len(entry["units"]) for entry in found[name]]
            rows.append([graph.name, dtype, found[name][0]["nodes"], max(differing), max(units)])
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    print_table(["graph", "dtype", "nodes", "differing nodes", "differing units"], rows)
    write_json(options.json, {"orders": options.seeds, "graphs": found})
    return any(row[-1] or row[-2] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
