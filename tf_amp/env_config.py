"""The environment: settings parsed from the table of variables, and the page that documents it.

``python -m tf_amp.env_config > env_config.md`` writes the page; a test compares the two.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tf_amp.env_variables import (
    BISECT_LIMIT,
    COST_TABLE,
    DTYPE,
    ENABLE,
    ENABLE_GRAPH_REWRITE,
    ENABLE_LOSS_SCALING,
    ENABLING_VARIABLES,
    FOREIGN_VARIABLES,
    IGNORE_PERFORMANCE,
    LEVEL,
    LOG_PATH,
    REWRITE,
    RULES,
    RULES_DISABLE,
    TRIAL,
    VARIABLES,
    EnvConfigError,
    Variable,
)

if TYPE_CHECKING:
    from graph_passes import ListEdit, Rule

__all__ = [
    "VARIABLES",
    "EnvConfigError",
    "Settings",
    "Variable",
    "check_environment",
    "markdown",
    "misspelt",
    "read_settings",
]


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        graph_rewrite: Whether graphs are rewritten.
        loss_scaling: Whether optimizers get a dynamic loss scale.
        loss_scaling_asked: Whether the loss-scaling variable itself said 1 (bfloat16 needs that).
        target_dtype: ``auto``, ``float16`` or ``bfloat16``.
        level: ``""`` or one of the legal levels.
        list_edits: Edits of the op lists, in the order in which they apply.
        rules: What single nodes are to be.
        ignore_performance: Whether to rewrite on hardware without fast units too.
        log_path: Directory for dumps, or None.
        disabled_rules: Names of rules that are switched off.
        cost_table: ``auto``, ``off`` or the path of a file.
        trial_steps: How often a function's original and its rewrite are timed against each other.
        bisect_limit: How many conversions and units are made at most, None for all.
        decided_by: Setting -> the variable that decided it; a default is not listed.
        notes: Variables that look like a misspelt name of this table, one sentence each.
    """

    graph_rewrite: bool = False
    loss_scaling: bool = False
    loss_scaling_asked: bool = False
    target_dtype: str = "auto"
    level: str = ""
    list_edits: tuple[ListEdit, ...] = ()
    rules: tuple[Rule, ...] = ()
    ignore_performance: bool = False
    log_path: str | None = None
    disabled_rules: frozenset[str] = frozenset()
    cost_table: str = "auto"
    trial_steps: int = 0
    bisect_limit: int | None = None
    decided_by: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# TensorFlow has variables of its own that share much of a name, such as TF_ENABLE_ONEDNN_OPTS.
_NEARLY_THE_SAME = 0.85
# TF_ENABLE_AUTO_MIXED_PRECISION_DTYPE means ..._GRAPH_REWRITE_DTYPE, however much longer that is.
_SHARED_WORDS = frozenset(ENABLE_GRAPH_REWRITE.split("_"))
_SAME_WORDS = 0.75


class _Edit(NamedTuple):
    """The fields of `graph_passes.ListEdit`, which cannot be imported without TensorFlow."""

    list_name: str
    action: str
    op: str
    source: str


def _parse_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Variable name -> parsed value, of those that are set; an empty value counts as unset."""
    values = {}
    for variable in VARIABLES:
        for name in (variable.name, *variable.legacy):
            if text := environ.get(name, "").strip():
                values[name] = variable.parse(name, text)
    return values


def _list_edits(values: Mapping[str, Any]) -> list[_Edit]:
    """The edits in TensorFlow's order: by list, new names before legacy ones, ADD before REMOVE."""
    rows: dict[str, list[Variable]] = {}
    for variable in VARIABLES:
        if variable.edits:
            rows.setdefault(variable.edits[0], []).append(variable)
    edits = []
    for list_name, variables in rows.items():
        named = [(v.name, v) for v in variables] + [(n, v) for v in variables for n in v.legacy]
        for name, variable in named:
            action = variable.edits[1] if variable.edits else ""
            edits += [_Edit(list_name, action, op, name) for op in values.get(name, ())]
    return edits


def _refuse_conflicts(edits: list[_Edit]) -> None:
    """Raises if an op ends up added to two lists: no order of application is the obvious one."""
    added: dict[str, dict[str, _Edit]] = {}
    for edit in edits:
        lists = added.setdefault(edit.op, {})
        if edit.action == "add":
            lists[edit.list_name] = edit
        else:
            lists.pop(edit.list_name, None)
    for op, lists in added.items():
        if len(lists) > 1:
            first, second = list(lists.values())[:2]
            raise EnvConfigError(
                f"{first.source} and {second.source} contradict each other: one adds the op {op!r} "
                f"to the {first.list_name} list, the other to the {second.list_name} list, and an "
                "op can be on one list only. Take it out of one of the two variables."
            )


def _refuse_unknown_rules(names: Sequence[str], rules: Mapping[str, str]) -> None:
    for name in names:
        if name not in rules:
            raise EnvConfigError(
                f"{RULES_DISABLE} names the rule {name!r}, which does not exist. "
                f"Legal values: {', '.join(sorted(rules))}."
            )


def _read_rules(path: str) -> tuple[Rule, ...]:
    from graph_passes.policy.rules import RulesError, load_rules

    try:
        return load_rules(path)
    except RulesError as error:
        raise EnvConfigError(f"{RULES} names a file that cannot be used: {error}") from error


def misspelt(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names variables that look like a misspelt name of the table, one sentence each."""
    known = [name for v in VARIABLES for name in (v.name, *v.legacy)] + list(FOREIGN_VARIABLES)
    notes = []
    for name in sorted(environ.keys() - set(known)):
        upper = name.upper()
        ours = upper.startswith("TF_AUTO_MIXED_PRECISION") or _is_in(upper, ENABLE, REWRITE)
        if ours:
            nearest = _nearest(upper, known)
        elif name.startswith("TF_"):
            nearest = difflib.get_close_matches(upper, known, n=1, cutoff=_NEARLY_THE_SAME)
        else:
            continue
        if nearest:
            notes.append(f"The variable {name} is read by nobody; did you mean {nearest[0]}?")
    return tuple(notes)


def _is_in(name: str, *known: str) -> bool:
    return any(one.removeprefix("TF_") in name for one in known)


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """The name that says the same besides the words that all share, else the most similar one."""

    def own_words(of: str) -> str:
        return "_".join(word for word in of.split("_") if word not in _SHARED_WORDS)

    own = {one: own_words(one) for one in known}
    same = difflib.get_close_matches(own_words(name), {*own.values()}, n=1, cutoff=_SAME_WORDS)
    alike = [one for one in known if own[one] in same] or known
    return difflib.get_close_matches(name, alike, n=1, cutoff=0.0)


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Checks every variable without importing TensorFlow.

    Args:
        environ: Variable name -> value; by default the process's environment.

    Raises:
        EnvConfigError: A value is not legal, or one op is added to two lists.
    """
    _refuse_conflicts(_list_edits(_parse_variables(environ)))


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Reads the settings; touches nothing but `environ`.

    Args:
        environ: Variable name -> value; by default the process's environment.

    Returns:
        The settings. A variable that is missing, empty or blank leaves its default.

    Raises:
        EnvConfigError: A value is not legal, or one op is added to two lists.
    """
    values = _parse_variables(environ)
    decided_by: dict[str, str] = {}

    def choose(setting: str, default: Any, *names: str) -> Any:
        for name in names:
            if name in values:
                decided_by[setting] = name
                return values[name]
        return default

    edits = _list_edits(values)
    _refuse_conflicts(edits)
    disabled_rules = choose("disabled_rules", (), RULES_DISABLE)
    rules_file = choose("rules", None, RULES)
    if edits or disabled_rules or rules_file:
        # graph_passes needs TensorFlow's protos; checking or documenting variables must not.
        from graph_passes.policy import config
        from graph_passes.policy.config import ListEdit

        _refuse_unknown_rules(disabled_rules, config.RULES)
    return Settings(
        graph_rewrite=choose("graph_rewrite", False, ENABLE_GRAPH_REWRITE, ENABLE),
        loss_scaling=choose("loss_scaling", False, ENABLE_LOSS_SCALING, ENABLE),
        loss_scaling_asked=values.get(ENABLE_LOSS_SCALING, False),
        target_dtype=choose("target_dtype", "auto", DTYPE),
        level=choose("level", "", LEVEL),
        list_edits=tuple(ListEdit(**edit._asdict()) for edit in edits),
        rules=_read_rules(rules_file) if rules_file else (),
        ignore_performance=choose("ignore_performance", False, IGNORE_PERFORMANCE),
        log_path=choose("log_path", None, LOG_PATH),
        disabled_rules=frozenset(disabled_rules),
        cost_table=choose("cost_table", "auto", COST_TABLE),
        trial_steps=choose("trial_steps", 0, TRIAL),
        bisect_limit=choose("bisect_limit", None, BISECT_LIMIT),
        decided_by=decided_by,
        notes=misspelt(environ),
    )


_INTRODUCTION = """\
<!-- Generated: python -m tf_amp.env_config > env_config.md -->
# Environment variables

Set them before TensorFlow is imported: the enabling ones are looked at there and then, and what is
changed later does nothing, which a warning says. A variable that is empty or blank counts as unset.
Blanks around a value and around the commas of a list are ignored. A call argument wins over a
variable, a variable over the default.

A value that cannot be parsed is an error at `import tensorflow`, never "off", where one of the
enabling variables is set. Without them the others do nothing unless a call switches AMP on, which a
warning says when the first function or session runs. A variable whose name looks like these but is
none of them gets a warning with the nearest name.
"""

_RULES = """\
## Rules on single nodes

Each table of the file is a rule. All criteria that it gives must hold; at least one must be given.

```toml
[[rule]]
action = "keep_float32"             # or allow, deny, infer, clear: the list that the node is on
why = "the logits overflow float16" # shown by `tf-amp explain`
node = "encoder/attention/.*"       # regular expression, matches the whole name; gradients follow
op = "Softmax"                      # op type
attr = "T"                          # an attribute ...
value = "float32"                   # ... and what it must be
function = 'train_step|.*\\(fit\\)'   # regular expression, matches the whole name of the function
source = "model.py:42"              # the Python line, or file, that made the node
layer = "decoder/head"              # parts of the node's name, between slashes
```

A rule of a higher level wins: file < variables that edit lists < `rules=` of a call < the scopes
`tf_amp.keep_float32` and `tf_amp.allow`. Two rules of one level that decide one node differently
are an error that names both: the graph that has the node runs as it is, and one line says so. A
rule that no node met gets a warning at the end of the process.
"""

_LISTS = """\
## How list edits apply

- List by list; names of the table first, then their legacy names; for each, ADD before REMOVE.
- ADD moves the op: it leaves the list on which it is shipped, and one line says so.
- Two variables that add one op to two lists are an error that names both.
- An op type that this TensorFlow does not know is a warning with the nearest registered name.
"""


def _truth_table() -> Iterator[str]:
    yield f"| `{ENABLE}` | `…_GRAPH_REWRITE` | `…_LOSS_SCALING` | rewrite | loss scaling |"
    yield "|---|---|---|---|---|"
    rows = ("---", "1--", "10-", "1-0", "01-", "0-1", "-11", "1e-", "1-e")
    for row in rows:
        pairs = zip(ENABLING_VARIABLES, row, strict=True)
        environ = {name: "" if mark == "e" else mark for name, mark in pairs if mark != "-"}
        settings = read_settings(environ)
        cells = ['""' if mark == "e" else "unset" if mark == "-" else mark for mark in row]
        cells += ["on" if on else "off" for on in (settings.graph_rewrite, settings.loss_scaling)]
        yield f"| {' | '.join(cells)} |"


def markdown() -> str:
    """Returns the text of ``env_config.md``."""
    lines = [_INTRODUCTION, "## The variables", ""]
    for variable in VARIABLES:
        lines += [f"### `{variable.name}`", variable.meaning, ""]
        lines.append(f"- Legal values: {variable.legal}.")
        lines.append(f"- Default: {variable.default or 'the list as shipped'}.")
        if variable.legacy:
            lines.append(f"- Legacy name, read as well: {', '.join(variable.legacy)}.")
        lines.append("")
    lines += ["## What the three enabling variables do together", "", *_truth_table(), "", _LISTS]
    lines.append(_RULES)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown())
