"""Rules between settings: each refusal names the value seen, the value needed and the key to change."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from megatron_kd.config import RECOMPUTE_KEYS, FromTeacherConfig, LossConfig, ModelConfig, Recipe, load_recipe
from megatron_kd.config.loss import RESTRICTED_TAILS, DivergenceName, TailName
from megatron_kd.errors import ConfigError
from megatron_kd.losses import DIVERGENCES, IMPLEMENTATIONS, TAILS
from megatron_kd.losses.arguments import MODES

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "recipes" / "smollm2_cpu.yaml"

STAGES = ["parallelism.pipeline_model_parallel_size=2", "cluster.gpus_per_node=2"]
OTHER_VOCABULARY = ["student.model=tiny_llama", "student.from_teacher=null"]

SIX = "cluster.gpus_per_node=6"
MOE = ["teacher.model=tiny_gpt_oss", "data.seq_length=240", "training.global_batch_size=4"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.truncation=drop"], ["truncation is 'drop'", "packing to documents or padded, or truncation to split"]),
        (
            ["data.corpus={format: chat, paths: [x]}"],
            ["corpus.format is 'chat'", "conversations would see each other", "packing to documents or padded"],
        ),
        (
            ["parallelism.tensor_model_parallel_size=3", "cluster.nodes=2", "cluster.gpus_per_node=2"],
            [
                "world of 4 ranks",
                "cluster.nodes 2 × cluster.gpus_per_node 2",
                "tp·pp·cp = 3·1·1 = 3",
                "(the rest is dp)",
            ],
        ),
        (
            ["parallelism.tensor_model_parallel_size=2", "cluster.gpus_per_node=2"],
            ["tensor_model_parallel_size 2", "num_attention_heads 9", "num_query_groups 3", "one of 1, 3"],
        ),
        (
            ["parallelism.tensor_model_parallel_size=9", "cluster.gpus_per_node=9", "training.global_batch_size=9"],
            ["tensor_model_parallel_size 9", "teacher.model.num_query_groups 3"],
        ),
        (
            [
                "teacher.model=tiny_llama",
                "teacher.model.ffn_hidden_size=161",
                "parallelism.tensor_model_parallel_size=2",
                "cluster.gpus_per_node=2",
            ],
            ["ffn_hidden_size 161", "set it to one of 1"],
        ),
        (
            [
                "teacher.model=tiny_llama",
                "teacher.model.vocab_size=3",
                "teacher.top_k=2",
                "parallelism.tensor_model_parallel_size=4",
                "cluster.gpus_per_node=4",
            ],
            ["tensor_model_parallel_size 4 is more than teacher.model.vocab_size 3"],
        ),
        (
            ["parallelism.pipeline_model_parallel_size=4", "cluster.gpus_per_node=4"],
            ["pipeline_model_parallel_size 4", "teacher.model.num_layers 30", "one of 1, 2, 3, 5, 6, 10, 15, 30"],
        ),
        (
            ["parallelism.pipeline_model_parallel_size=3", "cluster.gpus_per_node=3"],
            ["pipeline_model_parallel_size 3", "student.model.num_layers 10", "one of 1, 2, 5, 10"],
        ),
        (
            ["parallelism.virtual_pipeline_model_parallel_size=2"],
            ["virtual_pipeline_model_parallel_size 2 needs", "pipeline_model_parallel_size above 1", "set it to null"],
        ),
        (
            [*STAGES, "parallelism.virtual_pipeline_model_parallel_size=2", "training.global_batch_size=2"],
            ["2 × virtual_pipeline_model_parallel_size 2 = 4", "student.model.num_layers 10", "one of 5 or null"],
        ),
        (
            [*STAGES, "parallelism.virtual_pipeline_model_parallel_size=5", "training.global_batch_size=3"],
            ["groups of parallelism.pipeline_model_parallel_size 2", "makes 3 of them", "use 4, or set"],
        ),
        (
            [
                *STAGES,
                "parallelism.virtual_pipeline_model_parallel_size=5",
                "training={global_batch_size: 2, recompute_granularity: full, recompute_num_layers: 2}",
            ],
            ["recompute_num_layers 2 is more than the 1 layers", "on a pipeline stage in one chunk"],
        ),
        (
            ["parallelism.context_parallel_size=7", "cluster.gpus_per_node=7"],
            ["data.seq_length 240", "multiple of 2 × parallelism.context_parallel_size 7", "use 238"],
        ),
        (
            [
                "parallelism={tensor_model_parallel_size: 3, context_parallel_size: 2, sequence_parallel: true}",
                "cluster.gpus_per_node=6",
                "data.seq_length=244",
            ],
            ["data.seq_length 244", "tensor_model_parallel_size 3 × context_parallel_size 2 = 6 with", "use 240"],
        ),
        (
            ["parallelism.expert_model_parallel_size=2", "cluster.gpus_per_node=2"],
            ["expert_model_parallel_size 2", "teacher.model and student.model have none", "set it to 1"],
        ),
        (
            [*MOE, "parallelism.expert_model_parallel_size=3", "cluster.gpus_per_node=3"],
            ["expert_model_parallel_size 3", "teacher.model.num_moe_experts 4", "one of 1, 2, 4"],
        ),
        (
            [
                *MOE,
                "parallelism={pipeline_model_parallel_size: 2, expert_model_parallel_size: 4}",
                "cluster.gpus_per_node=4",
            ],
            ["world of 4 ranks", "ep·pp = 4·2 = 8"],
        ),
        (
            [*MOE, "parallelism.tensor_model_parallel_size=2", "cluster.gpus_per_node=2"],
            ["'tiny_gpt_oss_2layers' has experts", "tensor_model_parallel_size 2", "sequence_parallel to true"],
        ),
        (
            [*MOE, "parallelism={tensor_model_parallel_size: 2, context_parallel_size: 2}", "cluster.gpus_per_node=4"],
            ["2 × context_parallel_size 2 = 4", "teacher.model.num_query_groups 2", "along the heads"],
        ),
        (
            ["parallelism.expert_tensor_parallel_size=2"],
            ["expert_tensor_parallel_size 2 is not available", "experts that have biases"],
        ),
        (["parallelism.sequence_parallel=true"], ["sequence_parallel needs", "above 1, not 1"]),
        (["training.recompute_method=block"], ["recompute_method belongs to", "granularity full, which is null"]),
        (
            ["training={recompute_granularity: selective, recompute_num_layers: 2}"],
            ["recompute_num_layers belongs to", "granularity full, which is selective"],
        ),
        (
            ["training={recompute_granularity: full, recompute_modules: [mlp]}"],
            ["recompute_modules belongs to", "granularity selective, which is full"],
        ),
        (
            [
                "training={recompute_granularity: full, recompute_num_layers: 6}",
                "parallelism.pipeline_model_parallel_size=2",
                "cluster.gpus_per_node=2",
            ],
            ["recompute_num_layers 6 is more than the 5 layers", "student.model"],
        ),
        (
            ["training={recompute_granularity: selective, recompute_modules: [core_attn, moe]}"],
            ["names moe, but student.model", "no experts", "use mlp"],
        ),
        (
            [*MOE, "training={recompute_granularity: selective, recompute_modules: [mlp]}"],
            ["names mlp, but student.model", "experts in every layer", "use moe"],
        ),
        (
            [*MOE, "training={recompute_granularity: selective, recompute_modules: [moe_act]}"],
            ["names moe_act, for which", "Transformer Engine", "remove it"],
        ),
        (
            ["training={recompute_granularity: selective, recompute_modules: [mlp, mlp]}"],
            ["recompute_modules ['mlp', 'mlp'] holds a name twice"],
        ),
        (
            [
                "parallelism={tensor_model_parallel_size: 3, sequence_parallel: true}",
                "cluster.gpus_per_node=3",
                "data.seq_length=241",
            ],
            ["data.seq_length 241", "multiple of parallelism.tensor_model_parallel_size 3", "use 240"],
        ),
        (
            ["training.global_batch_size=7", "training.micro_batch_size=2", "cluster.gpus_per_node=2"],
            ["global_batch_size 7", "micro_batch_size 2 × dp 2 = 4", "use 8"],
        ),
        (
            ["data.seq_length=9000", "data.train_tokens=null", "data.heldout_tokens=null"],
            [
                "data.seq_length 9000",
                "teacher.model.max_position_embeddings 8192",
                "student.model.max_position_embeddings",
            ],
        ),
        (["training.early_stopping.patience=2"], ["early_stopping looks at", "eval_interval", "which is 0"]),
        (["training.loss_spike_factor=1"], ["training.loss_spike_factor is 1", "greater than 1"]),
        (
            ["training.cpu_offloading=true", "training.recompute_granularity=full"],
            [
                "needs Transformer Engine, on a GPU",
                "num_layers 0 must be from 1 to 9",
                "recompute_granularity is full",
            ],
        ),
        (["training.cpu_offloading_num_layers=2"], ["num_layers is 2, but training.cpu_offloading is false"]),
        (
            ["optimizer.optimizer_cpu_offload=true"],
            ["moves what lies on a GPU", "false on a CPU"],
        ),
        (
            ["optimizer.optimizer_cpu_offload=true", "cluster.gpu=h200", "training.precision=fp32"],
            ["optimizer_cpu_offload is for training.precision bf16"],
        ),
        (
            ["optimizer.optimizer_offload_fraction=0.5"],
            ["fraction is 0.5, but optimizer.optimizer_cpu_offload"],
        ),
        (["data.heldout_tokens=200"], ["heldout_tokens 200", "seq_length 240"]),
        (["data.corpus={format: text}"], ["format text needs files", "paths"]),
        (["data.corpus.paths=[a.txt]"], ["pydoc_topics reads no files", "remove paths"]),
        (["teacher.cache=null"], ["mode offline needs", "teacher.cache"]),
        (["teacher.targets=full"], ["mode offline has only the cached top_k"]),
        (["teacher.top_k=50000"], ["top_k 50000", "49152"]),
        (["teacher.temperatures=[1.0, 1.0]"], ["temperatures [1.0, 1.0]", "twice"]),
        (["teacher.temperatures=[]"], ["teacher.temperatures is []", "at least 1 item"]),
        (["loss.temperature=2.0"], ["loss.temperature 2.0", "teacher.temperatures [1.0]"]),
        (
            ["loss.temperature=2.0", "teacher.mode=online", "teacher.targets=top_k"],
            ["loss.temperature 2.0", "first of teacher.temperatures [1.0]", "set teacher.temperatures to [2.0]"],
        ),
        (
            ["loss.beta=0"],
            ["loss.beta", "0.0 must lie strictly between 0 and 1", "set loss.divergence to 'forward_kl'"],
        ),
        (["loss.beta=1", "loss.divergence=jsd"], ["loss.beta", "1.0 must lie strictly between 0 and 1"]),
        (["loss.gradient_mib=-1"], ["loss.gradient_mib is -1", "greater than or equal to 0"]),
        (OTHER_VOCABULARY, ["vocab_size 1003", "vocab_size 49152", "set student.other_vocabulary to 'fold'"]),
        (
            [*OTHER_VOCABULARY, "student.other_vocabulary=fold", "teacher.mode=online"],
            ["vocab_size 1003", "vocab_size 49152", "set teacher.targets to 'top_k'"],
        ),
        (["student.from_teacher.keep_layers=[0, 1]"], ["keep_layers and keep_every both", "at most one"]),
        (["student.from_teacher={keep_every: null, keep_layers: [3, 1]}"], ["[3, 1]", "rising order"]),
        (["student.from_teacher={keep_every: null, keep_layers: [1, 1]}"], ["[1, 1]", "distinct"]),
        (["student.from_teacher={keep_every: null, keep_layers: [0, 30]}"], ["holds 30", "layers 0 to 29"]),
        (["student.from_teacher={keep_every: null, keep_layers: [-1]}"], ["student.from_teacher.keep_layers.0 is -1"]),
        (["student.from_teacher.ffn_hidden_size=1537"], ["ffn_hidden_size 1537 is more than", "ffn_hidden_size 1536"]),
        (["student.from_teacher.num_query_groups=4"], ["num_query_groups 4 is more", "num_query_groups 3"]),
        (["student.from_teacher.num_moe_experts=2"], ["num_moe_experts 2 is more", "num_moe_experts None"]),
        (["student.from_teacher.keep_experts=[0, 1]"], ["keep_experts holds 1", "no experts"]),
        (["student.from_teacher={keep_experts: [1, 0]}"], ["keep_experts [1, 0]", "rising order"]),
        (["student.from_teacher={keep_experts: [0], num_moe_experts: 1}"], ["keep_experts and num_moe_experts both"]),
        (["student.from_teacher.calibration_samples=8"], ["calibration_samples is 8", "num_moe_experts"]),
        (
            ["teacher.model=tiny_gpt_oss", "student.from_teacher={keep_experts: [3]}"],
            ["leaves 1 of 4 experts", "moe_router_topk 2"],
        ),
        (
            ["teacher.model=tiny_gpt_oss", "student.from_teacher={num_moe_experts: 1}"],
            ["leaves 1 of 4 experts", "moe_router_topk 2"],
        ),
        (["student.model.num_layers=4"], ["num_layers 4 (not 10)", "student.from_teacher to null"]),
        (["student.checkpoint=x"], ["checkpoint and from_teacher both"]),
        (["optimizer.lr_warmup_iters=66"], ["lr_warmup_iters 66", "training.train_iters 66"]),
        (["optimizer.lr_decay_iters=5"], ["lr_warmup_iters 7", "optimizer.lr_decay_iters 5"]),
        (["optimizer.min_lr=1.0"], ["min_lr 1.0 is more than lr 0.001"]),
        (["teacher.model.num_query_groups=2"], ["num_query_groups 2 must divide num_attention_heads 9"]),
        (["teacher.model.kv_channels=63"], ["kv_channels 63 must be even"]),
    ],
)
def test_refused(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(BASE, ["training.train_iters=66", *overrides])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.temperature=2", "teacher.temperatures=[1.0, 2.0]"],
        ["loss.temperature=2.0", "teacher.mode=online"],
        ["teacher.mode=online", "teacher.targets=top_k", "teacher.cache=null"],
        ["student.from_teacher={keep_every: null, keep_layers: [0, 29]}"],
        ["student.from_teacher.keep_every=null"],  # all layers: the student starts as its teacher
        ["student.from_teacher={ffn_hidden_size: 1536, num_query_groups: 3}"],
        ["student.model=smollm2_135m"],  # the teacher's own name with from_teacher: cut like without a name
        ["data.seq_length=8192", "data.train_tokens=8192", "data.heldout_tokens=8192"],
        ["data.packing=documents", "data.truncation=drop"],
        ["data.packing=padded", "data.corpus={format: chat, paths: [x]}"],
        ["optimizer.lr_warmup_iters=9", "training.train_iters=10"],
        ["teacher.top_k=49152"],
        ["loss.temperature=2.0", "teacher.mode=online", "teacher.targets=top_k", "teacher.temperatures=[2.0, 1.0]"],
        ["loss.gradient_mib=0"],
        [*OTHER_VOCABULARY, "student.other_vocabulary=fold"],
        ["cluster.gpus_per_node=2", "training.global_batch_size=2"],
        ["parallelism.tensor_model_parallel_size=3", "cluster.gpus_per_node=6", "training.global_batch_size=4"],
        ["parallelism.pipeline_model_parallel_size=2", "cluster.gpus_per_node=2"],
        # Chunks of the student's layers; the teacher keeps whole stages.
        [*STAGES, "parallelism.virtual_pipeline_model_parallel_size=5", "training.global_batch_size=4"],
        ["parallelism.context_parallel_size=2", "cluster.gpus_per_node=2"],
        ["parallelism={tensor_model_parallel_size: 3, context_parallel_size: 2, sequence_parallel: true}", SIX],
        [*MOE, "parallelism.expert_model_parallel_size=2", "cluster.gpus_per_node=4"],
        # The width of an expert is nobody's business but its own.
        [
            *MOE,
            "teacher.model.ffn_hidden_size=41",
            "parallelism={tensor_model_parallel_size: 2, sequence_parallel: true, expert_model_parallel_size: 4}",
            "cluster.gpus_per_node=4",
        ],
        # A student without experts trains without sequence parallelism beside a teacher that has some.
        [
            *MOE,
            "student={model: tiny_llama, from_teacher: null}",
            "parallelism={tensor_model_parallel_size: 2, expert_model_parallel_size: 2}",
            "cluster.gpus_per_node=2",
        ],
    ],
)
def test_accepted(overrides: list[str]) -> None:
    load_recipe(BASE, overrides)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(BASE, ["training.global_batch_size=3", "cluster.gpus_per_node=2", "optimizer.lr_warmup_iters=1000"])
    assert "global_batch_size 3" in str(caught.value) and "lr_warmup_iters 1000" in str(caught.value)


def test_the_batch_adds_up_exactly_when_a_layout_is_accepted() -> None:
    """Against the definition, over a grid: rows of a step = micro batch × microbatches × dp, ranks = tp × dp."""
    accepted = 0
    for world in (1, 2, 3, 4, 6):
        for tp in (1, 2, 3, 4):
            for batch in (2, 3, 4, 6):
                for micro in (1, 2):
                    possible = world % tp == 0 and 4 % tp == 0 and batch % (micro * (world // tp)) == 0
                    overrides = [
                        "teacher.model=tiny_llama",
                        f"cluster.gpus_per_node={world}",
                        f"parallelism.tensor_model_parallel_size={tp}",
                        f"training.global_batch_size={batch}",
                        f"training.micro_batch_size={micro}",
                    ]
                    if not possible:
                        with pytest.raises(ConfigError):
                            load_recipe(BASE, overrides)
                        continue
                    recipe = load_recipe(BASE, overrides)
                    accepted += 1
                    assert recipe.data_parallel_size * tp == world
                    assert micro * recipe.num_microbatches * recipe.data_parallel_size == batch
    assert accepted > 20


@given(layers=st.integers(1, 200), every=st.integers(1, 200))
@settings(max_examples=50)
def test_kept_layers_lie_in_the_teacher(layers: int, every: int) -> None:
    kept = FromTeacherConfig(keep_every=every).layers(layers)
    assert kept[0] == 0 and kept[-1] < layers <= kept[-1] + every
    assert all(b - a == every for a, b in pairwise(kept))


def test_a_student_is_what_its_cut_leaves() -> None:
    left = "keep_every: null, keep_layers: [1, 2, 3], keep_experts: [0, 2, 3], ffn_hidden_size: 24, num_query_groups: 1"
    recipe = load_recipe(BASE, ["teacher.model=tiny_gpt_oss", f"student.from_teacher={{{left}}}"])
    teacher, student = recipe.teacher.model, recipe.student.model
    assert student.name == "tiny_gpt_oss_3layers_3experts_24ffn_1groups"
    changes = {
        "num_layers": 3,
        "num_moe_experts": 3,
        "ffn_hidden_size": 24,
        "num_query_groups": 1,
        "num_attention_heads": 4,
        "window_attn_skip_freq": [0, 1, 0],  # of 1, 0, 1, 0
        "name": student.name,
    }
    assert student == teacher.model_copy(update=changes)
    assert student.layer_windows() == teacher.layer_windows()[1:]
    # What is cut is a valid architecture by itself, as a written recipe will be read.
    assert ModelConfig.model_validate(student.model_dump()) == student


def test_head_width_defaults_to_its_share() -> None:
    reset = ["teacher.model=tiny_llama", "teacher.model.kv_channels=null"]
    assert load_recipe(BASE, [*reset, "teacher.model.hidden_size=96"]).teacher.model.kv_channels == 24
    with pytest.raises(ConfigError, match=r"kv_channels is missing \(Width of one head"):
        load_recipe(BASE, [*reset, "teacher.model.hidden_size=66"])


@pytest.mark.parametrize(
    ("said", "filled"),
    [
        ("{}", (None, None, None, None)),
        ("{recompute_granularity: full}", ("full", "uniform", 1, None)),
        ("{recompute_granularity: full, recompute_method: block, recompute_num_layers: 7}", ("full", "block", 7, None)),
        ("{recompute_granularity: selective}", ("selective", None, None, ["core_attn"])),
        ("{recompute_granularity: selective, recompute_modules: [mlp]}", ("selective", None, None, ["mlp"])),
    ],
)
def test_recomputation_is_filled_in(said: str, filled: tuple[object, ...]) -> None:
    training = load_recipe(BASE, [f"training={said}"]).training
    assert tuple(getattr(training, key) for key in RECOMPUTE_KEYS) == filled


def test_a_recipe_does_not_change_after_loading() -> None:
    recipe = load_recipe(BASE)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1


def test_every_field_has_a_description() -> None:
    def bare(section: type[BaseModel], at: str) -> list[str]:
        missing = []
        for name, field in section.model_fields.items():
            inner = [
                part
                for part in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if hasattr(part, "model_fields")
            ]
            missing += bare(inner[0], f"{at}{name}.") if inner else []
            missing += [f"{at}{name}"] if not inner and not field.description else []
            missing += [f"{at}{name}"] if inner and not inner[0].__doc__ else []
        return missing

    assert bare(Recipe, "") == []


DIVERGENCE_NAMES: tuple[str, ...] = get_args(DivergenceName)
TAIL_NAMES: tuple[str, ...] = get_args(TailName)


@pytest.mark.parametrize("tail", TAIL_NAMES)
@pytest.mark.parametrize("divergence", DIVERGENCE_NAMES)
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_tail_goes_with_the_divergences_it_is_defined_for(mode: str, divergence: str, tail: str) -> None:
    overrides = [f"teacher.mode={mode}", f"loss.divergence={divergence}", f"loss.tail={tail}"]
    if divergence in TAILS[tail].divergences:
        loss = load_recipe(BASE, overrides).loss
        assert (loss.divergence, loss.tail) == (divergence, tail)
        return
    with pytest.raises(ConfigError) as caught:
        load_recipe(BASE, overrides)
    message = str(caught.value)
    assert f"tail {tail!r} is not defined for divergence {divergence!r}: {TAILS[tail].why}; " in message
    tails, divergences = message.split("set loss.tail to ")[1].split(", or loss.divergence to ")
    advised = [[f"loss.tail={name}", f"loss.divergence={divergence}"] for name in re.findall(r"'(\w+)'", tails)]
    advised += [[f"loss.tail={tail}", f"loss.divergence={name}"] for name in re.findall(r"'(\w+)'", divergences)]
    assert len(advised) >= 3
    for settings_ in advised:
        load_recipe(BASE, settings_)


def test_recipes_offer_what_the_losses_have() -> None:
    assert set(DIVERGENCE_NAMES) == set(DIVERGENCES)
    assert set(TAIL_NAMES) == set(TAILS)
    restricted = {name: tail for name, tail in TAILS.items() if set(tail.divergences) != set(DIVERGENCES)}
    assert {name: (tail.divergences, tail.why) for name, tail in restricted.items()} == RESTRICTED_TAILS
    # The other two are not for a recipe to choose: evaluation takes no gradient, and every recipe trains the head.
    assert set(get_args(LossConfig.model_fields["mode"].annotation)) == set(MODES) - {"no_grad", "frozen_head"}
    assert set(get_args(LossConfig.model_fields["implementation"].annotation)) == set(IMPLEMENTATIONS)


def test_a_capture_takes_a_layout_that_does_not_divide_the_batch() -> None:
    overrides = ["cluster.gpus_per_node=3", "training.global_batch_size=4"]
    with pytest.raises(ConfigError, match="global_batch_size 4"):
        load_recipe(BASE, overrides)
    assert load_recipe(BASE, overrides, trains=False).data_parallel_size == 3
    with pytest.raises(ConfigError, match=r"multiple of tp.pp.cp"):
        load_recipe(BASE, [*overrides, "parallelism.tensor_model_parallel_size=2"], trains=False)
