"""The page of a comparison: its figures, what a browser shows, what no name can do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tf_amp.comparison.compare import Comparison
from tf_amp.comparison.output_figures import OutputFigures
from tf_amp.comparison.page import page

HOSTILE = "</script><img src=x onerror=alert(1)><!--{{ 7 * 7 }}"


def figures(name: str, relative: float, **fields: Any) -> OutputFigures:
    return OutputFigures(
        **{
            "signature": "serve",
            "name": name,
            "values": 8,
            "max_abs": 2 * relative,
            "max_relative": relative,
            "cosine": 0.99,
            "overflowed": 0.0,
            "flushed": 0.25,
            **fields,
        }
    )


INSIDE = (
    figures("a/MatMul", 1e-4, op="MatMul"),
    figures("b/Conv2D", 1e-2, op="Conv2D"),
    figures("c/MatMul", 0.0, op="MatMul"),
    figures(HOSTILE, 3e-3, op=HOSTILE, overflowed=0.5),
)
FOUND = Comparison(
    outputs=(
        figures("y", 0.012, top_1=0.975, top_k=0.9),
        figures(HOSTILE, math.nan, max_abs=math.nan, top_1=1.0),
    ),
    samples=3,
    seconds={"serve": (0.02, 0.01)},
    bytes=(8_000_000, 4_100_000),
    memory=(91_000_000, 55_500_000),
    boundaries=INSIDE,
    boundaries_alone=2,
)


def test_figures_are_told() -> None:
    text = page(FOUND, "model", "low", 0.011)
    for told in (
        "Beyond the tolerance of 0.011",
        "serve/y",
        "97.5 %",
        "2.00",
        "8,000,000",
        "91.0 MB of memory",
        "25.00",
    ):
        assert told in text, told
    assert "All outputs are within the tolerance of 0.02." in page(FOUND, "model", "low", 0.02)
    assert "tolerance" not in page(FOUND, "model", "low")
    assert "<img" not in text and "{{ 7 * 7 }}" in text
    assert "<script" not in text


@pytest.mark.parametrize(
    "found",
    [
        dataclasses.replace(FOUND, boundaries=(), boundaries_alone=0, seconds={}),
        dataclasses.replace(FOUND, outputs=(), boundaries=(figures("x", 0.0),)),
        dataclasses.replace(FOUND, boundaries=(figures("x", math.inf), figures("y", math.nan))),
    ],
    ids=["nothing inside", "no error", "no numbers"],
)
def test_what_is_missing_makes_a_page_too(found: Comparison) -> None:
    text = page(found, "model", "low")
    assert ("<svg" in text) == bool(found.boundaries)
    assert text.rstrip().endswith("</html>")


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Callable[..., Any]:
    """Opens a page."""

    def open_page(found: Comparison = FOUND, tolerance: float | None = 0.02) -> Any:
        (tmp_path / "page.html").write_text(page(found, "model", HOSTILE, tolerance))
        browser.get((tmp_path / "page.html").as_uri())
        return browser

    return open_page


def test_bars_grow_with_the_error(opened: Callable[..., Any]) -> None:
    browser = opened()
    boxes = [
        browser.execute_script("return arguments[0].getBoundingClientRect().height", bar)
        for bar in browser.find_elements("css selector", ".bars rect")
    ]
    full = browser.execute_script(
        "return document.querySelector('.bars svg').getBoundingClientRect().height"
    )
    # From 1e-4 to 1e-1 are three powers of ten; the last one overflowed.
    assert boxes[0] == pytest.approx(0.01 * full, rel=0.1)
    assert boxes[1] == pytest.approx(2 / 3 * full, rel=0.02)
    assert boxes[2] == 0
    assert boxes[3] == pytest.approx(full, rel=0.02)
    ticks = [e.text for e in browser.find_elements("css selector", ".bars li")]
    assert ticks == ["0.1", "0.01", "0.001", "0.0001"]


def test_hostile_names_are_text(opened: Callable[..., Any]) -> None:
    browser = opened()
    assert HOSTILE in browser.find_element("css selector", "h1").text
    browser.find_element("css selector", "summary").click()
    assert HOSTILE in browser.find_element("css selector", "details tbody").text
    assert browser.execute_script("return document.images.length") == 0
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("width", [320, 1200])
def test_it_fits_every_screen(opened: Callable[..., Any], width: int) -> None:
    browser = opened()
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.find_element("css selector", "summary").click()
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
