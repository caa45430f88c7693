"""The command line: `tf-amp lists`."""

from __future__ import annotations

import json
from pathlib import Path

from environments import REWRITE, RunPython

from graph_passes import ListEdit, PrecisionConfig, load_op_lists
from tf_amp.cli.lists import list_rows

MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"


def _edit(list_name: str, action: str, op: str) -> ListEdit:
    return ListEdit(list_name=list_name, action=action, op=op, source="the test")  # type: ignore[arg-type]


def test_each_row_says_who_put_the_op_there() -> None:
    edits = (
        _edit("infer", "add", "Exp"),
        _edit("deny", "remove", "Log"),
        _edit("clear", "add", "My"),
    )
    shipped = load_op_lists(PrecisionConfig())
    lists = load_op_lists(PrecisionConfig(list_edits=edits, level="TREAT_INFER_AS_DENY"))
    sources = {edit.op: edit.source for edit in edits}
    rows = {row.op: row for row in list_rows(lists, shipped, sources, "the level")}
    places = {op: rows[op][1:4] for op in ("Exp", "Log", "My", "Tanh", "MatMul")}
    assert places == {
        "Exp": ("deny", "deny", "shipped"),  # moved to the infer list, which the level denies
        "Log": ("", "deny", "the test"),
        "My": ("clear", "", "the test"),
        "Tanh": ("deny", "infer", "the level"),
        "MatMul": ("allow", "allow", "shipped"),
    }
    assert rows["Log"].reason == shipped.entries["Log"].reason


def test_lists(run_forked: RunPython) -> None:
    env = {f"{REWRITE}_INFERLIST_ADD": "Exp"}
    target = ("--device", "GPU", "--dtype", "float16")
    printed = run_forked(MAIN, env, args=("lists", "--diff", "--json", *target)).stdout
    (row,) = json.loads(printed)["ops"]
    assert (row["op"], row["list_name"], row["shipped"]) == ("Exp", "infer", "deny")
    assert row["origin"] == f"{REWRITE}_INFERLIST_ADD"
    for only, said in (((), "MatMul  allow"), (("--diff",), "No op is elsewhere")):
        done = run_forked(MAIN, args=("lists", "MatMul", "Exq", *only, *target), check=False)
        assert done.returncode == 1
        assert said in done.stdout
        assert done.stderr.endswith("on no list: Exq\n")


def test_lists_have_the_rules_and_who_made_them(run_forked: RunPython, tmp_path: Path) -> None:
    files = [tmp_path / "weak.toml", tmp_path / "strong.toml"]
    for file in files:
        file.write_text(
            '[[rule]]\naction = "keep_float32"\nop = "Softmax"\nlayer = "head"\nwhy = "NaN"\n'
        )
    env = {f"{REWRITE}_RULES": str(files[0]), f"{REWRITE}_ALLOWLIST_ADD": "Softmax"}
    args = ("lists", "--diff", "--rules", str(files[1]))
    printed = run_forked(MAIN, env, args=args).stdout
    rows = [line.split(maxsplit=4) for line in printed.splitlines() if ".toml [1]  " in line]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("weak.toml", "keep_float32", "file"),
        ("strong.toml", "keep_float32", "call"),
    ]
    assert rows[0][4].split("  ") == ["op = 'Softmax', layer = 'head'", "NaN"]
    assert (
        f"{REWRITE}_ALLOWLIST_ADD overrules weak.toml [1]: 'NaN' for the op 'Softmax'." in printed
    )
    told = json.loads(run_forked(MAIN, env, args=(*args, "--json", "Softmax")).stdout)
    assert [rule["level"] for rule in told["rules"]] == ["file", "call"]
    assert told["rules"][0]["layer"] == "head"
