"""What people read: plain text, the same on a terminal and in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from graph_passes import PrecisionConfig, Remark, load_op_lists
from tf_amp.env_variables import COST_TABLE
from tf_amp.terminal import plain_table
from tf_amp.tracing.blockers import Blocker, Search
from tf_amp.tracing.figures import SLOWER
from tf_amp.tracing.jobs import Job, JobFunction
from tf_amp.tracing.trace import Trace

_BLOCKERS_SHOWN = 5
_REASONS_SHOWN = 3


def overview(job: Job, table: Callable[..., str] = plain_table) -> Iterator[str]:
    """The paragraphs that say what one process did, or the ranks of one distributed training.

    Args:
        job: the process, or the ranks.
        table: makes the table of functions, as `tf_amp.terminal.table` does to print it.
    """
    yield "\n".join((*_head(job), *_rules(job)))
    shown = [f for f in job.functions if f.figures.products or f.figures.casts or f.failure]
    if shown:
        ranks = ("ranks",) * (len(job.traces) > 1)
        head = (
            "function",
            *ranks,
            "products low",
            "FLOPs low",
            "casts",
            "cast bytes",
            "of it back",
        )
        yield table(
            (*head, "results of ops", "time by the cost table", "stays float32"),
            [_row(function, bool(ranks)) for function in shown],
        )
    left = len(job.functions) - len(shown)
    if left:
        yield f"{left} of {len(job.functions)} functions have no matrix product or convolution."
    for trace in job.traces:
        of = f"{trace.rank}: " if trace.rank else ""
        if names := ", ".join(trace.status.get("traced_before", ())):
            yield f"{of}traced before AMP was on, so float32 until traced anew: {names}"
        yield from (f"{of}loss scale of {name}: {told}" for name, told in states(trace))
        if skips := [event for event in trace.scale_events if event["event"] == "skipped"]:
            last, count = skips[-1], sum(event["steps"] for event in skips)
            step = "" if last["step"] is None else f" {last['step']}"
            culprit = f", {last['kind']} of {last['gradient']}" if last["gradient"] else ""
            counted = "1 step was skipped" if count == 1 else f"{count} steps were skipped"
            yield (
                f"{of}{counted}, the last one{step}: loss scale "
                f"{last['from']} -> {last['to']}{culprit}"
            )


def states(trace: Trace) -> Iterator[tuple[str, str]]:
    """The name of each loss scale, and its state at the end for people."""
    for scale in trace.status.get("loss_scale", {}).get("loss_scales", ()):
        state = scale["state"] or {}
        told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in state.items())
        yield scale["name"], told or "not known"


def _head(job: Job) -> Iterator[str]:
    process = job.first.process
    settings, versions = process.get("settings", {}), process.get("versions", {})
    yield job.name + "".join(f", {name} {value}" for name, value in versions.items())
    if settings:
        edits = ", ".join(settings["list_edits"])
        yield f"{settings['reason']}; cost table: {settings['cost_table']}; {settings['why']}"
        yield f"list edits: {edits or 'none'}; loss scaling: {settings['loss_scaling_reason']}"
    yield from (f"note: {note}" for note in process.get("notes", ()))


def _rules(job: Job) -> Iterator[str]:
    """A line for each rule on single nodes, with what it met."""
    notes = [r for graph in job.graphs for r in graph.remarks.remarks if r.kind == "note"]
    met = Counter(note.rule for note in notes)
    for rule in dict.fromkeys(rule for graph in job.graphs for rule in graph.config.rules):
        count = met[str(rule)]
        where = f"nodes of {count} function{'s'[: count > 1]}" if count else "no node"
        yield f"rule {rule} ({rule.action}): meets {where}"


def _row(function: JobFunction, with_ranks: bool) -> tuple[str, ...]:
    figures, failure = function.figures, function.failure
    kept = [f"{count} {op}: {why}" for (op, why), count in figures.kept.most_common()]
    more = [f"{len(kept) - _REASONS_SHOWN} more reasons"] if len(kept) > _REASONS_SHOWN else []
    ranks = (", ".join(function.ranks) or "all",) * with_ranks
    activations = figures.activation_bytes_float32, figures.activation_bytes
    seconds = figures.seconds_float32, figures.seconds
    return (
        function.graph.remarks.name,
        *ranks,
        f"{figures.products_low} of {figures.products}",
        percent(figures.flops_share),
        str(figures.casts),
        in_bytes(figures.cast_bytes),
        in_bytes(figures.cast_bytes_to_float32),
        " -> ".join(map(in_bytes, activations)),
        " -> ".join(map(in_seconds, seconds)) if all(seconds) else "-",
        f"given up: {failure}" if failure else "; ".join([*kept[:_REASONS_SHOWN], *more]) or "-",
    )


def percent(share: float | None) -> str:
    """A share, for people; "-" for None."""
    if share is None:
        return "-"
    # A rest must not be rounded away.
    return "100%" if share == 1 else f"{min(share, 0.999):.1%}"


def blockers_text(search: Search, variables: dict[str, str]) -> str:
    """What blocks most, with the line to paste and the risk of each."""
    lines = ["What blocks most (planned again with each of these changed):"]
    if not search.found:
        tried = " that was tried" if search.not_tried else ""
        lines = [
            f"No single op or rule{tried}, if moved, would put more products into the target dtype."
        ]
    for number, blocker in enumerate(search.found[:_BLOCKERS_SHOWN], 1):
        lines += [
            f"{number}. {blocker.change.what}: {gain(blocker)}",
            f"   {blocker.change.line(variables)}",
            f"   risk: {blocker.change.risk}",
        ]
    return "\n".join((*lines, *filter(None, (not_tried(search),))))


def not_tried(search: Search) -> str:
    """What there was no time to try, for people; "" if that is nothing."""
    left = search.not_tried
    if not left:
        return ""
    names = ", ".join(change.what for change in left[:_REASONS_SHOWN])
    more = ", ..." if len(left) > _REASONS_SHOWN else ""
    number = "1 more candidate was" if len(left) == 1 else f"{len(left)} more candidates were"
    return f"{number} not tried for want of time ({names}{more}); --blockers-budget tries longer."


def gain(blocker: Blocker) -> str:
    """What a change gives, for people."""
    parts = []
    if blocker.products:
        what = "product" if blocker.products == 1 else "products"
        parts.append(f"{blocker.products} {what} more go low ({in_flops(blocker.flops)} a call)")
    parts.append(f"{blocker.casts:+} casts")
    sign = "-" if blocker.cast_bytes < 0 else "+"
    parts.append(f"{sign}{in_bytes(abs(blocker.cast_bytes))} cast")
    return ", ".join(parts)


def remark_text(
    remark: Remark, config: PrecisionConfig, lines_of: Mapping[str, tuple[str, ...]]
) -> str:
    """One remark, with the Python lines and what the lists say of the op that decided it.

    Args:
        remark: the remark.
        config: what its graph was planned with.
        lines_of: node -> its Python lines, for the start of the remark's path.
    """
    what = {
        "converted": config.target_dtype,
        "kept": "float32",
        "near_miss": "near miss",
    }.get(remark.kind, remark.kind)
    where = "/".join(filter(None, (remark.function, remark.node)))
    attr = f" ({remark.attr})" if remark.attr not in ("", "T") else ""
    reason = remark.reason or remark.rule
    head = " ".join(filter(None, (f"{what}:", remark.op, where + attr)))
    lines = [f"{head}: {reason}" if where else f"{head} {reason}"]
    if remark.path:
        at = "".join(f", at {line}" for line in lines_of.get(remark.path[0], ())[:1])
        lines.append(f"blocked by {remark.blocked_by}{at}: {' -> '.join(remark.path)}")
    lines += advice(remark, config)
    facts = [str(shape).replace("None", "?") for shape in remark.shapes if shape is not None]
    facts += [in_flops(remark.flops)] if remark.flops is not None else []
    facts += [in_bytes(remark.bytes)] if remark.bytes is not None else []
    if remark.seconds is not None:
        facts.append(f"{remark.seconds * 1e6:.3g} us by the cost table")
    if facts:
        lines.append(", ".join(facts))
    if remark.lines:
        lines.append(f"at {', in '.join(remark.lines)}")
    return "\n    ".join(lines)


def advice(remark: Remark, config: PrecisionConfig) -> Iterator[str]:
    """What the lists say of the op that decided a remark, or what changes it."""
    lists = load_op_lists(config)
    denied = remark.blocked_by or (remark.op if remark.rule == "deny_list" else "")
    if denied in lists.entries:
        yield f"{denied} is on the {lists.list_of(denied)} list: {lists.entries[denied].reason}"
    elif remark.rule == "unlisted" and remark.op in lists.unlisted:
        yield f"{remark.op} is on no list: {lists.unlisted[remark.op]}"
    elif remark.rule in SLOWER:
        yield f"{COST_TABLE}=off converts it all the same; `tf-amp tune` measures your machine"


def in_bytes(number: int) -> str:
    """A number of bytes, for people."""
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB"))


def in_flops(number: int) -> str:
    """An amount of arithmetic, for people."""
    return _scaled(number, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def in_seconds(seconds: float) -> str:
    """A time, for people."""
    return _scaled(seconds * 1e6, 1000, ("us", "ms", "s"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    place = 0
    while abs(number) >= step and place < len(units) - 1:
        number, place = number / step, place + 1
    return f"{number:.3g} {units[place]}" if abs(number) < 100 else f"{number:.0f} {units[place]}"
