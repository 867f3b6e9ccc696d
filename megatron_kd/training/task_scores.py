"""Scores of public tasks by lm-evaluation-harness, for one model after the other.

The harness is an optional package: this module imports it within functions only.
"""

from __future__ import annotations

import difflib
import gc
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from megatron_kd.device import current_device
from megatron_kd.errors import ConfigError, DataError
from megatron_kd.models.checkpoint_files import one_line

INSTALL = "pip install 'megatron-kd[tasks]'"
BOOTSTRAP_ITERS = 1000
"""Resamplings for the standard error of metrics that are no means; those of means are computed."""
_SEED = 1234  # which examples stand in a prompt with shots: the harness's own default


@dataclass(frozen=True)
class TaskSettings:
    """What is asked, and how.

    Attributes:
        names: tasks, groups and tags of the harness, or of YAML files in ``include_path``.
        limit: items of each task; None: all.
        fewshot: examples in each prompt; None: as each task has it.
        batch_size: rows of a forward pass.
        chat_template: prompts as the user's turn of the tokenizer's template.
        spread: each model over all GPUs of this machine.
    """

    names: tuple[str, ...]
    limit: int | None = None
    include_path: Path | None = None
    fewshot: int | None = None
    batch_size: int = 8
    chat_template: bool = False
    spread: bool = False


def require_harness() -> None:
    """Raises ConfigError, with the line that installs it, where the harness is missing."""
    if util.find_spec("lm_eval") is None:
        raise ConfigError(f"--tasks needs lm-evaluation-harness, which is not installed: {INSTALL}")


def load_tasks(settings: TaskSettings) -> Any:
    """The tasks with their data sets, as the harness wants them.

    Raises:
        ConfigError: no such task, a folder that is not there, or the harness is missing.
        DataError: a data set cannot be read; public ones are fetched over the network.
    """
    require_harness()
    if settings.include_path is not None and not settings.include_path.is_dir():
        raise ConfigError(f"--include-path {settings.include_path} is no folder: give one with YAML files of tasks")
    for name in ("lm_eval", "datasets", "evaluate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    manager = None
    if settings.include_path is not None:
        # Looking through the harness's own thousands of files takes seconds; a group may name tasks of theirs.
        manager = TaskManager(include_path=str(settings.include_path), include_defaults=False)
    if manager is None or not set(settings.names) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=None if settings.include_path is None else str(settings.include_path))
    for name in settings.names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "lm-eval ls tasks lists all names"
            raise ConfigError(f"--tasks has {name!r}, which lm-evaluation-harness does not know: {hint}")
        try:
            manager.load([name])
        except Exception as error:  # of the harness, its data sets and the network: anything
            raise DataError(
                f"the data of task {name!r} cannot be read ({one_line(error)}): public sets are fetched from "
                "huggingface.co; without a network copy them into HF_HOME before, or give tasks of your own with "
                "--include-path"
            ) from error
    try:
        return manager.load(list(settings.names))
    except ValueError as error:
        raise ConfigError(f"--tasks {','.join(settings.names)}: {one_line(error)}: name each task once") from error


def score(model: Path, tasks: Any, settings: TaskSettings) -> dict[str, Any]:
    """The harness's results for a Hugging Face folder, or a GGUF file, on this process's device.

    Raises:
        DataError: the harness failed on a task.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    source: dict[str, Any] = {"pretrained": str(model)}
    if model.is_file():
        source = {"pretrained": str(model.parent), "gguf_file": model.name, "tokenizer": _gguf_tokenizer(model)}
    for task in tasks["tasks"].values():
        if settings.fewshot is not None:
            task.set_config(key="num_fewshot", value=settings.fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_SEED)
    lm = HFLM(
        **source,
        device=str(current_device()),
        dtype="auto",
        batch_size=settings.batch_size,
        parallelize=settings.spread,
        trust_remote_code=False,
    )
    try:
        results: dict[str, Any] = evaluate(
            lm=lm,
            task_dict=tasks,
            limit=settings.limit,
            bootstrap_iters=BOOTSTRAP_ITERS,
            log_samples=True,
            apply_chat_template=settings.chat_template,
            fewshot_as_multiturn=settings.chat_template,
        )
    finally:
        del lm
        gc.collect()  # the next model needs the memory
    return results


def _gguf_tokenizer(file: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def score_rows(
    student: Mapping[str, Any], teacher: Mapping[str, Any] | None, settings: TaskSettings
) -> list[dict[str, Any]]:
    """One row for each task (or group) and metric: both scores, and the student's less the teacher's.

    Both answered the same items, so the standard error of the difference is that of the items' differences,
    s/√n; where the harness keeps no score of each item (groups, metrics that are no means) it is √(a² + b²) of
    the two errors, which is too large for models that err on the same items.
    """
    rows = []
    for task, scores in student["results"].items():
        for key, value in scores.items():
            metric, comma, filter_ = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            theirs = None if teacher is None else teacher["results"][task].get(key)
            errors = [
                _number(run["results"][task].get(f"{metric}_stderr,{filter_}")) if run is not None else None
                for run in (student, teacher)
            ]
            rows.append(
                {
                    "task": task,
                    "metric": metric if filter_ == "none" else f"{metric} ({filter_})",
                    "items": _items(student, task),
                    "limit": settings.limit,
                    "num_fewshot": _shots(student, task),
                    "chat_template": settings.chat_template,
                    "teacher": theirs,
                    "teacher_stderr": errors[1],
                    "student": float(value),
                    "student_stderr": errors[0],
                    "difference": None if theirs is None else value - theirs,
                    "difference_stderr": (
                        None if teacher is None else _paired_error(student, teacher, task, metric, filter_, errors)
                    ),
                }
            )
    return rows


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _items(results: Mapping[str, Any], task: str) -> int | None:
    """How many items were asked; of a group, over its tasks."""
    counts = results.get("n-samples", {})
    names = [task] if task in counts else _leaves(results, task)
    return sum(counts[name]["effective"] for name in names) if names else None


def _leaves(results: Mapping[str, Any], group: str) -> list[str]:
    found: list[str] = []
    for name in results.get("group_subtasks", {}).get(group, []):
        found += [name] if name in results["n-samples"] else _leaves(results, name)
    return found


def _shots(results: Mapping[str, Any], task: str) -> int | None:
    value = results.get("n-shot", {}).get(task)
    return value if isinstance(value, int) else None


def _paired_error(
    student: Mapping[str, Any],
    teacher: Mapping[str, Any],
    task: str,
    metric: str,
    filter_: str,
    errors: Sequence[float | None],
) -> float | None:
    per_item = [_per_item(run, task, metric, filter_) for run in (student, teacher)]
    if all(per_item) and per_item[0].keys() == per_item[1].keys() and len(per_item[0]) > 1:
        differences = [value - per_item[1][item] for item, value in per_item[0].items()]
        mean = math.fsum(differences) / len(differences)
        variance = math.fsum((value - mean) ** 2 for value in differences) / (len(differences) - 1)
        return math.sqrt(variance / len(differences))
    known = [error for error in errors if error is not None]
    return math.hypot(*known) if len(known) == 2 else None


def _per_item(results: Mapping[str, Any], task: str, metric: str, filter_: str) -> dict[int, float]:
    """The score of each item by its number; empty where one is no number."""
    samples = [item for item in results.get("samples", {}).get(task, []) if item["filter"] == filter_]
    scores = {item["doc_id"]: item.get(metric) for item in samples}
    numbers = {key: float(value) for key, value in scores.items() if isinstance(value, int | float)}
    return numbers if len(numbers) == len(scores) else {}
