"""How the time and memory of the pass grow with the graph, beside TensorFlow's own pass in C++.

    python benchmarks/pass_growth.py                      synthetic graphs up to a million nodes
    python benchmarks/pass_growth.py --corpus DIRECTORY   the graphs NAME.pb of a corpus
    python benchmarks/pass_growth.py --public             the same by the public call
    python benchmarks/pass_growth.py --shapes             chains, lists, calls and the like
    python benchmarks/pass_growth.py --profile            where the time goes

Each graph has a process of its own, in which the two passes take turns, after one run each that is
not counted. Both start from a graph in memory and give one back. The time of the C++ pass is what
TensorFlow's log says it took, without what surrounds it in a call from Python ("whole call").
Peak memory is what a run adds to a process that holds the input, as a multiple of the graph's
serialized size; the result is part of it, and with the C++ pass the call from Python.

Of a graph of one shape the seconds of the processor are told, for each size, and the exponent with
which they grow from the last size but one to the last: 1 where twice the graph takes twice as long.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import math
import pstats
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from oracle_environment import DTYPES, oracle_environment
from results import RESULTS, geometric_mean, print_table, spread, write_json
from variants import environment
from worker_channel import Message, Worker, WorkerError, serve

from tf_amp.comparison.resident_memory import peak_resident_bytes, reset_peak, resident_bytes

_SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_SHAPE_SIZES = (250, 500, 1_000, 2_000)
_LONGEST = 10.0
"""Seconds after which a shape is not tried in a larger size."""
_PROFILED_FUNCTIONS = 25
_WARM_UP_NODES = 500


def measure(request: Message, dtype: str) -> Message:
    """Measures one graph, in a worker.

    Args:
        request: `nodes`, the size of a synthetic graph, or `file`, a MetaGraphDef; `repeats`;
            `oracle_up_to`, the number of nodes above which the oracle is left out; and `public`,
            whether to call what the package offers, which finds the shapes itself.
        dtype: the target dtype.

    Returns:
        Seconds of every counted run ("ours_s", "oracle_s"; "oracle_call_s" with all that surrounds
        the C++ pass), sizes and the peak.
    """
    import oracle

    import graph_passes
    import tf_amp

    config = graph_passes.PrecisionConfig(target_dtype=dtype, device=oracle.DEVICES[dtype])
    meta_graph = _graph(request)
    preserve = oracle.fetches(meta_graph)
    graph = meta_graph.graph_def
    of_package = tf_amp if request["public"] else graph_passes
    shapes = {} if request["public"] else _shapes(request, graph)
    rewrite_graph_def = functools.partial(of_package.rewrite_graph_def, config=config)
    small = _graph({"nodes": _WARM_UP_NODES}).graph_def
    # Lists and the op registry are read once a process, whatever the graph.
    rewrite_graph_def(small)
    nodes = len(graph.node) + sum(len(f.node_def) for f in graph.library.function)
    answer: Message = {"nodes": nodes, "serialized_mb": graph.ByteSize() / 1e6}

    before = resident_bytes()
    reset_peak()
    result = rewrite_graph_def(graph, preserve=preserve, **shapes)
    answer["peak_added_mb"] = (peak_resident_bytes() - before) / 1e6
    answer["summary"] = result.report.summary()
    if result.failure is not None:
        raise RuntimeError(f"The pass gave the graph up: {result.failure}")
    del result
    with_oracle = nodes <= request["oracle_up_to"]
    if with_oracle:
        # What our run has freed is there for the taking, so this is rather too little.
        before = resident_bytes()
        reset_peak()
        oracle.run_oracle(meta_graph, dtype)
        answer["oracle_peak_added_mb"] = (peak_resident_bytes() - before) / 1e6
    answer |= {"ours_s": [], "oracle_s": [], "oracle_call_s": []}
    for _ in range(request["repeats"]):
        started = time.perf_counter()
        result = rewrite_graph_def(graph, preserve=preserve, **shapes)
        answer["ours_s"].append(time.perf_counter() - started)
        del result
        if with_oracle:
            started = time.perf_counter()
            answer["oracle_s"].append(oracle.timed_oracle(meta_graph, dtype))
            answer["oracle_call_s"].append(time.perf_counter() - started)
    return answer


def measure_shape(request: Message, dtype: str) -> Message:
    """Measures graphs of one shape, in a worker.

    Args:
        request: `shape`, a name in `growth_shapes.SHAPES`; `sizes`, in order; and `parity`.
        dtype: the target dtype.

    Returns:
        "seconds": for each size the processor's, the least of two runs; fewer than sizes where
        one took too long.
    """
    import growth_shapes
    import oracle

    from graph_passes import PrecisionConfig, rewrite_graph_def

    device = oracle.DEVICES[dtype]
    config = PrecisionConfig(target_dtype=dtype, device=device, parity=request["parity"])
    rewrite_graph_def(_graph({"nodes": _WARM_UP_NODES}).graph_def, config)
    seconds: list[float] = []
    for size in request["sizes"]:
        if seconds and seconds[-1] > _LONGEST:
            break
        graph, preserve = growth_shapes.build(request["shape"], size)
        runs = []
        while len(runs) < 2 and sum(runs) < _LONGEST:
            started = time.process_time()
            result = rewrite_graph_def(graph, config, preserve=preserve)
            runs.append(time.process_time() - started)
        if result.failure is not None:
            raise RuntimeError(f"The pass gave the graph up: {result.failure}")
        seconds.append(min(runs))
    return {"seconds": seconds}


def _print_shapes(dtype: str, parity: bool) -> Message:
    """Measures all shapes and prints how their times grow."""
    from growth_shapes import SHAPES

    worker = Worker([__file__, "--worker", dtype], oracle_environment(dtype))
    found: Message = {}
    rows: list[list[object]] = []
    for shape in SHAPES:
        print(f"\r\033[K{dtype}: {shape}", end="", file=sys.stderr, flush=True)
        try:
            seconds = worker.ask(shape=shape, sizes=_SHAPE_SIZES, parity=parity)["seconds"]
        except WorkerError as error:
            print(f"\r\033[K{shape}: {error}", file=sys.stderr)
            rows.append([shape, *[None] * len(_SHAPE_SIZES), "failed"])
            continue
        exponent = None
        if len(seconds) > 1:
            last, before = len(seconds) - 1, len(seconds) - 2
            exponent = math.log(seconds[last] / seconds[before]) / math.log(
                _SHAPE_SIZES[last] / _SHAPE_SIZES[before]
            )
        found[shape] = {"seconds": seconds, "exponent": exponent}
        cells = [f"{value:.3f}" for value in seconds]
        rest = [None] * (len(_SHAPE_SIZES) - len(cells))
        rows.append([shape, *cells, *rest, None if exponent is None else f"{exponent:.2f}"])
    worker.close()
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(f"\n{dtype}, {'parity' if parity else 'default'} mode: seconds by size, and the exponent")
    print_table(["shape", *map(str, _SHAPE_SIZES), "exponent"], rows)
    return found


def _measure_any(request: Message, dtype: str) -> Message:
    return (measure_shape if "shape" in request else measure)(request, dtype)


def profile(nodes: int, dtype: str) -> None:
    """Prints which modules and functions of the pass the time goes to."""
    import oracle

    from graph_passes import PrecisionConfig, rewrite_graph_def

    config = PrecisionConfig(target_dtype=dtype, device=oracle.DEVICES[dtype])
    meta_graph = _graph({"nodes": nodes})
    preserve = oracle.fetches(meta_graph)
    rewrite_graph_def(_graph({"nodes": _WARM_UP_NODES}).graph_def, config)
    started = time.perf_counter()
    rewrite_graph_def(meta_graph.graph_def, config, preserve=preserve)
    plain = time.perf_counter() - started
    profiler = cProfile.Profile()
    profiler.runcall(rewrite_graph_def, meta_graph.graph_def, config, preserve=preserve)
    stats = pstats.Stats(profiler)
    # (file, line, function) -> (calls without recursion, calls, own seconds, seconds, callers)
    entries: dict[tuple[str, int, str], tuple[Any, ...]] = stats.stats  # type: ignore[attr-defined]
    total = sum(entry[2] for entry in entries.values())
    print(
        f"{nodes} nodes, {dtype}: {plain:.2f} s, {total:.2f} s while profiled (the profiler costs "
        "time at every Python call, so shares lean towards small functions)\n"
    )
    modules: Counter[str] = Counter()
    for (file, _, _), entry in entries.items():
        modules[_module(file)] += entry[2]
    print_table(
        ["module", "own s", "share"],
        [[name, f"{s:.3f}", f"{s / total:.0%}"] for name, s in modules.most_common(15)],
    )
    print()
    slowest = sorted(entries.items(), key=lambda item: -item[1][2])[:_PROFILED_FUNCTIONS]
    print_table(
        ["function", "calls", "own s", "with callees s", "share"],
        [
            [
                f"{_module(file)}:{line} {name}",
                entry[1],
                f"{entry[2]:.3f}",
                f"{entry[3]:.3f}",
                f"{entry[2] / total:.0%}",
            ]
            for (file, line, name), entry in slowest
        ],
    )


def _module(file: str) -> str:
    path = Path(file)
    return f"{path.parent.name}/{path.stem}" if path.suffix == ".py" else "built-in"


def _graph(request: Message) -> Any:
    import oracle
    from synthetic_graphs import layered_graph

    if "file" in request:
        path = Path(request["file"])
        return oracle.read_graph(path.parent, path.stem)
    return oracle.with_fetches(*layered_graph(request["nodes"]))


def _shapes(request: Message, graph: Any) -> dict[str, Any]:
    """The static shapes of a graph of the corpus, as the function host gives them to the pass."""
    import oracle
    from tensor_shapes import body_shapes, static_shapes

    if "file" not in request:
        return {}
    path = Path(request["file"])
    traced = oracle.read_shapes(path.parent, path.stem)[1]
    return {
        "shapes": static_shapes(traced.get("", {})),
        "function_shapes": body_shapes(graph.library.function, traced),
    }


def _measure_all(
    requests: dict[str, Message], dtype: str, options: argparse.Namespace
) -> dict[str, Message]:
    found = {}
    for name, request in requests.items():
        print(f"\r\033[K{dtype}: {name}", end="", file=sys.stderr, flush=True)
        worker = Worker([__file__, "--worker", dtype], oracle_environment(dtype))
        try:
            found[name] = worker.ask(
                **request,
                repeats=options.repeats,
                oracle_up_to=options.oracle_up_to,
                public=options.public,
            )
        except WorkerError as error:
            # One of the passes failed, ours or the oracle's; the other graphs go on.
            print(f"\r\033[K{name}: {error}", file=sys.stderr)
            found[name] = {"error": str(error)}
        finally:
            worker.close()
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    return found


def _row(name: str, found: Message) -> list[object]:
    if "error" in found:
        return [name, "failed", *[None] * 9]
    ours = found["ours"] = spread(found.pop("ours_s"))
    seconds, calls = found.pop("oracle_s"), found.pop("oracle_call_s")
    theirs = found["oracle"] = spread(seconds) if seconds else None
    found["oracle_call"] = spread(calls) if calls else None
    found["ratio"] = ours["median"] / theirs["median"] if theirs else None
    size, peak = found["serialized_mb"], found.get("oracle_peak_added_mb")
    found["peak_over_serialized"] = found["peak_added_mb"] / size
    found["oracle_peak_over_serialized"] = None if peak is None else peak / size
    return [
        name,
        found["nodes"],
        *(f"{ours[key]:.4f}" for key in ("median", "min", "max")),
        f"{ours['median'] / found['nodes'] * 1e6:.2f}",
        f"{theirs['median']:.4f}" if theirs else None,
        f"{found['ratio']:.2f}" if theirs else None,
        f"{found['oracle_call']['median']:.2f}" if calls else None,
        f"{found['peak_added_mb']:.0f} ({found['peak_over_serialized']:.1f}x)",
        None if peak is None else f"{peak:.0f} ({peak / size:.1f}x)",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=_SIZES, metavar="NODES")
    parser.add_argument("--corpus", type=Path, help="measure the graphs of this directory instead")
    parser.add_argument("--shapes", action="store_true", help="graphs of one shape each instead")
    parser.add_argument("--public", action="store_true", help="the package's own call")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=("float16",))
    parser.add_argument("--repeats", type=int, default=7, help="counted runs (7)")
    parser.add_argument(
        "--oracle-up-to", type=int, default=120_000, metavar="NODES", help="120000 by default"
    )
    parser.add_argument("--profile", action="store_true", help="where the time goes, at 100,000")
    parser.add_argument("--json", type=Path, default=RESULTS / "pass_growth.json")
    parser.add_argument("--profile-here", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=DTYPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    payload: dict[str, Any]
    if options.worker:
        serve(lambda request: _measure_any(request, options.worker))
        return
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1; received {options.repeats}")
    if options.profile:
        size = 100_000 if options.sizes is _SIZES else options.sizes[0]
        arguments = [__file__, "--profile-here", str(size), "--dtypes", options.dtypes[0]]
        env = environment("float32")
        sys.exit(subprocess.run([sys.executable, *arguments], env=env, check=False).returncode)
    if options.profile_here:
        profile(options.profile_here, options.dtypes[0])
        return
    if options.shapes:
        payload = {
            f"{dtype} {'parity' if parity else 'default'}": _print_shapes(dtype, parity)
            for dtype in options.dtypes
            for parity in (False, True)
        }
        write_json(options.json, {"shapes": payload})
        return
    if options.corpus:
        files = sorted(options.corpus.glob("*.pb"))
        requests: dict[str, Message] = {path.stem: {"file": str(path.resolve())} for path in files}
    else:
        requests = {str(size): {"nodes": size} for size in options.sizes}
    if not requests:
        parser.error(f"there is no NAME.pb in {str(options.corpus)!r}")

    headers = ["graph", "nodes", "median s", "min", "max", "us per node", "C++ s", "ratio"]
    headers += ["whole call", "peak MB (of serialized)", "C++ peak"]
    payload = {}
    for dtype in options.dtypes:
        found = _measure_all(requests, dtype, options)
        print(f"\n{dtype}")
        print_table(headers, [_row(name, entry) for name, entry in found.items()])
        ratios = [entry["ratio"] for entry in found.values() if entry.get("ratio")]
        mean = geometric_mean(ratios)
        if mean is not None:
            print(f"{dtype}: geometric mean {mean:.2f} of the C++ pass's time")
        payload[dtype] = {"graphs": found, "geometric_mean_ratio": mean}
    write_json(options.json, payload)


if __name__ == "__main__":
    main()
