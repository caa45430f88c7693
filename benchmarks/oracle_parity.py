"""Parity mode against TensorFlow's own pass: what differs, and how long each takes.

    python benchmarks/oracle_parity.py --corpus DIRECTORY

The corpus has MetaGraphDefs NAME.pb, whose collection "train_op" names what is fetched. A vertex is
one type attribute (or one entry of a list of them) of one node, functions included. A difference is
a vertex of another dtype, or a node that one result has and the other has not. Each target dtype
has a process of its own, in which the two passes take turns on the same graph in memory; the time
of the C++ pass is what TensorFlow's log says it took.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from oracle_environment import DTYPES, oracle_environment
from results import RESULTS, print_table, spread, write_json
from worker_channel import Message, Worker, serve

_SHOWN = 5


def measure(request: Message, directory: Path, dtype: str) -> Message:
    """Compares and times the two passes on one graph, in a worker.

    Args:
        request: `name`, that of the graph, and `repeats`, the number of timed runs of each pass.
        directory: the corpus.
        dtype: the target dtype.

    Returns:
        "nodes", "vertices" compared, "retyped" vertices, "casts" added, "differences" (as text),
        "ours_s" and "oracle_s" (seconds of each run). Where the oracle refuses the graph that it
        has made, "refused" says why and there is nothing to compare.
    """
    import oracle

    from graph_passes import PrecisionConfig, rewrite_graph_def
    from tf_amp.tracing.upstream import difference_of

    meta_graph = oracle.read_graph(directory, request["name"])
    config = PrecisionConfig(target_dtype=dtype, device=oracle.DEVICES[dtype], parity=True)
    before, preserve = meta_graph.graph_def, oracle.fetches(meta_graph)
    result = rewrite_graph_def(before, config, preserve=preserve)
    answer: Message = {
        "nodes": len(before.node) + sum(len(f.node_def) for f in before.library.function),
        "failure": result.failure,
    }
    try:
        theirs = oracle.run_oracle(meta_graph, dtype)
    except oracle.OracleError as error:
        return answer | {"refused": str(error)}
    found = difference_of(before, result.proto, theirs)
    answer |= {
        "vertices": found.type_attributes,
        "retyped": found.retyped,
        "casts": found.casts,
        "differences": sorted(" ".join(key) for key in found.differences),
        "ours_s": [],
        "oracle_s": [],
    }
    for _ in range(request["repeats"]):
        start = time.perf_counter()
        rewrite_graph_def(before, config, preserve=preserve)
        answer["ours_s"].append(time.perf_counter() - start)
        answer["oracle_s"].append(oracle.timed_oracle(meta_graph, dtype))
    return answer


def _row(name: str, dtype: str, answer: Message) -> list[object]:
    head = [name, dtype, answer["nodes"]]
    if "refused" in answer:
        return [*head, None, None, None, "oracle refused", None, None, None]
    ours, oracle = spread(answer["ours_s"]), spread(answer["oracle_s"])
    return [
        *head,
        answer["vertices"],
        answer["retyped"],
        answer["casts"],
        len(answer["differences"]),
        *(
            f"{1e3 * times['median']:.1f} ({1e3 * times['min']:.1f}-{1e3 * times['max']:.1f})"
            for times in (ours, oracle)
        ),
        f"{ours['median'] / oracle['median']:.2f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="directory of NAME.pb files")
    parser.add_argument("--graphs", nargs="*", help="names of graphs; all by default")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each pass")
    parser.add_argument("--json", type=Path, default=RESULTS / "oracle_parity.json")
    parser.add_argument("--worker", choices=DTYPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(lambda request: measure(request, options.corpus, options.worker))
        return 0
    names = options.graphs or sorted(path.stem for path in options.corpus.glob("*.pb"))
    if not names:
        parser.error(f"--corpus: no file NAME.pb in {options.corpus}")
    results: dict[str, dict[str, Message]] = {}
    rows = []
    for dtype in options.dtypes:
        arguments = [__file__, "--corpus", str(options.corpus), "--worker", dtype]
        worker = Worker(arguments, oracle_environment(dtype))
        for name in names:
            print(f"{dtype} {name}", file=sys.stderr, flush=True)
            answer = worker.ask(name=name, repeats=options.repeats)
            results.setdefault(name, {})[dtype] = answer
            rows.append(_row(name, dtype, answer))
        worker.close()
    headers = ["graph", "dtype", "nodes", "vertices", "retyped", "casts", "differences"]
    print_table([*headers, "ours ms (min-max)", "C++ ms (min-max)", "ours / C++"], rows)
    answers = [answer for by_dtype in results.values() for answer in by_dtype.values()]
    compared = [answer for answer in answers if "refused" not in answer]
    differences = [text for answer in compared for text in answer["differences"]]
    failures = [answer["failure"] for answer in answers if answer["failure"]]
    vertices = sum(answer["vertices"] for answer in compared)
    print(
        f"\n{len(names)} graphs, {len(answers)} plans, {len(compared)} compared, "
        f"{vertices} vertices compared, {len(differences)} differences, "
        f"{len(failures)} rewrites given up"
    )
    for text in (differences + failures)[:_SHOWN]:
        print(f"  {text}")
    write_json(
        options.json,
        {
            "graphs": len(names),
            "vertices": vertices,
            "differences": len(differences),
            "results": results,
        },
    )
    return 1 if differences or failures else 0


if __name__ == "__main__":
    sys.exit(main())
