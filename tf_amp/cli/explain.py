"""``tf-amp explain``: says what a traced run did, and why, down to the Python line."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tf_amp.cli.conditions import Condition, ConditionError
from tf_amp.cli.numbers import amount, count_or_none
from tf_amp.env_variables import LOG_PATH
from tf_amp.terminal import table
from tf_amp.tool_error import ToolError, WrongCallError
from tf_amp.whole_files import write_whole

if TYPE_CHECKING:
    from graph_passes import Remark
    from tf_amp.tracing.blockers import Search
    from tf_amp.tracing.jobs import Job, JobFunction
    from tf_amp.tracing.trace import Trace, TracedGraph

_SHOWN = 20


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "explain",
        help="say what a traced run did, and why not more",
        description="Says what a run did that was traced with "
        f"{LOG_PATH}=DIR: how much of it is in the target dtype, and what blocks the rest. With "
        "a filter: the remarks on single nodes, each with its reason and its Python line.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the trace directory")
    add_filters(parser)
    parser.set_defaults(run=run, needs_tensorflow=True)


EXIT_CODES = (
    "Exit status: 0; 1 if there is nothing to tell of, or no remark fits the filters; 2 for a "
    "wrong call or setting; 3 if a condition of --fail-if holds."
)
FIGURES = (
    *("products", "products_low", "products_kept", "product_share", "flops", "flops_low"),
    *("flops_share", "casts", "cast_bytes", "failures"),
)
"""What a condition may name, over all graphs together."""


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose remarks; without any of them the overview is printed."""
    parser.add_argument("--op", metavar="TYPE", help="remarks on this op type, such as MatMul")
    parser.add_argument(
        "--node", metavar="REGEX", type=_regex, help="on nodes in whose name this is found"
    )
    parser.add_argument(
        "--function", metavar="NAME", help='on functions in whose name this is, such as "predict"'
    )
    parser.add_argument(
        "--line", metavar="FILE:LINE", help="on what this Python line made; a file alone will do"
    )
    parser.add_argument("--missed", action="store_true", help="only what stays float32")
    parser.add_argument(
        "--limit",
        type=count_or_none,
        default=_SHOWN,
        help=f"how many remarks to print (default: {_SHOWN})",
    )
    parser.add_argument("--quick", action="store_true", help="an overview without what blocks most")
    parser.add_argument(
        "--blockers-budget",
        type=amount,
        metavar="SECONDS",
        help="for how long to look for what blocks most; the largest candidates come first "
        "(default: 60)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the overview and all remarks as one page"
    )
    parser.add_argument(
        "--model-explorer", type=Path, metavar="DIR", help="write the graphs for Model Explorer"
    )
    parser.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="write graphs before and after as events"
    )
    parser.add_argument(
        "--fail-if",
        metavar="CONDITION",
        type=_condition,
        help="exit with status 3 if it holds, such as 'casts>200 or product_share<0.9'; figures: "
        + ", ".join(FIGURES),
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="as JSON: the overview, or a line each")
    forms.add_argument(
        "--format",
        choices=("text", "github"),
        default="text",
        help="github: products that stay float32 as annotations of lines in a workflow's log",
    )


def _condition(text: str) -> Condition:
    try:
        return Condition(text, FIGURES)
    except ConditionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def run(arguments: argparse.Namespace) -> int:
    """Prints what a trace directory tells."""
    from tf_amp.tracing.trace import read_traces

    return show(read_traces(arguments.directory), arguments)


def show(traces: Sequence[Trace], arguments: argparse.Namespace) -> int:
    """Prints the overview of traces, or the remarks that the filters choose.

    Args:
        traces: what to tell of.
        arguments: parsed by a parser with `add_filters`.

    Returns:
        The exit status.

    Raises:
        WrongCallError: options that do not go together.
    """
    chosen = (arguments.op, arguments.node, arguments.function, arguments.line, arguments.missed)
    written = arguments.html or arguments.model_explorer or arguments.tensorboard
    if written and (arguments.json or arguments.format != "text"):
        raise WrongCallError("what writes files prints nothing else: leave out --json or --format.")
    if any(chosen) and (written or arguments.format == "github"):
        raise WrongCallError("files and annotations tell of all: leave out filters, such as --op.")
    if written:
        status = _write(traces, arguments)
    elif arguments.format == "github":
        status = _show_annotations(traces)
    elif any(chosen):
        status = _show_remarks(traces, arguments)
    else:
        status = _show_overview(traces, arguments)
    if arguments.fail_if is None or status:
        return status
    figures = _figures_for_conditions(traces)
    if not arguments.fail_if.holds(figures):
        return status
    print(", ".join(f"{name} = {value:g}" for name, value in figures.items()), file=sys.stderr)
    return 3


def _show_annotations(traces: Sequence[Trace]) -> int:
    from tf_amp.tracing.workflow import workflow_lines

    for trace in traces:
        print(*workflow_lines(graph.remarks for graph in trace.graphs), sep="\n")
    return 0


def _figures_for_conditions(traces: Sequence[Trace]) -> dict[str, float]:
    """The figures that a condition may name; shares of nothing are 1."""
    from tf_amp.tracing.figures import figures_of
    from tf_amp.tracing.trace import in_force

    graphs = [graph.remarks for trace in traces for graph in in_force(trace.graphs)]
    found = figures_of(graphs)
    derived = {
        "product_share": found.products_low / found.products if found.products else 1.0,
        "flops_share": 1.0 if found.flops_share is None else found.flops_share,
        "failures": sum(graph.failure is not None for graph in graphs),
    }
    return {name: derived[name] if name in derived else getattr(found, name) for name in FIGURES}


def _jobs(
    traces: Sequence[Trace], arguments: argparse.Namespace
) -> Iterator[tuple[Job, Search | None]]:
    """The jobs, each with what blocks most if that is asked for."""
    from tf_amp.tracing.blockers import BUDGET, find_blockers
    from tf_amp.tracing.jobs import jobs_of
    from tf_amp.tracing.trace import in_force

    budget = BUDGET if arguments.blockers_budget is None else arguments.blockers_budget
    for job in jobs_of(traces):
        yield job, None if arguments.quick else find_blockers(in_force(job.graphs), budget)


def _write(traces: Sequence[Trace], arguments: argparse.Namespace) -> int:
    """Writes what is asked for in place of printing."""
    from tf_amp.tracing.export import write_model_explorer, write_tensorboard
    from tf_amp.tracing.jobs import jobs_of
    from tf_amp.tracing.page import page

    try:
        if arguments.html:
            content = page(_jobs(traces, arguments)).encode()
            write_whole(arguments.html, content)
            print(f"{arguments.html}: {len(content) / 1e6:.2f} MB; open it in a browser.")
        if arguments.model_explorer:
            write_model_explorer(jobs_of(traces), arguments.model_explorer)
            where = arguments.model_explorer
            print(
                f"{where}: open graphs.json in Model Explorer, and add node_data.json as node data."
            )
        if arguments.tensorboard:
            write_tensorboard(jobs_of(traces), arguments.tensorboard)
            print(f"{arguments.tensorboard}: tensorboard --logdir {arguments.tensorboard}")
    except OSError as error:
        raise ToolError(f"this cannot be written: {error}.") from error
    return 0


def _show_overview(traces: Sequence[Trace], arguments: argparse.Namespace) -> int:
    from tf_amp.tracing.figures import plain
    from tf_amp.tracing.text import blockers_text, overview

    told = []
    for job, search in _jobs(traces, arguments):
        variables = dict(job.first.process.get("variables", {}))
        if arguments.json:
            functions = [
                {"name": f.graph.remarks.name, "ranks": f.ranks, **plain(f.figures)}
                for f in job.functions
            ]
            found = [
                {**dataclasses.asdict(b), "line": b.change.line(variables)}
                for b in (search.found if search else ())
            ]
            left = [dataclasses.asdict(change) for change in (search.not_tried if search else ())]
            processes = [
                {"name": t.name, "process": t.process, "status": t.status} for t in job.traces
            ]
            told.append(
                {
                    "processes": processes,
                    "functions": functions,
                    "blockers": found,
                    "blockers_not_tried": left,
                }
            )
            continue
        paragraphs = [*overview(job, table)]
        if search is not None:
            paragraphs.append(blockers_text(search, variables))
        print("\n\n".join(paragraphs), end="\n\n")
    if arguments.json:
        print(json.dumps(told, indent=1, default=str))
    else:
        print(
            "To go on: --op MatMul --missed (why not this op?), --op Cast (the largest casts), "
            "--node REGEX, --function NAME, --line model.py:42, --html report.html."
        )
    return 0


def _show_remarks(traces: Sequence[Trace], arguments: argparse.Namespace) -> int:
    from tf_amp.tracing.jobs import jobs_of

    jobs = jobs_of(traces)
    # Of Casts the large ones matter.
    found = [
        _Found(job, function, remark)
        for job in jobs
        for function in job.functions
        for remark in sorted(_chosen(function.graph, arguments), key=_size, reverse=True)
    ]
    if not found:
        told = "No remark fits these filters."
        names = {
            f.graph.remarks.name: None for j in jobs for f in j.functions if f.figures.products
        }
        if arguments.function and names:
            told += f" Functions with products: {', '.join(names)}."
        print(told, file=sys.stderr)
        return 1
    if arguments.json:
        for each in found:
            process = f"{each.job.name}{each.ranks}"
            where = {"process": process, "graph": each.function.graph.remarks.name}
            print(json.dumps({**where, **each.remark.to_dict()}))
        return 0
    largest = sorted(range(len(found)), key=lambda n: _size(found[n].remark), reverse=True)
    shown = [found[number] for number in sorted(largest[: arguments.limit])]
    for _, of_function in itertools.groupby(shown, key=lambda each: id(each.function)):
        _print_remarks(list(of_function))
    if left := len(found) - len(shown):
        print(f"{left} more remarks; --limit {len(found)} prints them all.")
    return 0


class _Found(NamedTuple):
    """A remark that the filters choose, and where it stands."""

    job: Job
    function: JobFunction
    remark: Remark

    @property
    def ranks(self) -> str:
        """Which processes of the job they are, in brackets; "" where it has one."""
        return f" ({', '.join(self.function.ranks)})" if self.function.ranks else ""


def _size(remark: Remark) -> int:
    return remark.bytes or 0


def _print_remarks(found: Sequence[_Found]) -> None:
    """Prints remarks of one function."""
    from tf_amp.tracing.text import remark_text

    job, graph = found[0].job, found[0].function.graph
    print(f"{job.name}: {graph.remarks.name}{found[0].ranks}")
    remarks = graph.remarks.remarks
    lines_of = {"/".join(filter(None, (r.function, r.node))): r.lines for r in remarks}
    for each in found:
        print(f"  {remark_text(each.remark, graph.config, lines_of)}")


def _chosen(graph: TracedGraph, arguments: argparse.Namespace) -> Iterator[Remark]:
    from graph_passes.ir.rule_matching import is_at

    if arguments.function and arguments.function not in graph.remarks.name:
        inner = arguments.function
    else:
        inner = ""
    for remark in graph.remarks.remarks:
        if (
            inner in remark.function
            and (not arguments.op or remark.op == arguments.op)
            and (not arguments.node or arguments.node.search(remark.node))
            and (not arguments.missed or remark.kind in ("kept", "near_miss"))
            and (not arguments.line or any(is_at(line, arguments.line) for line in remark.lines))
        ):
            yield remark
