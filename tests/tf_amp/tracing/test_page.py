"""The page: what a browser shows of it, clicked through, and what no name in a graph can do."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html.parser
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorflow.core.framework.graph_pb2 import GraphDef

from graph_passes import FunctionRemarks, PrecisionConfig, Remark
from tf_amp.tracing.blockers import Blocker, Change, Search
from tf_amp.tracing.jobs import jobs_of
from tf_amp.tracing.page import page
from tf_amp.tracing.trace import Trace, TracedGraph, in_force

HOSTILE = "</script><img src=x onerror=alert(1)><!--{{ 7 * 7 }}"
MANY = 30_000


def product(node: str, kind: Any = "converted", **fields: Any) -> Remark:
    rule = "allow_list" if kind == "converted" else "slower_here"
    shape = ((32, 60),)
    return Remark(
        kind=kind, rule=rule, node=node, op="MatMul", op_list="allow", attr="T", reason=f"{rule}!",
        shapes=shape, flops=1000, sides=(32, 8, 60), lines=("/code/model.py:42",), **fields,
    )  # fmt: skip


REMARKS = (
    product("net/dense/MatMul"),
    product("net/dense_1/MatMul", "kept"),
    product("net/MatMul", "converted", function="body"),
    Remark(
        kind="kept", rule="behind_deny", node="net/Elu", op="Elu", op_list="infer", attr="T",
        reason="behind an op of the deny list", path=("net/Exp", "net/Elu"), blocked_by="Exp",
    ),
    Remark(kind="cast", rule="to_target", node="net/Cast-0", op="Cast", bytes=6144),
    Remark(kind="cast", rule="to_float32", node="net/Cast-1", op="Cast", bytes=2048),
    Remark(kind="kept", rule=HOSTILE, node=f"net/{HOSTILE}", op=HOSTILE, reason=HOSTILE),
    Remark(kind="note", reason="a note"),
)  # fmt: skip


def trace_of(
    remarks: tuple[Remark, ...] = REMARKS, name: str = "step (fit)", **process: Any
) -> Trace:
    config = PrecisionConfig(target_dtype="float16", device="GPU")
    found = FunctionRemarks(
        name=name, target_dtype="float16", device="GPU", total_nodes=9, remarks=remarks
    )
    settings = {"reason": "float16 on GPU", "list_edits": []}
    state = {"scale": 1024.0, "skipped_steps": 1}
    status = {"loss_scale": {"loss_scales": [{"name": "scale", "state": state}]}}
    skip = {"event": "skipped", "loss_scale": 0, "name": "scale", "steps": 1, "from": 1.0}
    culprit = {"kind": "NaN", "gradient": "dense/kernel"}
    events = tuple({**skip, **culprit, "step": step, "to": 2.0**-step} for step in range(4))
    graph = TracedGraph(found, config, GraphDef)
    return Trace("train.py", {"settings": settings, **process}, status, (graph,), events)


def made(*traces: Trace) -> str:
    change = Change("Exp, denied", "VARIABLE", f"Exp{HOSTILE}", HOSTILE, op="Exp")
    blocker = Blocker(change, products=1, flops=1000, casts=-2, cast_bytes=-8192)
    left = Change(f"Sum{HOSTILE}, denied", "VARIABLE", "Sum", HOSTILE, op="Sum")
    return page([(job, Search((blocker,), (left,))) for job in jobs_of(traces)])


def data_of(text: str) -> dict[str, Any]:
    (packed,) = re.findall(r'id="data">([^<]*)<', text)
    return dict(json.loads(gzip.decompress(base64.b64decode(packed))))


class Tags(html.parser.HTMLParser):
    """Counts start tags and collects what they load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.policies: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [v for k, v in attrs if k in ("src", "href") and v and v[0] != "#"]
        self.policies += [v for k, v in attrs if k == "content" and v and "default-src" in v]


def test_names_are_text_and_nothing_is_loaded() -> None:
    text = made(trace_of(name=HOSTILE, script=HOSTILE))
    tags = Tags()
    tags.feed(text)
    assert (tags.tags.count("script"), tags.tags.count("img")) == (2, 0)
    assert tags.loaded == ["data:,"]
    assert "{{ 7 * 7 }}" in text
    assert "1 more candidate was not tried" in text
    (policy,) = tags.policies
    assert policy.startswith("default-src 'none'; ")


def test_every_remark_comes_back_from_the_columns() -> None:
    data = data_of(made(trace_of()))
    strings, scopes, rows = data["strings"], data["scopes"], data["rows"]

    def name(row: int) -> str:
        steps, scope = [strings[rows["label"][row]]] if rows["label"][row] >= 0 else [], 0
        scope = rows["scope"][row]
        while scopes["parent"][scope] >= 0:
            steps.insert(0, strings[scopes["label"][scope]])
            scope = scopes["parent"][scope]
        return "/".join(steps)

    expected = [("body()/" if r.function else "") + r.node for r in REMARKS]
    assert [name(row) for row in range(len(REMARKS))] == expected
    assert [data["kinds"][kind] for kind in rows["kind"]] == [r.kind for r in REMARKS]
    assert rows["flops"] == [r.flops for r in REMARKS]
    assert rows["bytes"] == [r.bytes for r in REMARKS]


def test_a_large_graph_makes_a_small_page() -> None:
    remarks = tuple(
        product(f"model/block_{i // 100}/layer_{i % 100}/MatMul", path=("a", f"b{i}"))
        for i in range(100_000)
    )
    assert len(made(trace_of(remarks))) < 15e6


def test_without_anything_decided_there_is_a_page() -> None:
    text = page([(job, None) for job in jobs_of([trace_of(())])])
    assert "No function has a matrix product" in text
    assert "--quick" in text


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Callable[..., Any]:
    """Opens a page, and waits until it can be used."""
    from selenium.webdriver.support.wait import WebDriverWait

    def open_page(*traces: Trace) -> Any:
        (tmp_path / "page.html").write_text(made(*traces))
        browser.get((tmp_path / "page.html").as_uri())
        WebDriverWait(browser, 30).until(
            lambda b: b.execute_script("return document.documentElement.dataset.ready")
        )
        return browser

    return open_page


def text_of(browser: Any, selector: str) -> str:
    # What is folded away has text too.
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('|')"
    return str(browser.execute_script(script, selector))


def wait_for(browser: Any, selector: str, said: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 10).until(lambda b: said in text_of(b, selector))


def click(browser: Any, selector: str) -> Any:
    """Clicks what may be under the header otherwise."""
    found = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    found.click()
    return found


def test_a_click_through(opened: Callable[..., Any]) -> None:
    browser = opened(trace_of())
    find = lambda selector: browser.find_element("css selector", selector)  # noqa: E731
    assert "2 of 3" in text_of(browser, ".headline")
    assert "60: no multiple of 8" in text_of(browser, "main")
    assert "scale 1024" in text_of(browser, "main")
    assert "4 skipped steps" in text_of(browser, "main")
    assert find(".course").size["height"] > 20
    # The tree: the one scope at the top is open, and has its scopes inside.
    assert "net|33%, 1 of 3 low" in text_of(browser, "#tree .name, #tree .told")
    assert "dense_1" not in text_of(browser, "#tree")
    click(browser, "#tree summary")
    wait_for(browser, "#tree", "dense_1")
    # The table: search, a filter, details.
    assert "8 remarks" in text_of(browser, "#found")
    find("#search").send_keys("elu model")
    wait_for(browser, "#found", "No remark fits")
    find("#search").clear()
    find("#search").send_keys("Elu")
    wait_for(browser, "#found", "1 to 1 of 1 remark")
    button = click(browser, "#table tbody button")
    assert button.get_attribute("aria-expanded") == "true"
    assert "net/Exp|net/Elu" in text_of(browser, "#table li")
    button.click()
    assert not text_of(browser, "#table li")
    # From the table of products to the nodes.
    click(browser, "[data-search='MatMul']")
    wait_for(browser, "#found", "3 remarks")
    find("#of-kind").send_keys("float32")
    wait_for(browser, "#found", "1 remark")
    assert "model.py:42" in text_of(browser, "#table tbody")


def test_hostile_names_run_nothing(opened: Callable[..., Any]) -> None:
    browser = opened(trace_of(name=HOSTILE, script=HOSTILE))
    browser.execute_script(
        "window.alert = () => { window.ran = true };"
        "document.querySelectorAll('#tree details').forEach(one => { one.open = true })"
    )
    for row in range(1, 1 + len(REMARKS)):  # details of one are a row too
        click(browser, f"#table tbody tr:nth-child({2 * row - 1}) button")
    assert HOSTILE in text_of(browser, "#table tbody")
    assert HOSTILE in text_of(browser, ".paste code")
    assert browser.execute_script("return document.images.length") == 0
    assert not browser.execute_script("return window.ran")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_keyboard_reaches_everything(opened: Callable[..., Any]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser = opened(trace_of())
    reached = []
    for _ in range(60):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.append(browser.execute_script("return document.activeElement.outerHTML"))
    for tag in ('class="skip"', "data-graph", "data-copy", "<summary", "tree-graph", "<input"):
        assert any(tag in element[:200] for element in reached), tag
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('button, select, input, summary')]"
        ".filter(e => !(e.textContent.trim() || e.closest('label'))).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize("width", [320, 390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen_with_contrast(
    opened: Callable[..., Any], width: int, scheme: str
) -> None:
    browser = opened(trace_of())
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width

    def luminance(selector: str, what: str) -> float:
        colour = browser.execute_script(
            "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]",
            selector, what,
        )  # fmt: skip
        channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    paper = luminance("body", "backgroundColor")
    for selector in ("body", ".quiet", ".link", "nav a"):
        dark, light = sorted((paper, luminance(selector, "color")))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, selector


def test_a_large_scope_comes_in_parts(opened: Callable[..., Any]) -> None:
    browser = opened(trace_of(tuple(product(f"net/{i}") for i in range(MANY))))
    assert len(browser.find_elements("css selector", "#tree li")) < 300
    assert len(browser.find_elements("css selector", "#table tbody tr")) == 50
    browser.execute_script("document.querySelector('#tree ul ul > li > button').click()")
    assert len(browser.find_elements("css selector", "#tree li")) > 300
    browser.execute_script("document.querySelector('#after').click()")
    wait_for(browser, "#found", "51 to 100 of 30,000")


def test_what_was_planned_again_for_its_calls_counts_alone() -> None:
    assumed, seen = trace_of(REMARKS), trace_of(REMARKS[:1], name="step (fit), sizes near 256")
    both = dataclasses.replace(assumed, graphs=(*assumed.graphs, *seen.graphs))
    assert in_force(both.graphs) == [*seen.graphs]
    assert in_force(assumed.graphs) == [*assumed.graphs]
    after, alone = (
        made(trace).split('<dl class="headline">')[1].split("</dl>")[0] for trace in (both, seen)
    )
    assert after == alone


def test_ranks_number_functions_for_themselves() -> None:
    inner = [dataclasses.replace(REMARKS[0], function=f"body_{number}") for number in (17, 23)]
    ranks = [trace_of([r], rank=f"worker {n}", script="t") for n, r in enumerate(inner)]
    (job,) = jobs_of(ranks)
    (function,) = job.functions
    assert function.ranks == ()


def test_ranks_of_a_job_are_one() -> None:
    ranks = [trace_of(rank=f"worker {n}", script="train.py") for n in (1, 0)]
    other = trace_of(REMARKS[:1], name="evaluate", rank="worker 2", script="train.py")
    (job,) = jobs_of([*ranks, other])
    assert [trace.rank for trace in job.traces] == ["worker 0", "worker 1", "worker 2"]
    assert [(f.graph.remarks.name, f.ranks) for f in job.functions] == [
        ("step (fit)", ("worker 0", "worker 1")),
        ("evaluate", ("worker 2",)),
    ]
    # A rank that comes again is the next start.
    assert len(jobs_of([*ranks, *ranks])) == 2
    assert len(jobs_of([trace_of(), trace_of()])) == 2
    assert "3 ranks: worker 0, worker 1, worker 2" in made(*ranks, other)
