"""The page: complete in itself, honest about what the runs are called, readable without its script."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.report import compare
from megatron_kd.report.page_chart import label_lines, spread, ticks
from tests.unit.report_runs import write_run

EVALUATIONS = ((0, 9.0), (1, 8.0), (2, 6.0), (4, 4.5))
LOADS = {"src", "srcset", "href", "xlink:href", "action", "data", "poster", "background"}
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Every element with its attributes, the text of the page and of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.scripts.append(data)
        elif data.strip():
            self.words.append(data.strip())

    def with_tag(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Page]:
    """A comparison of three runs, one of which has a name that must not become markup."""
    folder = tmp_path_factory.mktemp("page")
    online = write_run(folder / "online", recipe="smollm2_cpu_online", evaluations=EVALUATIONS)
    offline = write_run(folder / "offline", evaluations=((0, 9.0), (1, 7.0), (2, 5.0), (4, 4.25)))
    evil = write_run(folder / "x", "seed=5", "optimizer.lr=0.5", "name=evil", evaluations=EVALUATIONS)
    recipe = (evil / "recipe.yaml").read_text()  # a recipe may have been written by anything
    (evil / "recipe.yaml").write_text(recipe.replace("name: evil", "name: '</script><b>run'", 1))
    found = compare([online, offline, evil], folder / "out")
    return found.to_json(), Page(found.page.read_text(encoding="utf-8"))


def test_nothing_is_loaded_from_elsewhere(made: tuple[dict[str, Any], Page]) -> None:
    _, page = made
    assert not [(tag, name) for tag, attributes in page.elements for name in attributes if name in LOADS]
    assert not page.with_tag("link") and not page.with_tag("iframe") and not page.with_tag("img")
    text = "".join(page.scripts)
    assert "@import" not in text and "url(" not in text and "fetch(" not in text
    assert text.count("http") == 1, "the name of SVG's elements"


def test_figures_stand_in_the_page(made: tuple[dict[str, Any], Page]) -> None:
    found, page = made
    text = " ".join(page.words)
    assert found["target"] == {"kl": 4.5, "basis": "held-out evaluations"}
    for words in ("9.00 → 4.50 (2.0× lower)", "9.00 → 4.25", "1.90 GiB", "3.50 s", "teacher.mode", "optimizer.lr"):
        assert words in text
    assert "rank-hours to KL 4.50" in text and "a lower bound of the whole one" in text
    assert "held-out evaluations" in text and "unigram model, held-out: 5.00" in text
    data = json.loads(next(script for script in page.scripts if script.startswith("{")))
    assert data["labels"] == [run["label"] for run in found["runs"]] and data["curves"] == found["curves"]
    assert data["curves"][0]["train"]["kd"] == [8.0, 6.0, 5.0, 4.0]


def test_names_are_text(made: tuple[dict[str, Any], Page]) -> None:
    found, page = made
    assert found["runs"][2]["label"] == "</script><b>run"
    assert "</script><b>run" in page.words and not page.with_tag("b")


def test_it_can_be_read_aloud_and_by_keyboard(made: tuple[dict[str, Any], Page]) -> None:
    _, page = made
    assert page.with_tag("html") == [{"lang": "en"}]
    drawings = page.with_tag("svg")
    assert len(drawings) == 2 and all(drawing["role"] == "img" for drawing in drawings)
    assert all("ends at 4.00" in str(drawing["aria-label"]) for drawing in drawings)
    charts = [attributes for attributes in page.with_tag("figure") if "data-chart" in attributes]
    assert [chart["tabindex"] for chart in charts] == ["0", "0"] and all(chart["aria-label"] for chart in charts)
    assert [key["aria-pressed"] for key in page.with_tag("button")] == ["true"] * 3
    assert len(page.with_tag("caption")) == len(page.with_tag("table")) == 2
    assert {head["scope"] for head in page.with_tag("th")} == {"row", "col"}
    assert any(meta.get("content") == "light dark" for meta in page.with_tag("meta"))


def test_a_run_without_figures(tmp_path: Path) -> None:
    fresh = write_run(tmp_path / "fresh", kd=(), evaluations=())
    (fresh / "metrics.jsonl").unlink()
    page = Page(compare([fresh], tmp_path / "out").page.read_text(encoding="utf-8"))
    assert page.words.count("not recorded") == 4 and not page.with_tag("svg")
    assert any("metrics.jsonl is missing" in words for words in page.words)


def test_many_runs(tmp_path: Path) -> None:
    count = 30
    runs = [write_run(tmp_path / f"run_{index}", f"name=run_{index}", "seed=1") for index in range(count)]
    page = Page(compare(runs, tmp_path / "out").page.read_text(encoding="utf-8"))
    assert len(page.with_tag("button")) == count
    looks = {
        (str(line["stroke-dasharray"]), str(group["class"]))
        for line, group in zip(
            [a for a in page.with_tag("path") if a.get("class") == "line"][:count],
            [a for a in page.with_tag("g") if "data-run" in a][:count],
            strict=True,
        )
    }
    assert len(looks) == min(count, 28), "colours and dashes together tell runs apart"


@pytest.mark.parametrize(
    ("largest", "expected"), [(10.4, [0, 2, 4, 6, 8, 10]), (0.0431, [0, 0.01, 0.02, 0.03, 0.04]), (0.0, [0.0])]
)
def test_ticks_are_round(largest: float, expected: list[float]) -> None:
    assert ticks(largest) == pytest.approx(expected)


def test_labels_keep_their_distance() -> None:
    places = spread([100.0, 101.0, 102.0, 250.0], [14.0] * 4)
    assert places == [87.0, 101.0, 115.0, 250.0]
    crowded = spread([330.0] * 4, [14.0] * 4)
    assert crowded[-1] <= 340 - 7 and [b - a for a, b in pairwise(crowded)] == [14.0] * 3
    assert spread([], []) == []
    assert label_lines("offline forward-chunked, TP 3 + SP") == ["offline", "forward-chunked,…"]
    assert label_lines("x" * 30) == ["x" * 17 + "…"]
