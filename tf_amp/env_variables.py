"""The table of environment variables: names, kinds, legal values and meanings.

`VARIABLES` is the only place where a variable is named. `tf_amp.env_config` parses from it and
prints ``env_config.md`` from it. Variables that TensorFlow names itself keep their name, their
order of application and their legacy spelling; what is stricter here (an unparsable value is an
error and not "off") is said in the generated page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

ENABLE = "TF_ENABLE_AUTO_MIXED_PRECISION"
ENABLE_GRAPH_REWRITE = f"{ENABLE}_GRAPH_REWRITE"
ENABLE_LOSS_SCALING = f"{ENABLE}_LOSS_SCALING"
ENABLING_VARIABLES = (ENABLE, ENABLE_GRAPH_REWRITE, ENABLE_LOSS_SCALING)
# The calls that do what these do, as messages name them.
ENABLE_CALL = "tf_amp.enable_mixed_precision_graph_rewrite()"
DISABLE_CALL = "tf_amp.disable_mixed_precision_graph_rewrite()"

REWRITE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE"
DTYPE = f"{REWRITE}_DTYPE"
LEVEL = f"{REWRITE}_LEVEL"
RULES = f"{REWRITE}_RULES"
RULES_DISABLE = f"{REWRITE}_RULES_DISABLE"
COST_TABLE = f"{REWRITE}_COST_TABLE"
IGNORE_PERFORMANCE = f"{REWRITE}_IGNORE_PERFORMANCE"
LOG_PATH = f"{REWRITE}_LOG_PATH"
TRIAL = f"{REWRITE}_TRIAL"
BISECT_LIMIT = f"{REWRITE}_BISECT_LIMIT"
PROFILE = f"{REWRITE}_PROFILE"

# Read by TensorFlow's own pass: not ours to parse, and no typing errors either.
FOREIGN_VARIABLES = (f"{REWRITE}_SIMULATE_GPU", f"{REWRITE}_EMULATE_FP16")

_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.>-]*")


def is_on(value: str) -> bool:
    """Whether a value of an enabling variable is meant to switch something on, legal or not."""
    return _BOOLEANS.get(value.strip().lower(), bool(value.strip()))


class EnvConfigError(ValueError):
    """A variable holds something illegal, or two variables contradict each other."""


@dataclass(frozen=True)
class Variable:
    """One environment variable: a row of the table.

    Attributes:
        name: The variable's name.
        kind: How its value is read. ``boolean``: 0, 1, true or false in any case. ``choice``: one
            of `choices` in any case. ``names``: names separated by commas, blanks around them
            ignored. ``path``: a directory. ``file``: a file. ``count``: a whole number, 0 or more.
            ``choice or file``: one of `choices` in any case, else a file.
        meaning: What it does, one or two sentences.
        default: What holds while it is unset, as text.
        choices: The legal values of a ``choice``, the legal words of a ``choice or file``.
        legacy: Older names that are read as well, after `name`.
        edits: For an edit of an op list: the list and the action.
    """

    name: str
    kind: Literal["boolean", "choice", "names", "path", "file", "count", "choice or file"]
    meaning: str
    default: str = ""
    choices: tuple[str, ...] = ()
    legacy: tuple[str, ...] = ()
    edits: tuple[str, str] | None = None

    @property
    def legal(self) -> str:
        """The legal values, as text for messages and for the generated page."""
        if self.kind == "boolean":
            return "0, 1, true, false (any case)"
        if self.kind == "choice":
            return f"{', '.join(self.choices)} (any case)"
        if self.kind == "choice or file":
            return f"{', '.join(self.choices)} (any case), or the path of a file"
        if self.kind == "names":
            what = "op types (case-sensitive)" if self.edits else "rule names"
            return f"{what} separated by commas"
        others = {
            "count": "a whole number, 0 or more",
            "path": "a directory, created if missing",
            "file": "the path of a file",
        }
        return others[self.kind]

    def parse(self, name: str, value: str) -> Any:
        """Parses a value that is not empty.

        Args:
            name: The name it was found under: `name` or one of `legacy`.
            value: The value, without blanks at its ends.

        Returns:
            A bool, a number, a string, or a tuple of names, by `kind`.

        Raises:
            EnvConfigError: The value is not legal.
        """
        if self.kind == "boolean" and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        if self.kind in ("choice", "choice or file"):
            for choice in self.choices:
                if choice.lower() == value.lower():
                    return choice
        if self.kind == "names":
            names = tuple(dict.fromkeys(n for n in map(str.strip, value.split(",")) if n))
            if all(map(_NAME.fullmatch, names)):
                return names
        if self.kind == "count" and value.isdecimal():
            return int(value)
        if self.kind in ("path", "file", "choice or file"):
            return value
        raise EnvConfigError(
            f"{name} has the value {value!r}, which is not legal. Legal values: {self.legal}. "
            f"Correct it, or unset it{f' (default: {self.default})' if self.default else ''}."
        )


def _list_variables() -> Iterator[Variable]:
    lists = (
        ("allow", "WHITELIST", "always computed in the target dtype"),
        ("deny", "BLACKLIST", "always computed in float32"),
        ("infer", "GRAYLIST", "computed in the target dtype next to allowed ops, unless denied"),
        ("clear", None, "without numeric effect, following their neighbours"),
    )
    for list_name, legacy, meaning in lists:
        for action in ("add", "remove"):
            suffix = action.upper()
            yield Variable(
                f"{REWRITE}_{list_name.upper()}LIST_{suffix}",
                "names",
                f"Op types to move to the {list_name} list: {meaning}."
                if action == "add"
                else f"Op types to take off the {list_name} list.",
                legacy=(f"{REWRITE}_{legacy}_{suffix}",) if legacy else (),
                edits=(list_name, action),
            )


VARIABLES: tuple[Variable, ...] = (
    Variable(ENABLE, "boolean", "Both halves: the graph rewrite and loss scaling.", default="0"),
    Variable(
        ENABLE_GRAPH_REWRITE,
        "boolean",
        f"The graph rewrite alone. If set, it overrides `{ENABLE}` in either direction.",
        default=f"as {ENABLE}",
    ),
    Variable(
        ENABLE_LOSS_SCALING,
        "boolean",
        f"Dynamic loss scaling alone. If set, it overrides `{ENABLE}` in either direction. With "
        "bfloat16, loss scaling is on only if this variable itself says 1.",
        default=f"as {ENABLE}",
    ),
    Variable(
        DTYPE,
        "choice",
        "The target dtype. `auto`: float16 on a GPU of compute capability 7.0 or more, bfloat16 on "
        "a CPU with AVX512_BF16 or AMX, otherwise nothing is converted and one warning says why.",
        default="auto",
        choices=("auto", "float16", "bfloat16"),
    ),
    *_list_variables(),
    Variable(
        LEVEL,
        "choice",
        "How far the rewrite goes. TENSOR_CORES_ONLY: ops of the allow list only. "
        "TREAT_INFER_AS_DENY: the infer list counts as deny. UNSAFE_FORCE_ALL (float16 "
        "on a GPU only): every op that has a kernel, whatever the lists say.",
        default="the four lists as they are",
        choices=("TENSOR_CORES_ONLY", "TREAT_INFER_AS_DENY", "UNSAFE_FORCE_ALL"),
    ),
    Variable(
        RULES,
        "file",
        "A TOML file of rules on single nodes, whatever list their op is on: by name, attribute, "
        "function, layer or Python line. What it says comes behind the shipped lists and before "
        "the edits of lists above, rules of a call, and the scopes `tf_amp.keep_float32` and "
        "`tf_amp.allow`.",
        default="no rules on single nodes",
    ),
    Variable(
        RULES_DISABLE,
        "names",
        "Rules of the rewrite itself to switch off by name; `tf-amp env` lists them.",
        default="every rule is on",
    ),
    Variable(
        COST_TABLE,
        "choice or file",
        "The measured costs by which an op stays float32 where it, or the casts around it, would "
        "make the step slower on this device. `auto`: what `tf-amp tune` measured on this "
        "machine, else the table shipped for this class of device, else none. `off`: none. "
        "Otherwise the table in that file. Functions that XLA compiles for a CPU "
        "(`jit_compile=True`) have a table of their own, chosen in the same way; a file takes the "
        "place of the table of its kind.",
        default="auto",
        choices=("auto", "off"),
    ),
    Variable(
        IGNORE_PERFORMANCE,
        "boolean",
        "Convert even where the hardware has no fast units for the target dtype, and whatever it "
        f"costs: `{COST_TABLE}=auto` then means off.",
        default="0",
    ),
    Variable(
        TRIAL,
        "count",
        "How often each function's original and its rewrite are timed, in turns, over the "
        "function's first calls; the faster of the two stays, and one line says so. The outcome "
        "is remembered by graph and machine in the user's cache. Every call runs one of the two. "
        "Not tried, which a line says: functions whose random ops have a seed, and those of jobs "
        "with servers in other processes or several workers.",
        default="0: nothing is tried",
    ),
    Variable(
        BISECT_LIMIT,
        "count",
        "How many conversions and units are made, in the order in which the process plans them; "
        "what is beyond stays as it is. A node that is planned again keeps its number. "
        "`tf-amp bisect` finds with it the one that breaks a program.",
        default="all of them, and nothing is numbered",
    ),
    Variable(
        PROFILE,
        "path",
        "Set by `tf-amp profile` for the program that it runs: the folder that says which steps "
        "are to be timed, and into which their times go. The program ends with the last of them.",
        default="nothing is timed",
    ),
    Variable(
        LOG_PATH,
        "path",
        "The trace directory, which `tf-amp explain` reads. In a folder for each process: every "
        "graph before and after the rewrite, a remark with the Python line on each decision, the "
        "settings in force and who decided them, the hardware, the cost tables, and at the end the "
        "counters and loss scales. At most 1 GiB a process; of the environment only the variables "
        "of this page. If it cannot be written to, a warning says so and the program goes on "
        "without.",
        default="no trace",
    ),
)
