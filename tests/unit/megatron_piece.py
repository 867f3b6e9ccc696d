"""A small real piece of Megatron-Core, run once for each CPU workaround left out: ``python -m … RESULTS.json``.

Megatron-Core is imported once, unpatched; every variant is a fork of that process, so that no patch of one reaches
another. Each reports how far it came: the stage that raised and the error, or the figures of a whole run.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVERYTHING = "all of them"
OWN_STATE = ", given its own state"
RECIPE: dict[str, Any] = {
    "name": "piece",
    "data": {"samples": "unused", "seq_length": 8},
    "teacher": {
        "mode": "online",
        "model": {
            "name": "piece",
            "num_layers": 2,
            "hidden_size": 16,
            "ffn_hidden_size": 24,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": 100,
            "max_position_embeddings": 16,
            "untie_embeddings_and_output_weights": False,
        },
    },
    "training": {"global_batch_size": 1, "micro_batch_size": 1, "train_iters": 10, "precision": "fp32"},
    "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "lr_warmup_iters": 1},
}


@dataclass
class Outcome:
    """How a variant ended.

    Attributes:
        stage: the last one begun.
        where: the functions of Megatron-Core that the error came through, outermost first.
    """

    stage: str = "start"
    error: str = ""
    where: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def run_piece(without: str, outcome: Outcome, folder: Path, *, own_state: bool) -> None:
    """Groups, a tied model, DDP, the distributed optimizer, two steps, a checkpoint and a step after loading it.

    Args:
        own_state: only two steps, between which the optimizer loads the state that it has itself.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_kd.config import ParallelismConfig, Recipe
    from megatron_kd.device.cpu_megatron import apply_cpu_workarounds
    from megatron_kd.models.build import build_model
    from megatron_kd.models.checkpoint import sharded_weights
    from megatron_kd.models.parallel import init_model_parallel
    from megatron_kd.training.setup import Student, wrap_for_training

    torch.set_num_threads(1)
    apply_cpu_workarounds(without=[] if without == EVERYTHING else [without])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)

    outcome.stage = "groups"
    layout = ParallelismConfig()
    groups = init_model_parallel(layout, seed=5)

    recipe = Recipe.model_validate(RECIPE)
    model = recipe.student.model
    tokens = torch.randint(0, model.vocab_size, (2, 8), generator=torch.Generator().manual_seed(3))

    def student() -> Student:
        outcome.stage = "model"
        built = build_model(model, layout, groups, "fp32", trainable=True)
        built.config.recompute_granularity = "full"
        built.config.recompute_method = "uniform"
        built.config.recompute_num_layers = 1
        outcome.stage = "optimizer"
        return wrap_for_training(recipe, groups, built)

    def step(student: Student) -> tuple[float, float]:
        def forward(source: Any, wrapped: Any) -> Any:
            losses = wrapped(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None, labels=tokens)
            count = torch.tensor(tokens.numel(), dtype=torch.int)
            return losses, lambda output: (output.sum(), count, {"loss": output.sum().detach() / count})

        outcome.stage = "step"
        student.model.zero_grad_buffer()
        student.optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(()),
            model=[student.model],
            num_microbatches=1,
            seq_length=8,
            micro_batch_size=2,
            forward_only=False,
            pg_collection=groups.collection,
        )
        outcome.stage = "update"
        updated, norm, _ = student.optimizer.step()
        assert updated
        student.scheduler.step(increment=1)
        return float(reported[0]["loss"]), float(norm)

    def state(student: Student, is_loading: bool) -> dict[str, Any]:
        weights = sharded_weights(student.model.module)
        sharding = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        optimizer = student.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=sharding)
        return {"model": weights, "optimizer": optimizer, "scheduler": student.scheduler.state_dict()}

    def values(student: Student) -> Any:
        return torch.cat([p.detach().flatten() for p in student.model.parameters()]).clone()

    first = student()
    if own_state:
        (optimizer,) = first.optimizer.chained_optimizers
        step(first)
        optimizer.load_state_dict(optimizer.state_dict())
        step(first)
        outcome.stage = "end"
        by_parameter = [float(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state]
        by_group = [float(group["step"]) for group in optimizer.optimizer.param_groups if "step" in group]
        outcome.figures["steps"] = by_parameter or by_group
        return
    outcome.figures["before"] = [step(first), step(first)]
    outcome.stage = "save"
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    dist_checkpointing.save(state(first, is_loading=False), str(checkpoint))
    outcome.figures["uninterrupted"] = step(first)

    second = student()
    outcome.stage = "load"
    loaded = dist_checkpointing.load(state(second, is_loading=True), str(checkpoint))
    second.model.module.load_state_dict(loaded["model"], strict=False)
    second.optimizer.load_state_dict(loaded["optimizer"])
    second.scheduler.load_state_dict(loaded["scheduler"])
    outcome.figures["resumed"] = step(second)
    outcome.stage = "end"
    outcome.figures["weights_differ_by"] = float((values(first) - values(second)).abs().max())


def report_piece(without: str, folder: Path, report: Path) -> None:
    """Runs one variant and writes its outcome."""
    outcome = Outcome()
    try:
        name = without.removesuffix(OWN_STATE)
        run_piece(name, outcome, folder, own_state=name != without)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.where = [
            f"{frame.filename.rpartition('/megatron/')[2]}:{frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)
            if "/megatron/core/" in frame.filename
        ]
    report.write_text(json.dumps(outcome.__dict__))


def in_fork(without: str, folder: Path) -> dict[str, Any]:
    """The outcome of one variant, from a forked process that ends the helper processes of its checkpoint too."""
    report = folder / "outcome.json"
    child = multiprocessing.get_context("fork").Process(target=report_piece, args=(without, folder, report))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        child.join()
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def main(results: Path) -> None:
    """Runs all variants one after the other."""
    warnings.simplefilter("ignore")
    # Imported before any fork, and before any patch: the variants share it.
    import megatron_kd.training.setup  # noqa: F401
    from megatron_kd.device.cpu_megatron import workaround_names

    outcomes = {}
    own_state = (EVERYTHING + OWN_STATE, "adam_keeps_its_step_in_the_group" + OWN_STATE)
    for name in (EVERYTHING, *workaround_names(), *own_state):
        with tempfile.TemporaryDirectory() as folder:
            outcomes[name] = in_fork(name, Path(folder))
    results.write_text(json.dumps(outcomes, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
