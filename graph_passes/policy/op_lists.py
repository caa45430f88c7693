"""The four op lists: read from data files, then edited."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, get_args

from tensorflow.python.framework import op_def_registry

from graph_passes.ops.kernels import missing_kernels_note
from graph_passes.policy.config import ListEdit, ListName, PrecisionConfig
from graph_passes.policy.op_classes import ops_of
from graph_passes.policy.toml import read_shipped

_OFF_LISTS = ("unlisted", "none")
KEPT_BY_FORCE = frozenset(("Const", "SoftmaxCrossEntropyWithLogits"))
"""Ops that UNSAFE_FORCE_ALL does not convert, beside those with a state or a ref variable."""


class ListEntry(NamedTuple):
    """Where an op stands and why."""

    list_name: ListName
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class OpLists:
    """The lists in force.

    Attributes:
        entries: op type -> its list and the reason for it. An op on no list is absent.
        unlisted: op type -> why it is on no list, where that is written down.
        notes: what the edits did that their author should know: ops that moved, unknown names.
        force_all: every eligible op is treated as on the allow list (UNSAFE_FORCE_ALL).
    """

    entries: Mapping[str, ListEntry]
    unlisted: Mapping[str, str]
    notes: tuple[str, ...] = ()
    force_all: bool = False

    def list_of(self, op: str) -> ListName | None:
        """The list that an op type is on, None where it is on none."""
        entry = self.entries.get(op)
        return entry.list_name if entry else None

    def ops(self, list_name: ListName) -> frozenset[str]:
        """The op types on one list."""
        return self._by_list.get(list_name, frozenset())

    @functools.cached_property
    def _by_list(self) -> dict[ListName, frozenset[str]]:
        """List -> the op types on it."""
        found: dict[ListName, set[str]] = {}
        for op, entry in self.entries.items():
            found.setdefault(entry.list_name, set()).add(op)
        return {name: frozenset(ops) for name, ops in found.items()}


def _shipped(config: PrecisionConfig) -> tuple[dict[str, ListEntry], dict[str, str]]:
    entries: dict[str, ListEntry] = {}
    unlisted: dict[str, str] = {}
    for op, row in read_shipped(f"lists/{config.target_dtype}.toml").items():
        where = row["list"]
        if config.parity:
            where = row.get("upstream", where)
        elif config.device not in row.get("devices", ("GPU", "CPU")):
            where = "unlisted"
        if where in _OFF_LISTS:
            unlisted[op] = row["reason"]
        else:
            entries[op] = ListEntry(where, row["reason"])
    return entries, unlisted


def _unknown_op(edit: ListEdit) -> str:
    from tensorflow.python.framework import kernels  # the list of names costs 20 ms: only on a typo

    known = sorted({kernel.op for kernel in kernels.get_all_registered_kernels().kernel})
    near = difflib.get_close_matches(edit.op, known, n=1, cutoff=0.6)
    by_case = [op for op in known if op.lower() == edit.op.lower()]
    hint = f" Did you mean {(by_case or near)[0]!r}?" if by_case or near else ""
    return (
        f"{_origin(edit)} names the op type {edit.op!r}, which this TensorFlow does not know; "
        f"it has no effect unless a library of custom ops brings it.{hint}"
    )


def _origin(edit: ListEdit) -> str:
    return edit.source or f"the {edit.action} edit of the {edit.list_name} list"


def _apply_edit(entries: dict[str, ListEntry], edit: ListEdit) -> str | None:
    """Applies one edit in place; returns a note where the author may be surprised."""
    before = entries.get(edit.op)
    if edit.action == "add":
        entries[edit.op] = ListEntry(edit.list_name, f"added by {_origin(edit)}")
        if before and before.list_name != edit.list_name:
            return (
                f"{_origin(edit)} moved {edit.op!r} from the {before.list_name} list to the "
                f"{edit.list_name} list."
            )
        return None
    if before is None or before.list_name != edit.list_name:
        where = f"on the {before.list_name} list" if before else "on no list"
        return (
            f"{_origin(edit)} removes {edit.op!r} from the {edit.list_name} list, but it is "
            f"{where}; nothing was changed."
        )
    del entries[edit.op]
    return None


@functools.lru_cache(maxsize=64)
def load_op_lists(config: PrecisionConfig) -> OpLists:
    """The lists that a configuration puts in force.

    Args:
        config: names the dtype, the device, the mode (shipped or TensorFlow's own lists), the
            level and the edits, which are applied in order.

    Returns:
        The lists, with notes on edits that moved an op, did nothing, or name an unknown op.
    """
    entries, unlisted = _shipped(config)
    missing = missing_kernels_note(config.device)
    notes: list[str] = [missing] if missing else []
    for edit in config.list_edits:
        note = _apply_edit(entries, edit)
        if note:
            notes.append(note)
        if op_def_registry.get(edit.op) is None:
            notes.append(_unknown_op(edit))
    edited = {edit.op: edit for edit in config.list_edits}
    notes += (
        f"{_origin(edited[rule.op])} overrules {rule} for the op {rule.op!r}."
        for rule in config.rules
        if rule.level == "file" and rule.op in edited
    )
    if config.level == "TENSOR_CORES_ONLY":
        entries = {op: entry for op, entry in entries.items() if entry.list_name == "allow"}
    elif config.level == "TREAT_INFER_AS_DENY":
        entries = {
            op: ListEntry("deny", entry.reason) if entry.list_name == "infer" else entry
            for op, entry in entries.items()
        }
    return OpLists(
        entries=MappingProxyType(entries),
        unlisted=MappingProxyType(unlisted),
        notes=tuple(notes),
        force_all=config.level == "UNSAFE_FORCE_ALL",
    )


@functools.cache
def product_ops() -> frozenset[str]:
    """What a rewrite is made for: matrix products, convolutions, and code that may hold some.

    Edits and rules change nothing of that: a product that a user keeps in float32 is still one.
    """
    return ops_of("products") | ops_of("compiled_code")


def list_notes(config: PrecisionConfig) -> tuple[str, ...]:
    """What the edits of a configuration did that their author should know."""
    return load_op_lists(config).notes


LIST_NAMES: tuple[ListName, ...] = get_args(ListName)

FLOAT32 = "float32"
"""What stands in the place of a list for nodes that compute in float32 inside a unit."""
