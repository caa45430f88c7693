"""A program's steps in float32 and in mixed precision, measured in turns."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graph_passes import Remark
from tf_amp.env_variables import (
    BISECT_LIMIT,
    ENABLE,
    ENABLE_GRAPH_REWRITE,
    ENABLE_LOSS_SCALING,
    LOG_PATH,
    PROFILE,
)
from tf_amp.profiling.kernels import (
    CASTS,
    PRODUCTS,
    class_of,
    plain_op,
    read_profile,
    shares_of_steps,
)
from tf_amp.profiling.step_watch import CALLS, REQUEST, RESULT, Request
from tf_amp.profiling.step_watch import PROFILE as PROFILE_FOLDER
from tf_amp.tool_error import ToolError
from tf_amp.tracing.trace import Trace, TraceError, read_traces

FLOAT32, AMP = "float32", "AMP"
IDLE, OUTSIDE = "no op at work", "outside of the function"
"""The parts of a step in which no kernel runs: inside of the function, and between two calls."""
# A limit of 0 leaves float32 what a program switches on by itself, too.
_OFF = {
    ENABLE: "0",
    ENABLE_GRAPH_REWRITE: "0",
    ENABLE_LOSS_SCALING: "0",
    BISECT_LIMIT: "0",
    LOG_PATH: "",
}


class ProfileError(ToolError):
    """A program could not be measured."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a program in one variant; times in seconds, the median of the runs' medians.

    Attributes:
        function: the training function.
        step: from the beginning of a call to that of the next one.
        inside: of it, that in the function.
        cached: a call with a batch that is there already; None where that could not be tried.
        classes: class of op, `IDLE` or `OUTSIDE` -> its part of a step.
        ops: op type, as graphs name it -> its part.
        nodes: (node, op type) -> its part.
        others: further functions called between two steps -> their part of what is outside.
    """

    function: str
    step: float
    inside: float
    cached: float | None
    classes: Mapping[str, float]
    ops: Mapping[str, float]
    nodes: Mapping[tuple[str, str], float]
    others: Mapping[str, float]

    @property
    def products(self) -> float:
        """The part of products."""
        return self.classes.get(PRODUCTS, 0.0)

    @property
    def exposed_input(self) -> float | None:
        """What a step waits for its input and the program's Python; None where it is not known."""
        return None if self.cached is None else max(self.step - self.cached, 0.0)


@dataclasses.dataclass(frozen=True)
class Costly:
    """A node with what it costs in a step, and what the plan says of it if it has a remark."""

    node: str
    op: str
    seconds: float
    remark: Remark | None


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        float32: the steps in float32.
        amp: those in mixed precision.
        trace: what was planned in the last run in mixed precision; None if nothing was.
    """

    float32: Steps
    amp: Steps
    trace: Trace | None

    @property
    def speed_up(self) -> float:
        """How many times as fast a step is in mixed precision."""
        return self.float32.step / self.amp.step

    @property
    def products_speed_up(self) -> float | None:
        """The same of the products alone; None where there are none."""
        low = self.amp.products
        return self.float32.products / low if low else None

    @property
    def bound(self) -> float:
        """How many times as fast a step would be if products took no time (Amdahl's law)."""
        return self.float32.step / (self.float32.step - self.float32.products)

    @property
    def bound_measured(self) -> float:
        """The same if products took the time that they take, and all else what it does in float32.

        What is missing to it is lost to Casts and to what else became slower.
        """
        saved = self.float32.products - self.amp.products
        return self.float32.step / (self.float32.step - saved)

    @property
    def casts(self) -> list[Costly]:
        """The Casts of a step in mixed precision, the most costly first."""
        return self._costly(lambda op, remark: class_of(op) == CASTS)

    @property
    def float32_products(self) -> list[Costly]:
        """The products that stay float32 in mixed precision, the most costly first."""
        return self._costly(
            lambda op, remark: (
                class_of(op) == PRODUCTS and remark is not None and remark.kind == "kept"
            )
        )

    def _costly(self, chosen: Callable[[str, Remark | None], bool]) -> list[Costly]:
        remarks = {
            remark.node: remark
            for graph in (self.trace.graphs if self.trace else ())
            for remark in graph.remarks.remarks
            if remark.kind in ("cast", "kept", "converted")
        }
        found = []
        for (node, op), seconds in self.amp.nodes.items():
            # The runtime puts the names of the calls that lead to a node before its own.
            parts = node.split("/")
            names = ("/".join(parts[start:]) for start in range(len(parts)))
            remark = next((remarks[name] for name in names if name in remarks), None)
            if chosen(op, remark):
                found.append(Costly(node, op, seconds, remark))
        return sorted(found, key=lambda costly: -costly.seconds)

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON-ready values; times in seconds a step."""

        def of(steps: Steps) -> dict[str, Any]:
            told = dataclasses.asdict(steps)
            del told["nodes"]
            casts = sum(class_of(op) == CASTS for _, op in steps.nodes)
            return {**told, "casts": casts, "exposed_input": steps.exposed_input}

        def rows(nodes: Sequence[Costly]) -> list[dict[str, Any]]:
            return [
                {
                    "node": one.node,
                    "op": one.op,
                    "seconds": one.seconds,
                    "lines": one.remark.lines if one.remark else (),
                    "reason": one.remark.reason if one.remark else "",
                }
                for one in nodes
            ]

        return {
            "float32": of(self.float32),
            "amp": of(self.amp),
            "speed_up": self.speed_up,
            "products_speed_up": self.products_speed_up,
            "bound": self.bound,
            "bound_measured": self.bound_measured,
            "casts": rows(self.casts),
            "float32_products": rows(self.float32_products),
        }


Run = Callable[[Mapping[str, str], Path], str]
"""Runs the program with more variables in its environment until it has ended or a file is there;
returns what it printed."""


def profile(
    run: Run,
    say: Callable[[str], None],
    folder: Path,
    request: Request,
    *,
    rounds: int,
    variables: Mapping[str, str],
) -> Profile:
    """Measures a program in float32 and in mixed precision.

    The runs are processes of their own, one after another, since two on one accelerator would not
    find room: float32, AMP, AMP, float32 and so on, so that a machine which gets slower is no
    one's advantage.

    Args:
        run: runs the program.
        say: is told of each run.
        folder: where runs leave what they measure; empty.
        request: what is measured in each run.
        rounds: how often each variant runs.
        variables: what switches mixed precision on; with a `LOG_PATH` the trace stays there.

    Raises:
        ProfileError: a run did not come to its last step, or cannot be measured.
    """
    found: dict[str, list[Steps]] = {FLOAT32: [], AMP: []}
    for number in range(rounds):
        # One run is enough for whoever reads the trace: they all planned the same.
        of_last = variables.get(LOG_PATH) if number == rounds - 1 else None
        trace = Path(of_last or folder / f"{number}-trace")
        for variant in (FLOAT32, AMP)[:: 1 if number % 2 == 0 else -1]:
            place = folder / f"{number}-{variant}"
            place.mkdir()
            (place / REQUEST).write_text(json.dumps(dataclasses.asdict(request)))
            of_variant = _OFF if variant == FLOAT32 else {**variables, LOG_PATH: str(trace)}
            printed = run({PROFILE: str(place), **of_variant}, place / RESULT)
            if not (place / RESULT).exists():
                raise ProfileError(_why_not(place, request, printed))
            steps = _read(place)
            found[variant].append(steps)
            say(f"round {number + 1} of {rounds}, {variant}: {1e3 * steps.step:.4g} ms a step")
    try:
        traced = read_traces(trace)[-1]
    except TraceError:
        traced = None
    return Profile(_median(found[FLOAT32]), _median(found[AMP]), traced)


def _why_not(place: Path, request: Request, printed: str) -> str:
    """Says why there is no result of a run."""
    tail = "\n".join(printed.splitlines()[-15:])
    told = f" Its last lines:\n{tail}" if tail else ""
    if not (place / CALLS).exists():
        return (
            "The program ended, or was stopped, before the end of TensorFlow, and nothing was "
            "measured. If it imported TensorFlow at all, its Python does not know tf_amp: install "
            f"tf-amp there, or give `-- tf-amp run train.py`.{told}"
        )
    calls = json.loads((place / CALLS).read_text())
    counted = ", ".join(f"{name} {count} times" for name, count in calls.items())
    return (
        f"The program ended before its training function had been called {request.calls} times, "
        f"which --skip {request.skip} and --steps {request.steps} need. It called "
        f"{counted or 'no function and ran no session'}. Let it train longer, ask for fewer steps, "
        "or, if none of these functions holds its own gradients, name one by --function."
        f"{told}"
    )


def _read(place: Path) -> Steps:
    """The steps of one run.

    Raises:
        ProfileError: the program cannot be measured.
    """
    result = json.loads((place / RESULT).read_text())
    if "refused" in result:
        raise ProfileError(result["refused"])
    step, inside = (statistics.median(result[name]) for name in ("periods", "inside"))
    profiled = read_profile(place / PROFILE_FOLDER)
    noted = sum(end - start for start, end in profiled.steps)
    # Being looked at takes time of its own, so the parts are those of a step that is not.
    scale = inside / noted if noted else 0.0
    nodes = {key: scale * seconds for key, seconds in shares_of_steps(profiled).items()}
    classes: dict[str, float] = defaultdict(float)
    ops: dict[str, float] = defaultdict(float)
    for (_, op), seconds in nodes.items():
        classes[class_of(op)] += seconds
        ops[plain_op(op)] += seconds
    classes[IDLE] = max(inside - sum(nodes.values()), 0.0)
    classes[OUTSIDE] = max(step - inside, 0.0)
    return Steps(
        function=result["function"],
        step=step,
        inside=inside,
        cached=statistics.median(result["cached"]) if result["cached"] else None,
        classes=classes,
        ops=ops,
        nodes=nodes,
        others=result["others"],
    )


def _median(runs: Sequence[Steps]) -> Steps:
    """The median of runs, figure by figure."""

    def of(mappings: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
        keys = dict.fromkeys(key for mapping in mappings for key in mapping)
        return {k: statistics.median(m.get(k, 0.0) for m in mappings) for k in keys}

    cached = [run.cached for run in runs if run.cached is not None]
    return Steps(
        function=runs[0].function,
        step=statistics.median(run.step for run in runs),
        inside=statistics.median(run.inside for run in runs),
        cached=statistics.median(cached) if cached else None,
        classes=of([run.classes for run in runs]),
        ops=of([run.ops for run in runs]),
        nodes=of([run.nodes for run in runs]),
        others=of([run.others for run in runs]),
    )
