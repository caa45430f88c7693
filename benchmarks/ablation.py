"""What each rule of the pass is worth: casts, bytes, products and time with it switched off.

    python benchmarks/ablation.py CORPUS_DIRECTORY
    python benchmarks/ablation.py CORPUS_DIRECTORY --dtypes bfloat16 --time

Each graph of the corpus (see `cast_bytes.py`), and a training step and inference of each network of
`workloads.py`, is rewritten with all rules and with one of them switched off:
for float16 on a GPU, and for bfloat16 on a CPU with the cost table of one with AVX512_BF16. A cast
moves what it reads and writes. A rule's lines are those of the functions that run with the rule and
never without it, for the two smallest graphs that it changes.

With --time the networks also run with tf_amp, all rules beside those that change their graphs, in
turns. A CPU without bfloat16 units emulates bfloat16: its times say nothing of others, and the
table says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from cast_bytes import Cost, cost_of
from results import RESULTS, machine, print_table, spread, write_json
from step_worker import MODES, StepWorker
from variants import DTYPES, environment
from worker_channel import Worker, serve

_RULES_DISABLE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_RULES_DISABLE"
_CPU_CLASS = "cpu-avx512_bf16"
_FIGURES = ("casts", "megabytes", "math_low")
_SHOWS_NOTHING = 0.01
_SMALLEST = 2
"""Graphs that the lines of a rule are read from."""
_AT_ONCE = 4
"""Processes that are alive at once."""

FOR_VALUES = {
    "variable-update": "keeps weights and optimizer state from low precision",
    "small-step": "keeps what is added little by little from standing still",
    "recurrence": "keeps powers of a matrix from drifting away",
    "bounded-constant": "keeps masks of float32's least number from becoming infinite",
    "constant-range": "keeps constants beyond float16 from becoming infinite",
    "loss": "keeps losses and metrics from low precision",
    "result": "keeps probabilities adding up to 1, and what a program goes on with from rounding",
    "assertion": "keeps what is asserted true",
    "decomposition": "keeps Cholesky factors from NaN, and solutions from rounding",
    "distance": "keeps near pairs apart, and square roots of distances from NaN",
    "constant-operand": "keeps differences, angles and counts that constants make from rounding",
    "position": "keeps indices what they are",
    "saturation": "keeps logarithms of 1 - p from infinity, and their gradients from 0",
    "period": "keeps parities and angles what they are",
    "coordinate": "keeps geometry, and equations that a network solves, from rounding",
    "comparison": "keeps gradients of maxima from 0 / 0 where what was picked was rounded",
    "loop-gradient-sums": "is about time: loops read and write no sums of the size of weights",
    "local-derivative": "is about memory: one tensor is kept for a gradient, not two to four",
    "cross-entropy": "is about time: its parts cost half of TensorFlow's op",
    "grouped-convolution": "is about time: kernels of oneDNN in place of what XLA makes",
    "max-pool": "is about time: poolings and their gradients are kernels of oneDNN together",
    "filter-gradient": "is about time: the gradient of a bias is part of the filter's kernel",
    "product-tail": "is about time: biases and activations are part of a product's kernel",
    "fused-update": "is about time: it makes one op of an optimizer's dozen",
    "cost": "is about time: it keeps what is slower float32, with a cost table",
}
"""Rules that no figure of casts can judge, and why."""


def configuration(dtype: str, rule: str | None) -> Any:
    """The configuration of a dtype with a rule switched off."""
    from graph_passes import PrecisionConfig
    from graph_passes.policy.cost_table_files import shipped_table

    table = shipped_table(_CPU_CLASS, dtype) if dtype == "bfloat16" else None
    return PrecisionConfig(
        target_dtype=dtype,
        device="CPU" if dtype == "bfloat16" else "GPU",
        cost_table=table,
        disabled_rules=frozenset(() if rule is None else (rule,)),
    )


def measure_graph(graph: Any, dtype: str, rules: list[str]) -> dict[str, dict[str, Any]]:
    """The cost of one graph with all rules, under "", and without each that changes it."""

    def rewritten(rule: str | None) -> Any:
        return graph.rewrite(configuration(dtype, rule)).graph_def

    def cost(result: Any) -> Cost:
        return cost_of(graph.graph_def, result, graph.shapes, graph.batch, dtype)

    whole = rewritten(None)
    found = {"": dataclasses.asdict(cost(whole))}
    for rule in rules:
        without = rewritten(rule)
        if without != whole:
            found[rule] = dataclasses.asdict(cost(without))
    return found


def lines_of_rule(graphs: list[Any], dtype: str, rule: str) -> Counter[str]:
    """Module -> lines of functions that run for a rule alone, over some graphs."""
    from executed_lines import only_with

    import graph_passes

    def run(with_it: bool) -> None:
        for graph in graphs:
            graph.rewrite(configuration(dtype, None if with_it else rule))

    return only_with(run, Path(graph_passes.__file__).parent)


def _lines(
    graphs: list[Any], payload: dict[str, dict[str, Any]], rules: list[str]
) -> dict[str, Counter[str]]:
    """The lines of each rule, as the small graphs show them that it changes."""
    lines: dict[str, Counter[str]] = {rule: Counter() for rule in rules}
    for rule in rules:
        for dtype, measured in payload.items():
            changed = [graph for graph in graphs if rule in measured["graphs"][graph.name]]
            smallest = sorted(changed, key=lambda graph: len(graph.graph_def.node))[:_SMALLEST]
            lines[rule] |= lines_of_rule(smallest, dtype, rule)
    return lines


def _change(whole: float, without: float) -> float:
    if whole == without:
        return 0.0
    return (without - whole) / whole if whole else float("inf")


def summarize(
    graphs: dict[str, dict[str, dict[str, Any]]], rules: list[str]
) -> dict[str, dict[str, Any]]:
    """What switching each rule off changes, in all and on the graph that it changes most.

    Args:
        graphs: graph -> what `measure_graph` gives.
        rules: the rules.

    Returns:
        Rule -> figure -> "change" (of the sum over the graphs, as a part), "most" (of one graph)
        and "graph" (which); "changed" counts the graphs that differ at all.
    """
    summary: dict[str, dict[str, Any]] = {}
    for rule in rules:
        entry: dict[str, Any] = {"changed": sum(rule in found for found in graphs.values())}
        for figure in _FIGURES:
            pairs = {
                name: (found[""][figure], found.get(rule, found[""])[figure])
                for name, found in graphs.items()
            }
            changes = {name: _change(*pair) for name, pair in pairs.items()}
            most = max(changes, key=lambda name: abs(changes[name]))
            whole, without = (sum(pair[side] for pair in pairs.values()) for side in (0, 1))
            entry[figure] = {
                "change": _change(whole, without),
                "most": changes[most],
                "graph": most if changes[most] else None,
            }
        summary[rule] = entry
    return summary


def shows_nothing(entries: list[dict[str, Any]]) -> bool:
    """Whether a rule is worth less than 1 % on every figure of every graph."""
    return all(
        abs(entry[figure][key]) < _SHOWS_NOTHING
        for entry in entries
        for figure in _FIGURES
        for key in ("change", "most")
    )


def _percent(value: float) -> str:
    return "." if not value else f"{100 * value:+.1f} %"


def _row(rule: str, entry: dict[str, Any]) -> list[object]:
    cells: list[object] = [rule, entry["changed"]]
    for figure in _FIGURES:
        cells += [_percent(entry[figure]["change"]), _percent(entry[figure]["most"])]
    where = max(_FIGURES, key=lambda figure: abs(entry[figure]["most"]))
    return [*cells, entry[where]["graph"]]


# Step times


def time_rules(name: str, mode: str, rules: list[str], rounds: int) -> dict[str, Any]:
    """Seconds a step with all rules, under "", and without each of some, in turns.

    With more rules than processes fit into memory, each group has its own figure of all rules.

    Returns:
        Rule -> "all" and "without", both as `results.spread` gives them.
    """
    found: dict[str, Any] = {}
    for first in range(0, len(rules), _AT_ONCE - 1):
        group = ["", *rules[first : first + _AT_ONCE - 1]]
        workers, seconds = {}, {rule: [] for rule in group}
        try:
            for rule in group:
                env = environment("tf_amp", "bfloat16")
                env[_RULES_DISABLE] = rule
                workers[rule] = Worker([__file__, "--step", name, mode], env)
                workers[rule].ask(do="start")
            for number in range(rounds):
                for rule in group if number % 2 else reversed(group):
                    seconds[rule] += workers[rule].ask(do="run", steps=1)["seconds"]
        finally:
            for worker in workers.values():
                worker.close()
        for rule in group[1:]:
            found[rule] = {"all": spread(seconds[""]), "without": spread(seconds[rule])}
    return found


def _has_bfloat16_units() -> bool:
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _time_all(graphs: dict[str, Any], rounds: int) -> dict[str, Any]:
    times: dict[str, Any] = {}
    if not _has_bfloat16_units():
        print(f"\n{machine()['processor']} has no bfloat16 units: the times below are emulation's.")
    for name, found in graphs.items():
        network, _, mode = name.partition(", ")
        rules = [rule for rule in found if rule]
        if mode in MODES and rules:
            times[name] = time_rules(network, mode, rules, rounds)
            rows = [
                [
                    rule,
                    f"{1e3 * t['all']['median']:.1f}",
                    f"{1e3 * t['without']['median']:.1f}",
                    _percent(_change(t["all"]["median"], t["without"]["median"])),
                ]
                for rule, t in times[name].items()
            ]
            print(f"\n{name}, ms a step")
            print_table(["without", "all rules", "without it", "change"], rows)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, nargs="?", help="directory of NAME.pb and sidecars")
    parser.add_argument("--graphs", nargs="*", help="only these of the corpus (default: all)")
    parser.add_argument("--networks", nargs="*", help="only these of the networks (default: all)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rules", nargs="+", help="only these (default: all)")
    parser.add_argument("--time", action="store_true", help="also run the networks in bfloat16")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each (9)")
    parser.add_argument("--json", type=Path, default=RESULTS / "ablation.json")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        workload, mode = options.step
        arguments = {"workload": workload, "mode": mode, "variant": "tf_amp"}
        arguments |= {"unknown_batch": False, "rows": None}
        serve(
            StepWorker(argparse.Namespace(**arguments, dtype="bfloat16", jit_compile=False)).handle
        )
        return
    if options.corpus is None:
        parser.error("name the directory of a corpus")
    # What imports TensorFlow, which the timed workers must not have done before they are prepared.
    from sample_graphs import corpus_graphs, traced_graphs

    from graph_passes import RULES

    rules = options.rules or list(RULES)
    graphs = [*corpus_graphs(options.corpus, options.graphs), *traced_graphs(options.networks)]
    payload: dict[str, Any] = {}
    summaries: dict[str, dict[str, Any]] = {}
    headers = ["without", "graphs changed", "casts", "most", "bytes", "most", "products", "most"]
    for dtype in options.dtypes:
        found = {}
        for graph in graphs:
            print(f"\r\033[K{dtype}: {graph.name}", end="", file=sys.stderr, flush=True)
            found[graph.name] = measure_graph(graph, dtype, rules)
        print("\r\033[K", end="", file=sys.stderr, flush=True)
        summaries[dtype] = summarize(found, rules)
        payload[dtype] = {"graphs": found, "rules": summaries[dtype]}
        print(f"\n{dtype}: what changes over {len(found)} graphs, and on the graph it changes most")
        print_table([*headers, "on"], [_row(r, e) for r, e in summaries[dtype].items()])
        if options.time and dtype == "bfloat16":
            payload["step_s"] = _time_all(found, options.rounds)
    lines = _lines(graphs, {dtype: payload[dtype] for dtype in options.dtypes}, rules)
    rows = []
    for rule in rules:
        entries = [summary[rule] for summary in summaries.values()]
        verdict = FOR_VALUES.get(rule) or ("under 1 %" if shows_nothing(entries) else "")
        rows.append([rule, lines[rule].total(), len(lines[rule]), verdict, RULES[rule]])
    print("\nLines of functions that run for a rule alone")
    print_table(["rule", "lines", "modules", "verdict", "what it does"], rows)
    payload["lines"] = {rule: dict(counts) for rule, counts in lines.items()}
    write_json(options.json, payload)


if __name__ == "__main__":
    main()
