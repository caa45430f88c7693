"""The table of variables: parsing, precedence, errors, and the page generated from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from environments import AMP, REWRITE
from hypothesis import given
from hypothesis import strategies as st

from tf_amp.env_config import (
    VARIABLES,
    EnvConfigError,
    check_environment,
    markdown,
    misspelt,
    read_settings,
)

REPOSITORY = Path(__file__).resolve().parents[2]
ENABLING = (AMP, f"{AMP}_GRAPH_REWRITE", f"{AMP}_LOSS_SCALING")


@pytest.mark.parametrize(
    ("amp", "graph_rewrite", "loss_scaling", "rewrites", "scales"),
    [
        (None, None, None, False, False),
        ("1", None, None, True, True),
        ("1", "0", None, False, True),
        ("1", None, "0", True, False),
        ("0", "1", None, True, False),
        ("0", None, "1", False, True),
        (None, "1", "1", True, True),
        ("1", "", None, True, True),
        ("1", None, "", True, True),
    ],
)
def test_nine_row_truth_table(
    amp: str | None,
    graph_rewrite: str | None,
    loss_scaling: str | None,
    rewrites: bool,
    scales: bool,
) -> None:
    pairs = zip(ENABLING, (amp, graph_rewrite, loss_scaling), strict=True)
    settings = read_settings({name: value for name, value in pairs if value is not None})
    assert (settings.graph_rewrite, settings.loss_scaling) == (rewrites, scales)
    assert settings.loss_scaling_asked == (loss_scaling == "1")


def test_nothing_set_gives_the_defaults() -> None:
    settings = read_settings({"PATH": "/bin"})
    assert not settings.graph_rewrite
    assert not settings.loss_scaling
    assert settings.target_dtype == "auto"
    assert settings.level == ""
    assert settings.list_edits == ()
    assert not settings.ignore_performance
    assert settings.log_path is None
    assert settings.disabled_rules == frozenset()
    assert settings.decided_by == {}
    assert settings.notes == ()


@given(st.sampled_from([v.name for v in VARIABLES]), st.text(" \t", max_size=3))
def test_empty_or_blank_counts_as_unset(name: str, blank: str) -> None:
    assert read_settings({name: blank}) == read_settings({})


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("TRUE", True), ("tRue", True), (" 1 ", True), ("0", False), ("False", False)],
)
def test_booleans(value: str, expected: bool) -> None:
    assert read_settings({AMP: value}).graph_rewrite is expected
    name = f"{REWRITE}_IGNORE_PERFORMANCE"
    assert read_settings({name: value}).ignore_performance is expected


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        (AMP, "on!", "0, 1, true, false"),
        (AMP, "2", "0, 1, true, false"),
        (f"{AMP}_GRAPH_REWRITE", "yes", "0, 1, true, false"),
        (f"{AMP}_LOSS_SCALING", "dynamic", "0, 1, true, false"),
        (f"{REWRITE}_IGNORE_PERFORMANCE", "-1", "0, 1, true, false"),
        (f"{REWRITE}_LEVEL", "BOGUS", "TENSOR_CORES_ONLY, TREAT_INFER_AS_DENY, UNSAFE_FORCE_ALL"),
        (f"{REWRITE}_DTYPE", "float8", "auto, float16, bfloat16"),
        (f"{REWRITE}_ALLOWLIST_ADD", "MatMul;Conv2D", "separated by commas"),
        (f"{REWRITE}_BLACKLIST_ADD", "Mat Mul", "separated by commas"),
        (f"{REWRITE}_RULES_DISABLE", "a b", "separated by commas"),
    ],
)
def test_an_illegal_value_names_variable_value_and_legal_values(
    name: str, value: str, legal: str
) -> None:
    for read in (read_settings, check_environment):
        with pytest.raises(EnvConfigError) as caught:
            read({name: value})
        message = str(caught.value)
        assert message.startswith(name + " ")
        assert repr(value) in message
        assert legal in message


def test_an_unknown_rule_is_an_error_with_the_legal_names() -> None:
    with pytest.raises(EnvConfigError, match=r"RULES_DISABLE.*'no-such-rule'.*variable-update"):
        read_settings({f"{REWRITE}_RULES_DISABLE": "no-such-rule"})
    settings = read_settings({f"{REWRITE}_RULES_DISABLE": "variable-update"})
    assert settings.disabled_rules == {"variable-update"}


@pytest.mark.parametrize(
    "value", ["treat_infer_as_deny", "TREAT_INFER_AS_DENY", " Treat_Infer_As_Deny"]
)
def test_level_in_any_case(value: str) -> None:
    assert read_settings({f"{REWRITE}_LEVEL": value}).level == "TREAT_INFER_AS_DENY"


@pytest.mark.parametrize("value", ["bfloat16", "BFloat16"])
def test_dtype_in_any_case(value: str) -> None:
    assert read_settings({f"{REWRITE}_DTYPE": value}).target_dtype == "bfloat16"


def _edits(environ: dict[str, str]) -> list[tuple[str, str, str]]:
    return [(e.list_name, e.action, e.op) for e in read_settings(environ).list_edits]


@given(st.lists(st.from_regex(r"[A-Z][A-Za-z0-9]{0,8}", fullmatch=True), unique=True), st.data())
def test_blanks_around_commas_and_empty_items_do_not_matter(
    ops: list[str], data: st.DataObject
) -> None:
    blanks = st.text(" \t", max_size=2)
    written = ",".join(f"{data.draw(blanks)}{op}{data.draw(blanks)}" for op in [*ops, ""])
    expected = [("allow", "add", op) for op in ops]
    assert _edits({f"{REWRITE}_ALLOWLIST_ADD": written}) == expected


def test_order_is_new_names_then_legacy_and_add_then_remove() -> None:
    environ = {
        f"{REWRITE}_WHITELIST_REMOVE": "D",
        f"{REWRITE}_WHITELIST_ADD": "C",
        f"{REWRITE}_ALLOWLIST_REMOVE": "B",
        f"{REWRITE}_ALLOWLIST_ADD": "A",
    }
    assert _edits(environ) == [
        ("allow", "add", "A"),
        ("allow", "remove", "B"),
        ("allow", "add", "C"),
        ("allow", "remove", "D"),
    ]
    sources = [edit.source for edit in read_settings(environ).list_edits]
    assert sources == [f"{REWRITE}_{s}" for s in ("ALLOWLIST_ADD", "ALLOWLIST_REMOVE")] + [
        f"{REWRITE}_{s}" for s in ("WHITELIST_ADD", "WHITELIST_REMOVE")
    ]


@pytest.mark.parametrize(
    ("legacy", "list_name"), [("WHITELIST", "allow"), ("BLACKLIST", "deny"), ("GRAYLIST", "infer")]
)
def test_legacy_list_names(legacy: str, list_name: str) -> None:
    assert _edits({f"{REWRITE}_{legacy}_ADD": "MyOp"}) == [(list_name, "add", "MyOp")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ALLOWLIST_ADD", "DENYLIST_ADD"),
        ("WHITELIST_ADD", "CLEARLIST_ADD"),
        ("ALLOWLIST_ADD", "GRAYLIST_ADD"),
    ],
)
def test_an_op_added_to_two_lists_is_an_error_naming_both_variables(
    first: str, second: str
) -> None:
    environ = {f"{REWRITE}_{first}": "MatMul,Exp", f"{REWRITE}_{second}": "Tanh, Exp"}
    with pytest.raises(EnvConfigError) as caught:
        check_environment(environ)
    for part in (f"{REWRITE}_{first}", f"{REWRITE}_{second}", "'Exp'"):
        assert part in str(caught.value)


def test_an_addition_that_is_taken_back_is_no_conflict() -> None:
    environ = {
        f"{REWRITE}_ALLOWLIST_ADD": "Exp",
        f"{REWRITE}_ALLOWLIST_REMOVE": "Exp",
        f"{REWRITE}_DENYLIST_ADD": "Exp",
    }
    assert _edits(environ)[-1] == ("deny", "add", "Exp")


def test_who_decided_is_told() -> None:
    settings = read_settings({AMP: "1", ENABLING[1]: "1", f"{REWRITE}_LOG_PATH": "/logs"})
    assert settings.decided_by == {
        "graph_rewrite": ENABLING[1],
        "loss_scaling": AMP,
        "log_path": f"{REWRITE}_LOG_PATH",
    }
    assert settings.log_path == "/logs"


def test_a_misspelt_variable_is_noted_with_the_nearest_name() -> None:
    settings = read_settings({f"{REWRITE}_ALOWLIST_ADD": "MatMul"})
    assert settings.list_edits == ()
    (note,) = settings.notes
    assert f"{REWRITE}_ALOWLIST_ADD" in note
    assert f"did you mean {REWRITE}_ALLOWLIST_ADD?" in note


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ENABLE_AUTO_MIXED_PRECISION", AMP),
        ("tf_enable_auto_mixed_precision", AMP),
        ("TF_AUTO_MIXED_PRECISION", AMP),
        (f"{AMP}_DTYPE", f"{REWRITE}_DTYPE"),
        (f"{AMP}_GRAPH_REWRITE_IGNORE_PERFORMANCE", f"{REWRITE}_IGNORE_PERFORMANCE"),
        (REWRITE, f"{AMP}_GRAPH_REWRITE"),
        (f"{REWRITE}_LOSS_SCALING", f"{AMP}_LOSS_SCALING"),
        (f"{REWRITE}_LOGPATH", f"{REWRITE}_LOG_PATH"),
    ],
)
def test_the_prefix_may_be_what_is_wrong(name: str, meant: str) -> None:
    (note,) = misspelt({name: "1"})
    assert note.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("name", ["AUTO_MIXED_PRECISION", "USE_AMP", "TF_ENABLE_ONEDNN_OPTS"])
def test_names_of_others_are_left_alone(name: str) -> None:
    assert misspelt({name: "1"}) == ()


def test_variables_of_tensorflows_own_pass_are_left_alone() -> None:
    assert read_settings({f"{REWRITE}_SIMULATE_GPU": "1"}).notes == ()


def test_page_is_generated_from_the_table() -> None:
    page = (REPOSITORY / "env_config.md").read_text(encoding="utf-8")
    assert page == markdown(), "run: python -m tf_amp.env_config > env_config.md"
    for variable in VARIABLES:
        assert f"### `{variable.name}`" in page
        assert all(name in page for name in variable.legacy)


def test_the_module_prints_the_page_without_tensorflow() -> None:
    code = (
        "import runpy, sys; runpy.run_module('tf_amp.env_config', run_name='__main__');"
        "sys.exit('tensorflow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == markdown()


def test_rules_are_read_from_the_file_that_a_variable_names(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[rule]]\naction = "keep_float32"\nlayer = "head"\n')
    settings = read_settings({f"{REWRITE}_RULES": str(file)})
    (rule,) = settings.rules
    assert (rule.layer, rule.level, rule.origin) == ("head", "file", "rules.toml [1]")
    assert settings.decided_by["rules"] == f"{REWRITE}_RULES"


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file"), ('[[rule]]\naction = "keep"', "line 1.*`action` must be one of")],
)
def test_rules_that_cannot_be_read_are_an_error(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "rules.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(EnvConfigError, match=f"_RULES names a file.*{message}"):
        read_settings({f"{REWRITE}_RULES": str(file)})
