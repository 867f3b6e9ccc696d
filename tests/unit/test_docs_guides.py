"""The guides: what they tell people to type exists, what they quote is said, what they plan is planned."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from megatron_kd.config import load_recipe
from megatron_kd.data.corpus import read_documents
from megatron_kd.planning.efficiency import GIB
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.plan import Plan, plan_recipe
from megatron_kd.planning.recomputation import Recomputation
from megatron_kd.planning.suggest import suggest
from megatron_kd.planning.text import describe, layout_words
from tests.assets import ROOT
from tests.unit.typed_commands import (
    SCRIPT,
    blocks,
    check_command,
    check_script,
    commands,
    lines,
    pages,
)

GUIDES = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("first_day", "first_week", "scaling", "ablations")}
README = (ROOT / "README.md").read_text()
TROUBLES = (ROOT / "docs/troubleshooting.md").read_text()
WRITTEN = ("recipes/mine.yaml", "recipes/first_try.yaml")


@pytest.mark.parametrize("page", GUIDES)
def test_commands_exist_and_take_what_is_shown(page: str) -> None:
    found = commands(GUIDES[page])
    assert found
    for line in found:
        check_command(line, WRITTEN)


@pytest.mark.parametrize("page", [*GUIDES, "README", "recipes"])
def test_scripts_take_what_is_shown(page: str) -> None:
    if page == "recipes":  # their headers: one line each, continued ones joined
        text = "\n".join(path.read_text() for path in (ROOT / "recipes").rglob("*.yaml")).replace("\\\n#", "")
        found = [line.lstrip("# ") for line in text.splitlines() if re.match(r"#\s+(sbatch|launch)", line)]
    else:
        text = GUIDES.get(page, README)
        found = [line for line in lines(text) if SCRIPT.search(line)]
    assert found
    for line in found:
        check_script(line, WRITTEN)


def test_links_lead_to_files() -> None:
    for page in pages():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", ["first_day", "first_week"])
def test_the_recipe_to_write_loads_and_has_the_rows_it_trains_on(page: str, tmp_path: Path) -> None:
    [text] = blocks(GUIDES[page], "yaml")
    file = tmp_path / "mine.yaml"
    file.write_text(re.sub(r"^extends: ", f"extends: {ROOT}/recipes/", text))
    recipe = load_recipe(file)
    rows = recipe.training.train_iters * recipe.training.global_batch_size
    assert rows * recipe.data.seq_length <= (recipe.data.train_tokens or 0)
    assert f"recipes/{recipe.name}.yaml" in WRITTEN


def test_the_sweep_shown_is_the_one_shipped() -> None:
    [shown] = blocks(GUIDES["ablations"], "yaml")
    assert yaml.safe_load(shown) == yaml.safe_load((ROOT / "recipes/ablations/loss_function.yaml").read_text())


def test_parquet_becomes_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    (tmp_path / "data/parquet").mkdir(parents=True)
    texts = ["one\nline", 'zwölf "other" ones']
    parquet.write_table(pyarrow.table({"text": texts, "id": [1, 2]}), tmp_path / "data/parquet/part.parquet")
    monkeypatch.chdir(tmp_path)
    [snippet] = blocks(GUIDES["first_week"], "python")
    exec(snippet, {})
    assert list(read_documents("jsonl", ["data/corpus"])) == texts


def test_the_answer_shown_is_the_answer() -> None:
    [console] = blocks(GUIDES["first_day"], "console")
    line, answer = console.strip().split("\n")
    words = line.removeprefix("$ megatron-kd ").split()
    done = subprocess.run(
        [sys.executable, "-m", "megatron_kd", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == answer and done.returncode == 2


def test_the_plan_shown_is_the_plan() -> None:
    [quoted_plan] = [block for block in blocks(GUIDES["first_day"]) if "GPU-hours" in block]
    plan = planned("recipes/llama31_8b_to_3b_8k/offline_fused.yaml")
    assert describe(plan).rstrip().endswith(quoted_plan.rstrip())
    assert f"{plan.cache.bytes / 1e9:.0f} GB and {plan.capture_hours:.1f} GPU-hours" in GUIDES["first_week"]


@cache
def planned(*words: str) -> Plan:
    return plan_recipe(load_recipe(ROOT / words[0], words[1:]))


def shown(plan: Plan) -> list[str]:
    return [f"{plan.memory.total / GIB:.0f}", f"{plan.step.seconds:.1f} s"]


def table(name: str) -> list[list[str]]:
    found = re.search(rf"<!-- begin: {name} -->\n(.*?)<!-- end: {name} -->", GUIDES["scaling"], re.DOTALL)
    assert found is not None
    return [[cell.strip(" `") for cell in row.strip("|").split(" | ")] for row in found.group(1).splitlines()[2:]]


def test_planned_tables_are_the_plan_s() -> None:
    assert len(table("planned")) == 3
    for recipe, layout, memory, step, hours in table("planned"):
        plan = planned(f"recipes/{recipe.strip('` ')}")
        named = layout_words(Layout.of(plan.recipe), Recomputation.of(plan.recipe))
        assert [layout, memory, step, hours] == [named, *shown(plan), f"{plan.train_hours:.0f}"], recipe
    assert len(table("recomputation")) == 3
    for words, memory, step in table("recomputation"):
        extra = [] if words == "none" else words.split()
        plan = planned("recipes/gptoss20b_32k/offline_1node.yaml", *extra)
        assert [memory, step] == shown(plan), words
    plan = planned("recipes/gptoss20b_32k/offline_1node.yaml")
    assert f"{plan.capture_hours:.0f} GPU-hours by the plan" in GUIDES["scaling"]


def test_the_suggestion_for_h100_is_the_plan_s() -> None:
    recipe = load_recipe(ROOT / "recipes/gptoss20b_32k/offline_1node.yaml", ["cluster.gpu=h100"])
    assert " ".join(suggest(recipe)[0].overrides) in " ".join(GUIDES["scaling"].split())


def test_the_teacher_of_gpt_oss_takes_what_the_recipe_says() -> None:
    file = "recipes/gptoss20b_32k/offline_1node.yaml"
    held = []
    for ranks in (2, 8):
        words = ("teacher.mode=online", "teacher.cache=null", f"parallelism.expert_model_parallel_size={ranks}")
        held.append(planned(file, *words).memory.parts["teacher"] / GIB)
    assert (
        f"takes {held[0]:.0f} GiB of a GPU with its experts over two ranks, {held[1]:.0f} over eight"
        in (ROOT / file).read_text()
    )


def quoted() -> list[str]:
    """The messages of all tables but the last section's, which are other people's."""
    own = TROUBLES[: TROUBLES.index("## What others say")]
    rows = [row for row in own.splitlines() if row.startswith("| ") and not row.startswith("| message")]
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@cache
def said() -> list[str]:
    """All text in the sources: string literals with their values left out, and the lines of the job scripts."""
    found = []
    for path in (ROOT / "megatron_kd").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(_fixed(part) for part in node.values))
    for path in (ROOT / "launch").rglob("*.sh"):
        found += path.read_text().splitlines()
    return found


def _fixed(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "\0"


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_sources(message: str) -> None:
    parts = [part for part in (part.strip() for part in message.split("…")) if part]
    assert sum(map(len, parts)) >= 10, f"{message}: too little of it is fixed"
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    assert any(pattern.search(text) for text in said()), message
