"""Students cut out of teachers against Hugging Face's model cut by hand: weights in every layout, and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_kd.config import FromTeacherConfig, ModelConfig
from megatron_kd.testing import run_distributed
from tests.distributed.test_models_parity import PP, SP, TP, all_logits, join
from tests.models_oracles import grouped_model, random_hf_model, tiny_gpt_oss, tiny_qwen3

MODELS = {"gpt_oss": tiny_gpt_oss(num_query_groups=4), "qwen3": tiny_qwen3(), "tied": grouped_model(False)}
CUTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"keep_layers": [1, 2], "keep_experts": [0, 2, 3], "ffn_hidden_size": 24, "num_query_groups": 2},
    "qwen3": {"keep_every": 2, "ffn_hidden_size": 40, "num_query_groups": 2},
    "tied": {"keep_layers": [0, 2]},
}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "gpt_oss": [{}, {TP: 2, SP: True}, {PP: 2}],
    "qwen3": [{}, {TP: 2}],
    "tied": [{}, {TP: 2}],
}


def rows_by_hand(gate: Tensor, up: Tensor, down: Tensor, count: int, offset: float) -> list[int]:
    """Of gate, up [F, H] and down [H, F] the rows with the largest product of norms, in float64 and one by one."""
    scores = [
        float(gate[i].double().norm())
        * (float(up[i].double().norm()) ** 2 + offset**2) ** 0.5
        * float(down[:, i].double().norm())
        for i in range(len(gate))
    ]
    return sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:count])


def groups_by_hand(v: Tensor, o: Tensor, model: ModelConfig, count: int) -> list[int]:
    """The groups whose heads' o·v are largest."""
    d, each = model.kv_channels, model.num_attention_heads // model.num_query_groups
    scores = []
    for g in range(model.num_query_groups):
        heads = range(g * each, (g + 1) * each)
        value = v[g * d : (g + 1) * d].double()
        scores.append(sum(float((o[:, h * d : (h + 1) * d].double() @ value).square().sum()) for h in heads))
    return sorted(sorted(range(len(scores)), key=lambda g: -scores[g])[:count])


def spread(indices: list[int], width: int) -> list[int]:
    """Each index as ``width`` rows that lie together."""
    return [i * width + j for i in indices for j in range(width)]


def cut_by_hand(state: dict[str, Tensor], model: ModelConfig, cut: dict[str, Any]) -> dict[str, Tensor]:
    """The state dict of the student under Hugging Face's names, made of the teacher's."""
    layers = cut.get("keep_layers") or list(range(0, model.num_layers, cut.get("keep_every", 1)))
    left = {name: value for name, value in state.items() if ".layers." not in name}
    d, each = model.kv_channels, model.num_attention_heads // model.num_query_groups
    for new, old in enumerate(layers):
        prefix = f"model.layers.{old}."
        layer = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        v, o = layer["self_attn.v_proj.weight"], layer["self_attn.o_proj.weight"]
        groups = groups_by_hand(v, o, model, cut.get("num_query_groups", model.num_query_groups))
        heads = spread(groups, each)
        for name in list(layer):
            if name.startswith("self_attn.q_proj"):
                layer[name] = layer[name][spread(heads, d)]
            elif name.startswith(("self_attn.k_proj", "self_attn.v_proj")):
                layer[name] = layer[name][spread(groups, d)]
            elif name == "self_attn.o_proj.weight":
                layer[name] = layer[name][:, spread(heads, d)]
            elif name == "self_attn.sinks":
                layer[name] = layer[name][heads]
        count = cut.get("ffn_hidden_size", model.ffn_hidden_size)
        if model.num_moe_experts is None:
            gate, up, down = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
            rows = rows_by_hand(layer[gate], layer[up], layer[down], count, 0.0)
            layer |= {gate: layer[gate][rows], up: layer[up][rows], down: layer[down][:, rows]}
        else:
            kept = cut.get("keep_experts", range(model.num_moe_experts))
            parts: dict[str, list[Tensor]] = {}
            for e in kept:
                both, down = layer["mlp.experts.gate_up_proj"][e], layer["mlp.experts.down_proj"][e]
                rows = rows_by_hand(both[:, 0::2].t(), both[:, 1::2].t(), down.t(), count, 1.0)
                columns = spread(rows, 2)
                new_parts = {
                    "gate_up_proj": both[:, columns],
                    "gate_up_proj_bias": layer["mlp.experts.gate_up_proj_bias"][e][columns],
                    "down_proj": down[rows],
                    "down_proj_bias": layer["mlp.experts.down_proj_bias"][e],
                }
                for name, value in new_parts.items():
                    parts.setdefault(f"mlp.experts.{name}", []).append(value)
            layer |= {name: torch.stack(values) for name, values in parts.items()}
            for name in ("mlp.router.weight", "mlp.router.bias"):
                layer[name] = layer[name][list(kept)]
        left |= {f"model.layers.{new}.{name}": value for name, value in layer.items()}
    return left


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each model the teacher's folder, and the state and logits of Hugging Face's model cut by hand."""
    folder = tmp_path_factory.mktemp("cuts")
    tokens = torch.randint(0, 331, (2, 30), generator=torch.Generator().manual_seed(5))
    for name, model in MODELS.items():
        teacher = random_hf_model(model)
        teacher.save_pretrained(folder / name)
        state = cut_by_hand(dict(teacher.state_dict()), model, CUTS[name])
        kept = CUTS[name].get("keep_layers") or [0, 2]
        config = {key: value for key, value in teacher.config.to_dict().items() if key != "layer_types"} | {
            "num_hidden_layers": len(kept),
            "intermediate_size": CUTS[name].get("ffn_hidden_size", model.ffn_hidden_size),
            "num_key_value_heads": 2 if "num_query_groups" in CUTS[name] else 4,
            "num_attention_heads": 4 if "num_query_groups" in CUTS[name] else 8,
        }
        if name == "gpt_oss":
            # Of the teacher's layers the odd ones see everything.
            config |= {"num_local_experts": 3, "layer_types": ["full_attention", "sliding_attention"]}
        student = type(teacher)(type(teacher.config)(**config)).eval()
        student.config._attn_implementation = "eager"
        student.load_state_dict(state)
        with torch.no_grad():
            torch.save({"tokens": tokens, "state": state, "logits": student(tokens).logits}, folder / f"{name}.pt")
    return folder


def cut_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """For each model and layout the parameters that are not those cut by hand, and the gap of the logits."""
    from megatron_kd.models.build import build_model
    from megatron_kd.models.cut import CutWeights
    from megatron_kd.models.hf_source import open_hf_weights
    from megatron_kd.models.load import load_hf_weights
    from megatron_kd.models.parameters import places_in

    found: dict[str, Any] = {}
    for name, teacher in MODELS.items():
        cut = FromTeacherConfig.model_validate(CUTS[name])
        student, layers = cut.cut(teacher), cut.layers(teacher.num_layers)
        experts = None if cut.keep_experts is None else [cut.keep_experts] * len(layers)
        oracle = torch.load(folder / f"{name}.pt")
        for sizes in LAYOUTS[name]:
            layout, groups = join(**sizes)
            built = build_model(student, layout, groups, "fp32", trainable=False)
            view = CutWeights(open_hf_weights(str(folder / name)), teacher, student, layers, experts)
            load_hf_weights(built, student, view, groups)

            def by_hand(key: str, i: int | None, state: dict[str, Tensor] = oracle["state"]) -> Tensor:
                return state[key] if i is None else state[key][i]

            wrong, compared = [], 0
            for place, parameter in places_in(built, student, groups):
                theirs = place.shard(place.whole(by_hand, student), student, groups)
                compared += 1
                if not torch.equal(parameter, theirs):
                    wrong.append(place.megatron_name)
            found[f"{name} {sizes}"] = {"wrong": wrong, "compared": compared}
            if not sizes:
                logits = all_logits(built, oracle["tokens"], groups, student.vocab_size)
                found[f"{name} {sizes}"]["gap"] = float((logits - oracle["logits"]).abs().max())
    return found


def test_cut_students_are_hugging_faces_model_cut_by_hand(folder: Path) -> None:
    ranks = run_distributed(cut_rank, 2, folder)
    for found in ranks:
        assert len(found) == sum(len(layouts) for layouts in LAYOUTS.values())
        for case, figures in found.items():
            assert figures["wrong"] == [] and figures["compared"] > 10, (case, figures)
            assert figures.get("gap", 0.0) < 1e-5, (case, figures)
    assert sum("gap" in figures for figures in ranks[0].values()) == len(MODELS)
