"""Jobs: what the processes of a distributed training did, told once where they did the same."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from graph_passes import FunctionRemarks
from tf_amp.hosts.function_names import readable_name
from tf_amp.tracing.figures import Figures, figures_of
from tf_amp.tracing.trace import Trace, TracedGraph


@dataclasses.dataclass(frozen=True)
class JobFunction:
    """A function as one or more ranks of a job have planned it.

    Attributes:
        graph: the function, of the first of these ranks.
        figures: its counts.
        ranks: the ranks for which this holds; () where all processes have it, or there is but one.
    """

    graph: TracedGraph
    figures: Figures
    ranks: tuple[str, ...]

    @property
    def failure(self) -> str | None:
        """Why its rewrite was given up, None where it was not."""
        return self.graph.remarks.failure


@dataclasses.dataclass(frozen=True)
class Job:
    """One process, or the ranks of a distributed training.

    Attributes:
        traces: the processes; of a distributed training by rank.
        functions: what they planned, in the order of the first rank that did.
    """

    traces: tuple[Trace, ...]
    functions: tuple[JobFunction, ...]

    @property
    def first(self) -> Trace:
        """The process that stands for all in what they have in common."""
        return self.traces[0]

    @property
    def name(self) -> str:
        """What to call it, for people."""
        if len(self.traces) == 1:
            return self.first.name
        ranks = ", ".join(trace.rank for trace in self.traces)
        return f"{self.first.process.get('script')}, {len(self.traces)} ranks: {ranks}"

    @property
    def graphs(self) -> tuple[TracedGraph, ...]:
        """The graphs of its functions."""
        return tuple(function.graph for function in self.functions)


def jobs_of(traces: Iterable[Trace]) -> list[Job]:
    """Puts the ranks of each distributed training together.

    Processes of one script that have a rank belong together until a rank comes a second time,
    which is then the next start of the job.

    Args:
        traces: the processes, in the order in which they began.
    """
    jobs: list[list[Trace]] = []
    open_jobs: dict[str, list[Trace]] = {}  # by script
    for trace in traces:
        script = str(trace.process.get("script"))
        job = open_jobs.get(script, [])
        if not job or not trace.rank or trace.rank in {other.rank for other in job}:
            job = []
            jobs.append(job)
        job.append(trace)
        if trace.rank:
            open_jobs[script] = job
    return [_job(sorted(job, key=lambda trace: _by_number(trace.rank))) for job in jobs]


def _by_number(rank: str) -> tuple[str, int]:
    job, _, number = rank.rpartition(" ")
    return job, int(number or 0)


def _job(traces: list[Trace]) -> Job:
    first: dict[tuple[FunctionRemarks, int], TracedGraph] = {}
    ranks: dict[tuple[FunctionRemarks, int], list[str]] = {}
    for trace in traces:
        times = Counter[FunctionRemarks]()  # a process may plan one function the same way twice
        for graph in trace.graphs:
            remarks = _without_numbers(graph.remarks) if len(traces) > 1 else graph.remarks
            times[remarks] += 1
            key = remarks, times[remarks]
            first.setdefault(key, graph)
            ranks.setdefault(key, []).append(trace.rank)
    functions = []
    for key, graph in first.items():
        everywhere = len(set(ranks[key])) == len(traces)
        seen = () if everywhere else tuple(dict.fromkeys(ranks[key]))
        functions.append(JobFunction(graph, figures_of([graph.remarks]), seen))
    return Job(tuple(traces), tuple(functions))


def _without_numbers(remarks: FunctionRemarks) -> FunctionRemarks:
    """Takes the numbers off the names of functions, which each process counts for itself."""
    return dataclasses.replace(
        remarks,
        remarks=tuple(
            dataclasses.replace(remark, function=readable_name(remark.function))
            for remark in remarks.remarks
        ),
    )
