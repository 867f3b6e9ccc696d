"""Scores of the harness: against our own log-likelihoods and greedy answers, and what is made of two models' scores."""

from __future__ import annotations

import json
import math
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megatron_kd.errors import ConfigError, DataError
from megatron_kd.report.evaluation_text import task_scores_text
from megatron_kd.training import tasks_job
from megatron_kd.training.task_scores import TaskSettings, load_tasks, score, score_rows
from tests.assets import ROOT, tiny_llama_folder

pytestmark = pytest.mark.skipif(
    util.find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is not installed: pip install 'megatron-kd[tasks]'",
)

CHOICE = [json.loads(line) for line in (ROOT / "tests/tasks/kd_choice.jsonl").read_text().splitlines()]
PROMPTS = ("The first", "A value is", "It has no", "Names are", "This one")
LENGTH = 4


class Oracle:
    """A folder as transformers alone sees it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def loglikelihood(self, context: str, continuation: str) -> float:
        """Σ log p of the tokens of the continuation behind those of the context, in float64."""
        before = self.tokenizer(context).input_ids
        whole = torch.tensor([self.tokenizer(context + continuation).input_ids])
        logs = self.model(whole).logits[0].double().log_softmax(dim=1)
        return sum(float(logs[place - 1, whole[0, place]]) for place in range(len(before), whole.shape[1]))

    @torch.no_grad()
    def greedy(self, prompt: str) -> str:
        """The likeliest token, ``LENGTH`` times."""
        ids = self.tokenizer(prompt).input_ids
        start = len(ids)
        for _ in range(LENGTH):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return str(self.tokenizer.decode(ids[start:]))


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two models on the shipped multiple choice, and on free answers half of which the first model gives itself."""
    import datasets

    folder = tmp_path_factory.mktemp("tasks")
    models = [tiny_llama_folder(untied) for untied in (True, False)]
    oracles = [Oracle(model) for model in models]
    answers = [oracles[0].greedy(prompt) if number % 2 else "nothing" for number, prompt in enumerate(PROMPTS)]
    items = [{"question": prompt, "answer": answer} for prompt, answer in zip(PROMPTS, answers, strict=True)]
    (folder / "free.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    free = yaml.safe_load((ROOT / "tests/tasks/kd_generate.yaml").read_text())
    free |= {
        "task": "kd_free",
        "doc_to_text": "{{question}}",
        "dataset_kwargs": {"data_files": str(folder / "free.jsonl")},
    }
    free |= {"test_split": "train", "generation_kwargs": {"until": ["<|end|>"], "max_gen_toks": LENGTH}}
    (folder / "free.yaml").write_text(yaml.safe_dump(free))
    choice = yaml.safe_load((ROOT / "tests/tasks/kd_choice.yaml").read_text())
    choice["dataset_kwargs"] = {"data_files": {"test": str(ROOT / "tests/tasks/kd_choice.jsonl")}}
    (folder / "choice.yaml").write_text(yaml.safe_dump(choice))
    settings = TaskSettings(("kd_choice", "kd_free"), include_path=folder, batch_size=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        tasks = load_tasks(settings)
        results = [score(model, tasks, settings) for model in models]
    rows = score_rows(results[1], results[0], settings)  # the first is the teacher
    return {
        "results": results,
        "oracles": oracles,
        "answers": answers,
        "rows": {(r["task"], r["metric"]): r for r in rows},
    }


@pytest.mark.parametrize("which", [0, 1])
def test_loglikelihoods_are_our_own(scored: dict[str, Any], which: int) -> None:
    oracle, samples = scored["oracles"][which], scored["results"][which]["samples"]["kd_choice"]
    assert len(samples) == len(CHOICE)
    right = []
    for sample in samples:
        item = CHOICE[sample["doc_id"]]
        ours = [oracle.loglikelihood(item["question"], f" {choice}") for choice in item["choices"]]
        theirs = [response[0][0] for response in sample["resps"]]
        assert theirs == pytest.approx(ours, rel=1e-5)
        assert sample["acc"] == float(int(np.argmax(ours)) == item["answer"])
        right.append(sample["acc"])
    row = scored["rows"]["kd_choice", "acc"]
    assert row["teacher" if which == 0 else "student"] == pytest.approx(sum(right) / len(right))


def test_greedy_answers_are_our_own(scored: dict[str, Any]) -> None:
    row = scored["rows"]["kd_free", "exact_match"]
    for which, whose in enumerate(("teacher", "student")):
        oracle = scored["oracles"][which]
        right = [oracle.greedy(p) == answer for p, answer in zip(PROMPTS, scored["answers"], strict=True)]
        assert row[whose] == pytest.approx(sum(right) / len(right))
    assert row["teacher"] == pytest.approx(2 / 5)


def test_a_row_has_both_scores_and_the_error_of_their_difference(scored: dict[str, Any]) -> None:
    results, row = scored["results"], scored["rows"]["kd_choice", "acc"]
    teacher, student = (np.array([s["acc"] for s in run["samples"]["kd_choice"]]) for run in results)
    assert row["items"] == len(CHOICE) and row["num_fewshot"] == 0 and row["limit"] is None
    assert row["difference"] == pytest.approx(student.mean() - teacher.mean())
    assert row["difference_stderr"] == pytest.approx((student - teacher).std(ddof=1) / math.sqrt(len(CHOICE)))
    assert row["student_stderr"] == pytest.approx(student.std(ddof=1) / math.sqrt(len(CHOICE)))
    text = task_scores_text(list(scored["rows"].values()))
    assert len(text.splitlines()) == 1 + len(scored["rows"]) == 4
    assert f"{row['difference']:+.4f}" in text


def test_the_student_alone(scored: dict[str, Any]) -> None:
    rows = score_rows(scored["results"][1], None, TaskSettings(("kd_choice", "kd_free")))
    assert {row["student"] for row in rows} == {row["student"] for row in scored["rows"].values()}
    assert all(row[key] is None for row in rows for key in ("teacher", "difference", "difference_stderr"))


def test_groups_have_the_root_of_the_sum_of_squares() -> None:
    def of(value: float) -> dict[str, Any]:
        scores = {"acc,none": value, "acc_stderr,none": 0.03, "alias": "group"}
        return {
            "results": {"group": scores},
            "group_subtasks": {"group": ["inner"], "inner": ["a", "b"]},
            "n-samples": {"a": {"effective": 3}, "b": {"effective": 4}},
        }

    [row] = score_rows(of(0.5), of(0.7), TaskSettings(("group",)))
    assert row["items"] == 7 and row["difference"] == pytest.approx(-0.2)
    assert row["difference_stderr"] == pytest.approx(0.03 * math.sqrt(2))


def test_what_cannot_be_asked_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.tasks

    # Its own files are thousands, which takes seconds to look through.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
    with pytest.raises(ConfigError, match=r"'kd_choise', which .* did you mean kd_choice"):
        load_tasks(TaskSettings(("kd_choise",), include_path=ROOT / "tests/tasks"))
    with pytest.raises(ConfigError, match="is no folder"):
        load_tasks(TaskSettings(("boolq",), include_path=tmp_path / "none"))
    broken = {
        "task": "kd_broken",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "none.jsonl")},
    }
    (tmp_path / "broken.yaml").write_text(
        yaml.safe_dump({**broken, "test_split": "train", "output_type": "multiple_choice"})
    )
    with pytest.raises(DataError, match=r"data of task 'kd_broken' cannot be read .*huggingface.co.*--include-path"):
        load_tasks(TaskSettings(("kd_broken",), include_path=tmp_path))
    monkeypatch.setattr("megatron_kd.training.task_scores.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron-kd\[tasks\]'"):
        load_tasks(TaskSettings(("boolq",)))


def test_scores_of_other_tasks_stay(tmp_path: Path) -> None:
    def written(*scores: tuple[str, float]) -> list[tuple[str, float]]:
        rows = [{"task": task, "metric": "acc", "student": value} for task, value in scores]
        tasks_job._write(tmp_path, {"iteration": 4, "tokens": 9, "scores": rows})
        kept = json.loads(tasks_job.tasks_path(tmp_path, 4).read_text())
        return [(row["task"], row["student"]) for row in kept["scores"]]

    assert written(("a", 0.1), ("b", 0.2)) == [("a", 0.1), ("b", 0.2)]
    assert written(("b", 0.3), ("c", 0.4)) == [("a", 0.1), ("b", 0.3), ("c", 0.4)]
