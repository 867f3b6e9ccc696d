"""What the launch scripts decide without SLURM: words, containers, complaints. srun is a function that prints."""

from __future__ import annotations

import os
import re
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest

from megatron_kd.config import load_recipe
from tests.assets import ROOT

SOURCES = "".join(f"source {ROOT}/launch/lib/{name}.sh\n" for name in ("say", "arguments", "recipe", "steps", "stop"))


def bash(text: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs lines of bash behind the library."""
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail\nroot={ROOT} heard=0\n{SOURCES}{text}", "job", *arguments],
        env={"PATH": os.environ["PATH"], "HOME": "/none", **variables},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


PARSE = 'KD_RECIPE=mine.yaml; parse_arguments "$@"; recipe[run_dir]=run; command_words; printf "%s\\n" "${words[@]}"'


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "train mine.yaml"),
        ("a=1 b=2", "train mine.yaml a=1 b=2"),
        ("other.yaml a=x=y", "train other.yaml a=x=y"),
        ("capture --repair a=1", "capture mine.yaml a=1 --repair"),
        ("convert import r.yaml --role=student", "convert import r.yaml --role=student"),
        ("evaluate r.yaml a=1", "evaluate run"),
        ("evaluate /tmp loss.tail=drop", "evaluate /tmp loss.tail=drop"),
    ],
)
def test_words_for_the_command(given: str, words: str) -> None:
    done = bash(PARSE, *given.split())
    assert done.stdout.split() == words.split(), done.stderr


def test_a_step_in_a_container() -> None:
    text = (
        'srun() { if [[ $1 == --help ]]; then echo "--container-image=x"; else printf "%s\\n" "$@"; fi; }\n'
        "choose_environment; step 2 8 --output=log program"
    )
    done = bash(text, KD_CONTAINER="registry#image:1", KD_MOUNTS="/data,/ckpt", SLURM_CPUS_ON_NODE="96")
    assert done.stdout.splitlines() == [
        "--nodes=2",
        "--ntasks=16",
        "--ntasks-per-node=8",
        "--cpus-per-task=12",
        "--distribution=block",
        "--export=ALL",
        "--open-mode=append",
        "--container-image=registry#image:1",
        f"--container-mounts=/,{ROOT},/data,/ckpt",
        "--container-workdir=/",
        "--no-container-mount-home",
        "--output=log",
        "program",
    ], done.stderr


CHOOSE = (
    r"""step() {
  printf '%s\n' "$*" >&2
  for i in 1 2 3; do echo run/_sweep/recipes/p$i.yaml; done >"$job_dir/sweep.$kind"
}
"""
    f"source {ROOT}/launch/lib/point.sh\n"
    'KD_SWEEP=yes KD_RECIPE=; parse_arguments "$@"; choose_point; command_words; printf "%s\\n" "${words[@]}"'
)


@pytest.mark.parametrize(
    ("given", "task", "kind", "words"),
    [
        ("s.yaml a=1", "2", "points", "train run/_sweep/recipes/p2.yaml"),
        ("s.yaml --base=b.yaml", "3", "points", "train run/_sweep/recipes/p3.yaml"),
        ("capture s.yaml a=1 --repair", "1", "inputs", "capture run/_sweep/recipes/p1.yaml --repair"),
        ("convert import s.yaml", "1", "inputs", "convert import run/_sweep/recipes/p1.yaml"),
    ],
)
def test_a_task_of_an_array_takes_its_point(tmp_path: Path, given: str, task: str, kind: str, words: str) -> None:
    done = bash(f"job_dir={tmp_path}\n{CHOOSE}", *given.split(), SLURM_ARRAY_TASK_ID=task)
    said, *rest = done.stdout.splitlines()
    assert rest == words.split() and f"of the 3 {kind} number {task}" in said, done
    asked = done.stderr.split()
    assert asked[:2] == ["1", "1"] and asked[4:7] == ["megatron-kd", "sweep", "s.yaml"]
    assert asked[-1] == f"--write={kind}" and asked[7:-1] == [w for w in given.split() if "=" in w]


@pytest.mark.parametrize(
    ("task", "says"),
    [(None, "s.yaml has 3 points: sbatch --array=1-3 launch/sweep.sh train s.yaml"), ("4", "has the points 1 to 3")],
)
def test_an_array_has_as_many_tasks_as_points(tmp_path: Path, task: str | None, says: str) -> None:
    variables = {} if task is None else {"SLURM_ARRAY_TASK_ID": task}
    done = bash(f"job_dir={tmp_path}\n{CHOOSE}", "s.yaml", **variables)
    assert done.returncode == 2 and says in done.stderr


def test_a_task_of_an_array_speaks_for_itself_alone() -> None:
    ids = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    text = 'scontrol() { printf "%s\\n" "$*"; return 1; }; command=train; requeue "train is not done"'
    assert "requeue 7_3\n" in bash(text, **ids).stdout
    assert "requeue 7\n" in bash(text, SLURM_JOB_ID="7").stdout


def test_many_nodes_complain_in_one_line(tmp_path: Path) -> None:
    for node in range(10, 20):
        (tmp_path / f"log.{node}").write_text(f"n{node}\tno cache\n" + ("n19\tno GPU\n" if node == 19 else ""))
    source = (ROOT / "launch/lib/job.sh").read_text()
    function = source[source.index("gather_complaints() {") : source.index("look_around() {")]
    done = bash(f"{function}\ngather_complaints {tmp_path}/log.*")
    assert done.stdout.splitlines() == [
        "launch: error: n10 n11 n12 n13 and 6 more nodes: no cache",
        "launch: error: n19: no GPU",
    ], done.stderr


@pytest.mark.parametrize(
    ("state", "signalled", "restarts", "status", "says"),
    [
        ("finished", "yes", "0", 0, "train is finished"),
        ("stopped", "", "0", 75, "submit it again to go on"),
        ("stopped", "yes", "20", 75, "not done after 20 requeues"),
        ("stopped", "yes", "3", 75, "SLURM did not requeue job 7"),
        ("running", "yes", "0", 2, "says 'running'"),
        (None, "", "0", 2, "says 'nothing'"),
    ],
)
def test_only_done_work_ends_well(
    tmp_path: Path, state: str | None, signalled: str, restarts: str, status: int, says: str
) -> None:
    file = tmp_path / "status.json"
    if state is not None:
        file.write_text(f'{{\n  "state": "{state}",\n  "iteration": 3\n}}\n')
    text = f"scontrol() {{ return 1; }}; command=train job_dir=logs signalled={signalled}\nconclude {file}"
    done = bash(text, SLURM_RESTART_COUNT=restarts, SLURM_JOB_ID="7")
    assert done.returncode == status and says in done.stdout + done.stderr, done


@pytest.mark.parametrize(
    ("command", "restarts", "status", "says"),
    [
        ("train", "0", 75, "SLURM asks to stop (time limit or pre-emption) before train began: it goes on after"),
        ("train", "20", 75, "began after 20 requeues: submit it again"),
        ("evaluate", "0", 0, "ran"),
    ],
)
def test_a_signal_while_the_nodes_are_looked_at(command: str, restarts: str, status: int, says: str) -> None:
    text = (
        f"scontrol() {{ return 1; }}; command={command}; source {ROOT}/launch/lib/wait.sh\n"
        "listen_early; kill -USR1 $$; run_and_listen echo ran"
    )
    done = bash(text, SLURM_RESTART_COUNT=restarts, SLURM_JOB_ID="7")
    assert done.returncode == status and says in done.stdout, done
    assert ("ran" in done.stdout.split()) == (status == 0)


@pytest.mark.parametrize(
    "script", ["job.sh", "sweep.sh", "gptoss20b_32k.sh", "gptoss120b_32k.sh", "llama31_8b_to_3b_8k.sh"]
)
def test_submitted_from_elsewhere(script: str) -> None:
    done = bash(f"unset root lib; source {ROOT}/launch/{script}", SLURM_SUBMIT_DIR="/", SLURM_JOB_ID="7")
    wanted = "launch: error: no //launch/lib/job.sh: submit from the root of the checkout, or set KD_ROOT to it\n"
    assert (done.returncode, done.stderr) == (2, wanted)


def asked(script: Path, *options: str) -> dict[str, str]:
    """What a script asks SLURM for, with sbatch's options behind it."""
    lines = (line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH "))
    return dict(word.removeprefix("--").split("=", 1) for word in (*lines, *options) if "=" in word)


def submissions() -> dict[str, tuple[Path, tuple[str, ...], str]]:
    """Every script with its own recipe, and every line to type in a recipe's comment: script, options, recipe."""
    found: dict[str, tuple[Path, tuple[str, ...], str]] = {}
    for script in sorted((ROOT / "launch").glob("*.sh")):
        if own := re.search(r"^KD_RECIPE=\$\{KD_RECIPE:-(\S+)\}$", script.read_text(), re.MULTILINE):
            found[script.name] = (script, (), own[1])
    for recipe in sorted((ROOT / "recipes").rglob("*.yaml")):
        for line in re.findall(r"^# +sbatch (.*)$", recipe.read_text(), re.MULTILINE):
            words = line.split()
            options = tuple(takewhile(lambda word: word.startswith("--"), words))
            script, *rest = words[len(options) :]
            named = [word.removeprefix("--base=") for word in rest if word.endswith(".yaml")]
            name = named[-1] if named else recipe.relative_to(ROOT).as_posix()
            found[f"{recipe.stem}: {line}"] = (ROOT / script, options, name)
    return found


@pytest.mark.parametrize("name", submissions())
def test_a_script_asks_for_the_nodes_and_gpus_of_its_recipe(name: str) -> None:
    script, options, recipe = submissions()[name]
    cluster = load_recipe(ROOT / recipe, []).cluster
    wanted = asked(script, *options)
    assert (int(wanted["nodes"]), int(wanted["gpus-per-node"])) == (cluster.nodes, cluster.gpus_per_node)


@pytest.mark.parametrize("words", ["", "capture", "convert import"])
def test_a_job_script_run_by_hand_says_the_two_lines(words: str) -> None:
    script = ROOT / "launch/gptoss20b_32k.sh"
    variables = {"PATH": os.environ["PATH"], "HOME": "/none"}
    done = subprocess.run(["bash", script, *words.split()], env=variables, capture_output=True, text=True, check=False)
    local = f"launch/local.sh {words or 'train'} recipes/gptoss20b_32k/offline_1node.yaml"
    wanted = (
        f"launch: error: this is a job: sbatch {f'{script} {words}'.strip()}; on one machine without SLURM: {local}\n"
    )
    assert (done.returncode, done.stderr) == (2, wanted)
