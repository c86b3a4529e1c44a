"""Pages on algorithms: each registered one has a page; keys, code references, configurations and curves on it are right."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import gallery, gallery_pages
from rlhpc.algorithms.registry import ADVANTAGES, POLICY_LOSSES, REWARD_LOSSES
from rlhpc.embodied.algorithms.registry import ALGORITHMS as OFF_POLICY
from rlhpc.embodied.models.registry import MODELS
from rlhpc.language.algorithms.registry import ALGORITHMS as LANGUAGE
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import all_task_types, task_type_keys
from rlhpc.runtime.errors import ConfigError
from tests import warm
from tests.extras import need_extra

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs/algorithms").glob("*.md") if path.name != "README.md")
#: Headings of each page, in order.
HEADINGS = [
    "Formula",
    "Keys",
    "A minimal configuration",
    "Curves",
    "Traps",
    "When to use it, and when not",
    "Sources",
]
TRAINED = [name for name, task in gallery.TASKS.items() if task.config is not None]
DRAWN = [name for name in TRAINED if gallery.TASKS[name].curve is not None]
#: Tasks whose runs are tried at each change; the others are among the long tests.
MAIN = ("sums_sft", "grpo", "ppo", "sac", "dpo")


def name_of(page: Path) -> str:
    return page.stem


def named(key: str) -> dict[str, list[str]]:
    """Returns the values of a key that the pages name, each with its pages."""
    values: dict[str, list[str]] = {}
    for page in PAGES:
        for value in set(re.findall(rf"`{re.escape(key)}: ([\w+]+)`", page.read_text())):
            values.setdefault(value, []).append(page.stem)
    return values


def registered() -> dict[str, set[str]]:
    """Returns key → the names that it may have, of algorithms that the package trains."""
    keys = task_type_keys("dpo").by_path
    task_types = {kind.name for kind in all_task_types()}
    return {
        "algorithm.adv_type": set(ADVANTAGES.built_in),
        "algorithm.loss_type": {
            *POLICY_LOSSES.built_in,
            *REWARD_LOSSES.built_in,
            *keys["algorithm.loss_type"].choices,
        },
        "algorithm.name": {*OFF_POLICY.built_in, *LANGUAGE.built_in},
        "runner.task_type": task_types,
    }


@pytest.mark.parametrize("key", registered())
def test_each_registered_algorithm_has_a_page_and_no_page_names_another(key: str) -> None:
    assert set(named(key)) == registered()[key]


def test_the_model_types_that_make_an_algorithm_exist() -> None:
    assert {"dsrl", "conditioned", "sac", "td3", "crossq", "iql"} <= set(named("actor.model.model_type"))
    assert set(named("actor.model.model_type")) <= set(MODELS.built_in)


def test_the_index_has_each_page() -> None:
    text = (ROOT / "docs/algorithms/README.md").read_text()
    rows = re.findall(r"^\| \[[^]]+\]\((\S+?)\.md\) \|.*\| (.*) \|$", text, re.M)
    assert sorted(page for page, _ in rows) == [page.stem for page in PAGES]
    for page, task_types in rows:
        assert set(re.findall(r"`(\w+)`", task_types)) <= registered()["runner.task_type"], page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_all_parts(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M) == HEADINGS
    sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert "```text\n" in sections["Formula"]
    assert "<!-- curve" in sections["Curves"] or sections["Curves"].strip().startswith("There is none")
    assert "- " in sections["Traps"]
    assert re.search(r"arXiv:\d{4}\.\d{5}|arXiv:\d{4}\.\d{4}\b", sections["Sources"])
    assert "ompare" in sections["Sources"] or "by hand" in sections["Sources"]


def definitions(path: Path) -> dict[str, set[str]]:
    """Returns functions and classes of a module; of a class, its methods."""
    nodes = ast.parse(path.read_text()).body
    return {
        node.name: {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
        for node in nodes
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_terms_of_the_formula_are_where_the_page_says(page: Path) -> None:
    (formula,) = re.findall(r"^## Formula\n(.*?)^## ", page.read_text(), re.M | re.S)
    references = re.findall(r"`(rlhpc/[\w/]+\.py)(?::([\w.]+))?`", formula)
    assert len(references) > 2
    for path, dotted in references:
        owner, _, method = dotted.partition(".")
        names = definitions(ROOT / path)
        assert not owner or owner in names, f"{path} has no {owner}"
        assert not method or method in names[owner], f"{path}: {owner} has no {method}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_and_figures_that_a_page_names_exist(page: Path) -> None:
    for path in re.findall(r"`((?:tests|bench)/[\w/]+\.py)`", page.read_text()):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", gallery_pages.PAGES, ids=name_of)
def test_keys_defaults_configurations_and_origins_are_current(page: Path) -> None:
    """Of the schema, of configs/algorithms, and of the points."""
    assert gallery_pages.render_page(page) == page.read_text(), "run: python -m bench.gallery_pages"


def test_a_key_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"off_policy has no key algorithm\.clip_ratio_low"):
        gallery_pages.render_keys("off_policy: algorithm.tau algorithm.clip_ratio_low", PAGES[0])


def test_each_curve_is_on_one_page() -> None:
    shown = [
        name
        for page in PAGES
        for words in re.findall(r"<!-- curve (.*?) -->", page.read_text())
        for name in words.split()
    ]
    assert sorted(shown) == sorted(DRAWN)
    files = {path.stem for path in gallery.CURVES.iterdir()}
    assert files == set(DRAWN)


@pytest.mark.parametrize("name", DRAWN)
def test_a_curve_is_of_its_points_and_these_of_the_committed_configuration(name: str) -> None:
    points = gallery.read_points(name)
    again = f"the run is of other settings: make curve-{name}"
    assert points["settings"] == gallery.compute_settings_digest(name), again
    assert points["trained"] == [shlex.join(words) for words, _ in gallery.build_training_commands(name)], again
    assert sorted({row["seed"] for row in points["points"]}) == list(gallery.TASKS[name].seeds or (1,))
    assert (gallery.CURVES / f"{name}.svg").read_text() == gallery.render_chart(name), (
        f"python -m bench.gallery --draw {name}"
    )
    assert re.fullmatch(r"[0-9a-f]{7,12}", points["machine"]["commit"]), "made from a commit"
    assert len(points["seconds"]) == len(points["trained"]) and min(points["seconds"]) > 0
    steps = load_config(gallery.CONFIGS / f"{gallery.TASKS[name].config}.yaml", check=False).runner.max_steps
    curve = gallery.TASKS[name].curve
    assert curve is not None
    metrics = {curve.metric, *(curve.also or ())[:1]}
    assert {row["metric"] for row in points["points"]} == metrics
    for row in points["points"]:
        assert len(row["x"]) == len(row["y"]) > 3
        assert curve.x[0] != "step" or row["x"][-1] == steps * (gallery.TASKS[name].num_rounds + 1)


def test_the_digest_of_settings_follows_what_is_set_and_not_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base.yaml").write_text("algorithm: {gamma: 0.9}\n")
    (tmp_path / "ppo.yaml").write_text("# one\ndefaults: [base.yaml]\nrunner: {name: ppo}\n")
    monkeypatch.setattr(gallery, "CONFIGS", tmp_path)
    first = gallery.compute_settings_digest("ppo")
    (tmp_path / "ppo.yaml").write_text("# another\ndefaults: [base.yaml]\nrunner: {name: ppo}\n")
    assert gallery.compute_settings_digest("ppo") == first
    (tmp_path / "base.yaml").write_text("algorithm: {gamma: 0.8}\n")
    assert gallery.compute_settings_digest("ppo") != first


def test_a_band_has_the_mean_and_the_ends_of_all_seeds() -> None:
    rows = [{"x": [1, 2, 3, 4], "y": [0.0, 0.0, 2.0, 2.0]}, {"x": [1, 2, 3, 4], "y": [2.0, 2.0, 2.0, 4.0]}]
    line = gallery._compute_band(rows)
    assert (list(line.y), list(line.low), list(line.high)) == ([1, 1, 2, 3], [0, 0, 2, 2], [2, 2, 2, 4])


def test_an_unknown_name_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        gallery.main(["grpo", "nosuch"])
    assert caught.value.code == 2
    assert "there is no nosuch; there are sums_sft, sums, grpo," in capsys.readouterr().err


# -- trained ----------------------------------------------------------------------------------------------------------

#: What makes runs of a task type small; SFT trains to its end, so that there are right answers and wrong ones.
SMALL = {
    "sft": ("data.prompts_per_step=32",),
    "reasoning": ("data.prompts_per_step=8", "actor.global_batch_size=8"),
    "dpo": ("data.prompts_per_step=4", "runner.val_check_interval=2"),
    "reward_model": ("data.prompts_per_step=4", "runner.val_check_interval=2"),
    "embodied": ("algorithm.update_epochs=1",),
    "off_policy": ("algorithm.rollout_steps=256", "algorithm.replay_buffer.min_buffer_size=500", "actor.global_batch_size=16"),
    "bc": ("runner.val_check_interval=2", "env.eval.num_episodes=10", "algorithm.update_epochs=1"),
}  # fmt: skip
#: Further changes: what is smaller, and the last steps of runs that were cut short.
FURTHER = {
    "iql": ("algorithm.offline_steps=2", "algorithm.offline_updates=2", "env.eval.num_episodes=10",
            "algorithm.demo_buffer.load_path={runs}/sac-1/checkpoints/global_step_2"),
    **dict.fromkeys(
        ("dpo", "ipo", "reward_model", "regression"), ("actor.model.model_path={runs}/sums_sft/export/global_step_40",)
    ),
    "distillation": ("teacher.model.model_path={runs}/grpo-1/export/global_step_2",),
}  # fmt: skip


def commands_of(name: str) -> tuple[Sequence[str], list[str]]:
    """Returns the tasks that a task needs, and its commands; pairs and labels are of the model of one digit.

    That model is trained in seconds, and has few sums.
    """
    task = gallery.TASKS[name]
    commands = [re.sub(r"--episodes \d+", "--episodes 2", command) for command, _ in task.commands]
    if name not in ("pairs", "labels"):
        return task.needs, commands
    of_sums = [command.replace("demo_sft", "sums_sft").replace(" data.train.size=1200", "") for command in commands]
    return ("sums",), [command for command in of_sums if command.startswith("pairs ")]


class Tasks:
    """Tasks of the gallery, done in short in a folder, each once."""

    def __init__(self, runs: Path) -> None:
        self.runs, self.finished = runs, set[str]()

    def run(self, words: Sequence[str]) -> None:
        command = [sys.executable, "-m", "rlhpc.cli", *words]
        done = warm.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"

    def do(self, name: str) -> None:
        """Does a task after those that it needs."""
        if name in self.finished:
            return
        self.finished.add(name)
        needs, commands = commands_of(name)
        for needed in needs:
            self.do(needed)
        for command in commands:
            self.run(shlex.split(command.format(runs=self.runs)))
        if gallery.TASKS[name].config is not None:
            self.train(name)

    def train(self, name: str) -> None:
        """Trains a run to its second step; an SFT to its last."""
        task_type = load_config(gallery.CONFIGS / f"{gallery.TASKS[name].config}.yaml", check=False).runner.task_type
        words, run_name = gallery.build_training_commands(name, str(self.runs))[0]
        more = [word.format(runs=self.runs) for word in (*SMALL[task_type], *FURTHER.get(name, ()))]
        steps = [] if task_type == "sft" else ["runner.max_steps=2", "runner.save_interval=2"]
        self.run([*words[1:], *steps, *more])
        rows = [json.loads(row) for row in (self.runs / run_name / "metrics.jsonl").read_text().splitlines()]
        assert len(rows) == (2 if steps else 40)
        if (curve := gallery.TASKS[name].curve) is not None:
            assert any(curve.metric in row and curve.x[0] in row for row in rows), curve


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    need_extra("llm")
    return Tasks(tmp_path_factory.mktemp("gallery"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [name if name in MAIN else pytest.param(name, marks=pytest.mark.long) for name in TRAINED]
)
def test_a_minimal_configuration_trains_two_steps(tasks: Tasks, name: str) -> None:
    """With its own settings, but for sizes."""
    tasks.do(name)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_command_of_dagger_runs(tasks: Tasks) -> None:
    """Each round is evaluated."""
    tasks.do("dagger")
    for number in range(gallery.TASKS["dagger"].num_rounds + 1):
        assert '"eval/return_mean"' in (tasks.runs / f"dagger-1-round{number}/metrics.jsonl").read_text()


def test_the_rounds_of_a_run_are_one_curve(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"a-round{number}").mkdir()
        rows = [{"step": step, "eval/return_mean": 10.0 * number + step} for step in (1, 2)]
        (tmp_path / f"a-round{number}/metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rows = gallery._read_rows(tmp_path / "a-round2", 2)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["eval/return_mean"] for row in rows] == [1.0, 2.0, 11.0, 12.0, 21.0, 22.0]
    assert [row["step"] for row in gallery._read_rows(tmp_path / "a-round1", 0)] == [1, 2]
