"""One step from the inside: what is normalised, decayed and clipped, the schedule, bfloat16, and what ends a run."""

from __future__ import annotations

import math
import shutil
import signal
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_kd.data.batches import make_batch
from megatron_kd.data.sampler import SampleOrder
from megatron_kd.data.samples import SampleSet
from megatron_kd.errors import CacheError, CheckpointError, KDError, RemoteRankError
from megatron_kd.testing import run_distributed
from tests.assets import steps_of, tiny_recipe
from tests.distributed.test_training_methods import gradient_error
from tests.training_runs import Layout, Trainer, leave_layout, make_inputs, recipe_in

ALONE, PAIR = Layout(1), Layout(2)
BAD_STEP = 6


def _gradients_of(trainer: Trainer, micro_batches: list[Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Gradients and metrics of one step on these micro batches, the weights put back afterwards."""
    from megatron_kd.training.step import train_step

    module = trainer.student.model.module
    before = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    done = train_step(
        trainer.recipe, trainer.student, trainer.session.distillation, trainer.session.groups, micro_batches
    )
    gradients = trainer.gradients()
    module.load_state_dict(before, strict=False)
    return gradients, done.metrics


def _four_tokens(trainer: Trainer) -> dict[str, Any]:
    """Four unmasked tokens as 3 + 1, as 2 + 2 and as one row: the same tokens of the same row each time."""
    whole = make_batch(trainer.session.samples, [0], trainer.session.cached)
    places = [5, 17, 18, 40]

    def with_only(kept: list[int]) -> Any:
        weights = torch.zeros_like(whole.token_weights)
        weights[kept] = 1.0
        return replace(whole, token_weights=weights, labels=torch.where(weights > 0, whole.labels, -100))

    return {
        "4": _gradients_of(trainer, [with_only(places)]),
        "3 + 1": _gradients_of(trainer, [with_only(places[:3]), with_only(places[3:])]),
        "2 + 2": _gradients_of(trainer, [with_only(places[:2]), with_only(places[2:])]),
        "4 + 0": _gradients_of(trainer, [with_only(places), with_only([])]),
    }


def _decay(recipe: Path) -> dict[str, float]:
    """How far one step with a decay moves each parameter more than one without, relative to lr · decay · weight."""
    moved: dict[float, dict[str, torch.Tensor]] = {}
    start: dict[str, torch.Tensor] = {}
    for decay in (0.0, 0.5):
        trainer = Trainer(recipe_in(recipe, ALONE, "optimizer.lr_warmup_iters=0", f"optimizer.weight_decay={decay}"))
        parameters = dict(trainer.student.model.module.named_parameters())
        start = {name: p.detach().clone() for name, p in parameters.items()}
        trainer.step()
        moved[decay] = {name: p.detach().clone() for name, p in parameters.items()}
    return {
        name: float((moved[0.0][name] - moved[0.5][name]).norm() / (1e-3 * 0.5 * value.norm()))
        for name, value in start.items()
    }


def _clipping(recipe: Path) -> tuple[dict[str, float], dict[str, Any], dict[str, Any]]:
    free = Trainer(recipe_in(recipe, ALONE, "optimizer.clip_grad=0"))
    metrics = free.step()
    clipped = Trainer(recipe_in(recipe, ALONE, f"optimizer.clip_grad={metrics['optim/grad_norm'] / 4}"))
    clipped.step()
    return metrics, free.gradients(), clipped.gradients()


def _bfloat16(recipe: Path) -> dict[str, Any]:
    trainer = Trainer(recipe_in(recipe, ALONE, "training.precision=bf16"))
    curve = trainer.curve(8)
    masters = [p for group in trainer.student.optimizer.param_groups for p in group["params"]]
    return {
        "curve": curve,
        "weights": {str(p.dtype) for p in trainer.student.model.module.parameters()},
        "gradients": {str(p.main_grad.dtype) for p in trainer.student.model.module.parameters()},
        "masters": {str(p.dtype) for p in masters},
    }


def _not_finite(recipe: Path) -> str:
    trainer = Trainer(recipe_in(recipe, ALONE))
    trainer.step()
    with torch.no_grad():
        next(iter(trainer.student.model.module.parameters()))[:] = math.nan
    try:
        trainer.step()
    except KDError as error:
        return str(error)
    return "trained on"


def _alone_rank(rank: int, world: int, recipe: Path) -> dict[str, Any]:
    make_inputs(recipe_in(recipe, ALONE))
    return {
        "four tokens": _four_tokens(Trainer(recipe_in(recipe, ALONE, "optimizer.clip_grad=0"))),
        "decay": _decay(recipe),
        "clipping": _clipping(recipe),
        "bf16": _bfloat16(recipe),
        "fp32": Trainer(recipe_in(recipe, ALONE)).curve(8),
        "not finite": _not_finite(recipe),
        "rates": [step["optim/lr"] for step in Trainer(recipe_in(recipe, ALONE)).curve(20)],
        "linear": [
            step["optim/lr"]
            for step in Trainer(
                recipe_in(recipe, ALONE, "optimizer.lr_decay_style=linear", "optimizer.lr_decay_iters=6")
            ).curve(9)
        ],
    }


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A row a shard, so that one damaged file is one damaged row.
    return tiny_recipe(tmp_path_factory.mktemp("step"), teacher={"capture": {"rows_per_shard": 1}})


@pytest.fixture(scope="module")
def found(recipe: Path) -> dict[str, Any]:
    result: dict[str, Any] = run_distributed(_alone_rank, 1, recipe)[0]
    return result


@pytest.mark.parametrize("portions", ["3 + 1", "2 + 2", "4 + 0"])
def test_four_tokens_are_four_tokens(found: dict[str, Any], portions: str) -> None:
    gradients, metrics = found["four tokens"]["4"]
    others, other_metrics = found["four tokens"][portions]
    assert gradient_error(gradients, others) < 1e-5
    assert other_metrics["loss/kd"] == pytest.approx(metrics["loss/kd"], rel=1e-6)


def test_weight_decay_is_for_matrices(found: dict[str, Any]) -> None:
    """AdamW with decay d moves a weight by lr·d·w more than without; norms are left alone."""
    norms = {name: ratio for name, ratio in found["decay"].items() if "layernorm" in name}
    assert len(norms) >= 5 and all(ratio == 0.0 for ratio in norms.values())
    others = {name: ratio for name, ratio in found["decay"].items() if name not in norms}
    assert len(others) >= 8
    for name, ratio in others.items():
        assert ratio == pytest.approx(1.0, rel=1e-2), name


def test_clipping_scales_all_gradients_by_one_factor(found: dict[str, Any]) -> None:
    metrics, free, clipped = found["clipping"]
    norm = np.sqrt(sum(np.sum(gradient**2) for gradient in free.values()))
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert gradient_error({name: g / 4 for name, g in free.items()}, clipped) < 1e-4


def test_rates_warm_up_and_fall_as_a_cosine(found: dict[str, Any]) -> None:
    lr, least, warmup, end = 1e-3, 1e-4, 2, 20
    expected = [
        lr * step / warmup
        if step <= warmup
        else least + (lr - least) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup)))
        for step in range(20)
    ]
    assert found["rates"] == pytest.approx(expected, rel=1e-12)
    assert found["rates"][0] == 0.0 and found["rates"][2] == lr and found["rates"][-1] > least


def test_rates_fall_linearly_to_the_least_and_stay_there(found: dict[str, Any]) -> None:
    expected = [0.0, 5e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 1e-4, 1e-4]
    assert found["linear"] == pytest.approx(expected, rel=1e-12)


def test_bfloat16_trains_on_float32_masters(found: dict[str, Any]) -> None:
    seen = found["bf16"]
    assert seen["weights"] == {"torch.bfloat16"}
    assert seen["gradients"] == seen["masters"] == {"torch.float32"}
    for ours, exact in zip(seen["curve"], found["fp32"], strict=True):
        assert ours["loss/kd"] == pytest.approx(exact["loss/kd"], rel=0.05)
        assert ours["loss/kd"] != exact["loss/kd"]


def test_a_gradient_that_is_not_finite_ends_the_run(found: dict[str, Any]) -> None:
    assert "iteration 2" in found["not finite"] and "gradient norm nan" in found["not finite"]


def _damage(cache: Path, sample: int) -> None:
    """Flips bits in the values of one row."""
    (file,) = cache.glob(f"shards/{sample:06d}-*/logprob_delta/c.0.0")
    data = bytearray(file.read_bytes())
    for i in range(len(data) // 2):
        data[i] ^= 0x5A
    file.write_bytes(data)


def _full_disk(recipe: Path, rank: int) -> tuple[list[str], list[str]]:
    """A save in which the first rank may write no more than 4 KiB a file, then one in which it may."""
    import resource

    from megatron_kd.training.checkpoint import save_checkpoint

    trainer = Trainer(recipe_in(recipe, PAIR))
    trainer.step()
    run_dir = recipe.parent / "full_disk"
    said, present = [], []
    for limit in (4096, resource.RLIM_INFINITY):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with EFBIG, as it does on a full disk
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            save_checkpoint(trainer.student, trainer.recipe.student.model, trainer.session.groups, run_dir, keep=2)
            said.append("saved")
        except (CheckpointError, RemoteRankError, OSError) as error:
            said.append(str(error))
        except Exception:
            said.append(traceback.format_exc())
        present.append(" ".join(path.name for path in (run_dir / "checkpoints").glob("iter_*")))
    return said, present


def _damaged_rank(rank: int, world: int, recipe_file: Path, copies: dict[str, Path]) -> dict[str, Any]:
    from megatron_kd.training.loop import train

    outcome: dict[str, Any] = {}
    for name, cache in copies.items():
        leave_layout()
        overrides = [f"teacher.cache={cache}", f"run_dir={cache}.run"]
        try:
            outcome[name] = ("ended well", str(train(recipe_in(recipe_file, PAIR, *overrides), show_progress=False)))
        except (CacheError, RemoteRankError) as error:
            outcome[name] = (type(error).__name__, str(error))
        except Exception:
            outcome[name] = ("something else", traceback.format_exc())
    outcome["full disk"] = _full_disk(recipe_file, rank)
    return outcome


def test_damage_ends_all_ranks_with_one_message(recipe: Path, found: dict[str, Any], tmp_path: Path) -> None:
    """A row in the middle of training and in evaluation, and a full disk: the other rank must not wait."""
    loaded = recipe_in(recipe, ALONE)
    samples = SampleSet(loaded.data.samples)
    order = SampleOrder(samples.split("train"), seed=loaded.seed, shuffle=True, global_batch_size=4)
    rows = {"training": int(order.ids_of_step(BAD_STEP)[1]), "evaluation": samples.split("heldout")[1]}
    copies = {name: tmp_path / name for name in rows}
    for name, copy in copies.items():
        shutil.copytree(str(loaded.teacher.cache), copy)
        _damage(copy, rows[name])
    ranks = run_distributed(_damaged_rank, 2, recipe, copies)
    first, second = ranks  # the rows are those of the second rank
    for name, copy in copies.items():
        assert first[name][0] == "RemoteRankError" and "on another rank; its message says why" in first[name][1]
        assert second[name][0] == "CacheError"
        assert second[name][1].startswith(f"sample {rows[name]} of {copy} cannot be used")
    run = Path(f"{copies['training']}.run")
    assert len(steps_of(run)) == BAD_STEP
    assert (run / f"checkpoints/iter_{BAD_STEP:07d}").is_dir(), "what was learnt before the bad row is kept"
    for rank in ranks:
        (failed, saved), present = rank["full disk"]
        assert "could not be written" in failed and "\n" not in failed, failed
        assert (saved, present) == ("saved", ["", "iter_0000001"])
