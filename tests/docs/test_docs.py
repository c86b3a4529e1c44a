"""The documentation is kept true: links resolve, names exist, commands and code blocks run."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import rlhpc
from rlhpc import reference
from rlhpc.cli import build_parser
from rlhpc.config.schema import Schema
from rlhpc.config.sections import RunConfig
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.segment import SegmentJournal
from rlhpc.runs.configuration import load_config
from rlhpc.runs.sweep import load_sweep
from rlhpc.runs.task_type import all_task_types
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.placement import HybridComponentPlacement
from tests import warm
from tests.extras import need_extra
from tests.warm.commands import Commands

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "config" / "README.md", *DOCS.rglob("*.md")])
#: Pages whose commands and code run here, from top to bottom.
RUNNABLE = sorted(
    [
        *DOCS.glob("how-to/add-*.md"),
        *(
            DOCS / f"how-to/{name}.md"
            for name in (
                "distil",
                "python-api",
                "extend",
                "loggers",
                "port-from-rlinf",
                "resume",
                "train-from-python",
                "train-dpo",
                "train-reward-model",
            )
        ),
    ]
)
#: Those of them that train language models.
LANGUAGE = ("add-algorithm.md", "distil.md", "train-dpo.md", "train-reward-model.md")
SMALL = (
    "runner.max_steps=2", "runner.segments=1", "runner.save_interval=1", "algorithm.rollout_steps=32",
    "algorithm.update_epochs=1", "env.eval.num_episodes=2",
)  # fmt: skip
#: The same of a language model; a kind of run of one's own has only the first three.
SMALL_LANGUAGE = (*SMALL[:3], "data.prompts_per_step=4", "algorithm.group_size=2", "actor.global_batch_size=8")
#: The same of the pages on pairs, which first make their data: sums of one digit, which a few steps teach.
EASY = (
    "'data.train.kwargs={digits: 1}' data.train.size=null "
    "'data.eval=[{name: held_out, source: arithmetic, kwargs: {digits: 1}}]'"
)
SMALL_PAIRS = (
    'rlhpc() { case "$1 $2" in *demo_sft.yaml) command rlhpc "$@" runner.max_steps=30 runner.save_interval=30 '
    f'data.prompts_per_step=64 {EASY};; pairs*) command rlhpc "$@" {EASY};; *reward_model.yaml|*dpo.yaml) '
    'command rlhpc "$@" $SMALL actor.model.model_path=runs/demo_sft/export/global_step_30 data.prompts_per_step=8;; '
    '*) command rlhpc "$@";; esac; }\n'
    "set -e\n"
)
SHELL = 'rlhpc() { case "$1" in train|plan|run) command rlhpc "$@" $SMALL;; *) command rlhpc "$@";; esac; }\nset -e\n'


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def all_blocks(page: Path) -> list[tuple[str, str]]:
    """(language, content) of the fenced blocks, in order."""
    return re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [content for kind, content in all_blocks(page) if kind == language]


@pytest.fixture(scope="module")
def commands() -> Iterator[None]:
    """What the pages' shells call rlhpc and python."""
    with Commands() as commands, pytest.MonkeyPatch.context() as patch:
        for name, value in commands.environment.items():
            patch.setenv(name, value)
        yield


def run(command: list[str], folder: Path, timeout_s: int = 240, **environment: str) -> str:
    """Runs a command that must succeed; returns stdout."""
    done = warm.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s,
                    env={**os.environ, **environment})  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


#: Sections of the site's navigation, in order.
SECTIONS = [
    "Start",
    "Algorithms",
    "Language models",
    "Robots",
    "Agents",
    "On a cluster",
    "Extend",
    "Help",
    "Reference",
    "Explanation",
    "Decisions",
]


def navigation() -> dict[str, list[str]]:
    """Returns the pages of each section of the site, in order."""
    (nav,) = re.findall(r"^nav:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.M)
    return {name: pages for section in yaml.safe_load(nav)["nav"] for name, pages in section.items()}


def test_the_navigation_has_every_page_once():
    nav = navigation()
    assert list(nav) == SECTIONS
    placed = [page for pages in nav.values() for page in pages]
    assert sorted(placed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_index_has_the_sections_and_pages_of_the_navigation():
    text = (DOCS / "README.md").read_text()
    index = {
        title: re.findall(r"^(?:- |)\[[^]]*\]\(([^)#]+\.md)\)", content, re.M)
        for title, content in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    }
    nav = navigation()
    nav["Start"].remove("README.md")
    nav["Decisions"] = nav["Decisions"][:1]
    assert index == nav
    decisions = re.findall(r"\]\((\d+-[^)]+\.md)\)", (DOCS / "decisions/README.md").read_text())
    assert ["README.md", *decisions] == [Path(page).name for page in navigation()["Decisions"]]
    assert "docs/README.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_and_commands_exist(page):
    keys = {key for kind in all_task_types() for key in Schema(kind.config, kind.name).keys}
    sections = {key.rsplit(".", i)[0] for key in keys for i in (1, 2, 3)}
    commands = set(build_parser()._subparsers._group_actions[0].choices)
    text = page.read_text()
    names = "data|reward|runner|algorithm|env|rollout|actor|cluster|workflow|judge"
    pattern = rf"(?<![\w.])((?:{names})\.[a-z_]+(?:\.[a-z_]+)*)(?==|`)"
    for key in re.findall(pattern, text) if page.name != "rlinf-files.md" else ():  # half of its keys are RLinf's
        known = key in keys | sections or any(key.startswith(k + ".") for k in keys)
        assert known or key.endswith(".json"), f"{page.name}: no key {key}"
    typed = [
        *re.findall(r"^rlhpc ([a-z][a-z-]*[a-z])", "\n".join(blocks(page, "bash")), re.M),
        *re.findall(r"`rlhpc ([a-z][a-z-]*[a-z])", text),
    ]
    for command in typed:
        assert command in commands, f"{page.name}: no command rlhpc {command}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_the_project_exist(page):
    for name in re.findall(
        r"(?<![\w/….<>~-])((?:configs|profiles|examples|tests)/[\w/.+-]*\w|(?:rlhpc|bench)/[\w/]+\.py)",
        page.read_text(),
    ):
        own = name.startswith(("configs/mine", "configs/site/mycluster")) or name == "configs/site"
        own = own or any((project / name).exists() for project in (ROOT / "examples/projects").glob("*/*"))
        assert own or (ROOT / name).exists(), f"{page.name}: {name}"


def definitions(path: Path) -> set[str]:
    """Returns the classes and functions of a module, and the methods of its classes as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names |= {node.name, *(f"{node.name}.{inner.name}" for inner in node.body if hasattr(inner, "name"))}
    return names


def test_the_drawings_of_a_step_name_classes_in_their_files():
    """Methods may be inherited."""
    nodes = re.findall(r'\["([^"]*)<br/>([^"]*)"\]', (DOCS / "explanation/architecture.md").read_text())
    assert len(nodes) > 20
    for label, paths in nodes:
        names = set().union(*(definitions(ROOT / "rlhpc" / path) for path in paths.split(", ")))
        mentioned = re.findall(r"[A-Z]\w+[a-z]\w*(?:\.\w+)?|\w+_\w+", label.replace("load balance, ", ""))
        assert mentioned, label
        for name in mentioned:
            owner, _, method = name.partition(".")
            assert owner in names, f"{paths}: {owner}"
            assert not method or any(known.endswith(f".{method}") for known in names), f"{paths}: {name}"


def test_the_classes_of_the_architecture_exist():
    classes = set()
    for path in (ROOT / "rlhpc").rglob("*.py"):
        classes |= definitions(path)
    text = re.sub(r"```.*?```", "", (DOCS / "explanation/architecture.md").read_text(), flags=re.S)
    mentioned = set(re.findall(r"`([A-Z][a-z]\w+)`", text))
    assert len(mentioned) > 15
    assert mentioned <= classes


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_import_paths_exist(page):
    """Checks modules below a package of rlhpc, and the name that follows; `rlhpc.scorers` is a group of entry points."""
    for dotted in re.findall(r"\brlhpc\.((?:[a-z_]+\.?)+:?[A-Z]?\w*)", page.read_text()):
        package, *rest = re.split("[.:]", dotted.rstrip("."))
        path = ROOT / "rlhpc" / package
        if not path.is_dir():
            continue
        while rest and (path / rest[0]).is_dir():
            path /= rest.pop(0)
        path = path / f"{rest.pop(0)}.py" if rest and (path / f"{rest[0]}.py").is_file() else path / "__init__.py"
        assert not rest or re.search(rf"\b{rest[0]}\b", path.read_text()), f"{page.name}: rlhpc.{dotted}"


def uses_a_gpu(cfg: RunConfig) -> bool:
    """Returns whether a rank of the run uses a GPU on nodes that have enough of them."""
    cluster = Cluster.planned(cfg.cluster, {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(32)))})
    placements = HybridComponentPlacement(cfg, cluster).placements()
    return any(rank.accelerators for ranks in placements.values() for rank in ranks)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=name_of)
def test_yaml_is_part_of_a_configuration(page, tmp_path):
    """Of one in `configs/mine`; where it does not say, of a kind of run that has its keys."""
    for name in ("base", "algorithms", "quickstart.yaml"):
        (tmp_path / name).symlink_to(ROOT / "configs" / name)
    (tmp_path / "mine").mkdir()
    for content in blocks(page, "yaml"):
        refused = []
        for base in (
            "quickstart",
            "embodied/pendulum_sac",
            "embodied/push_cube_bc",
            "reasoning/demo",
            "reasoning/demo_sft",
            "reasoning/reward_model",
            "reasoning/dpo",
        ):
            own = "" if re.search("^defaults:", content, re.M) else f"defaults: [{ROOT}/configs/{base}.yaml]\n"
            (tmp_path / "mine/page.yaml").write_text(own + content)
            try:
                if load_sweep(tmp_path / "mine/page.yaml") is None:
                    cfg = load_config(tmp_path / "mine/page.yaml", check=False)
                    assert "configs/site/" in content or uses_a_gpu(cfg) or "accelerators_per_node: 0" in content, (
                        content
                    )
                break
            except ConfigError as error:
                refused.append(str(error))
        else:
            raise AssertionError("\n".join(refused))


# -- reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "render"), reference.PAGES.items(), ids=list(reference.PAGES))
def test_generated_pages_are_current(page, render):
    assert (DOCS / "reference" / f"{page}.md").read_text() == render(), "run: make docs-reference"


def test_the_runtime_page_has_every_name():
    text = (DOCS / "reference/runtime.md").read_text()
    for name in rlhpc.__all__:
        assert getattr(rlhpc, name) is not None
        assert f"### {name}\n" in text or f"| `{name}` |" in text, name


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("commands")
def test_the_runtime_pages_script_runs(tmp_path):
    (script,) = blocks(DOCS / "reference/runtime.md", "python")
    (tmp_path / "script.py").write_text(script)
    run([sys.executable, "script.py"], tmp_path)


@pytest.fixture(scope="module")
def tiny_run(commands, tmp_path_factory) -> Path:
    """The folder of a small run with everything that a run leaves by itself and by the commands after it."""
    folder = tmp_path_factory.mktemp("run")
    train = ["rlhpc", "train", str(ROOT / "configs/quickstart.yaml"), *SMALL, "runner.val_check_interval=1"]
    run([*train, "--segment", "0"], folder)
    for command in ("eval --run runs/quickstart", "convert --run runs/quickstart",
                    "report runs/quickstart --curves runs/quickstart/report/curves"):  # fmt: skip
        run(["rlhpc", *command.split()], folder)
    return folder / "runs" / "quickstart"


@pytest.mark.timeout(300)
def test_every_metric_is_documented(tiny_run):
    text = (DOCS / "reference/metrics.md").read_text().split("## Language models")[0]
    documented = set(re.findall(r"^\| `([a-z]+/\w+)` \|", text, re.M))
    rows = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    logged = {name for row in rows for name in row} - {"step"}
    # CartPole has no success, and no simulator of its own that could fail; and no rank of this run dies.
    sometimes = {f"eval/success_{when}" for when in ("once", "at_end")} | {"env/restarts"}
    sometimes |= {"train/success_once", "rollout/success_once"} | {
        f"env/lost_{what}" for what in ("ranks", "steps", "episodes")
    }
    # Its simulators are on the CPU.
    sometimes.add("env/on_device")
    # And are no robots.
    sometimes |= {f"env/robot_{what}" for what in ("late", "dropped", "held", "lost", "refused", "stopped", "missed")}
    # Nobody helps its policy.
    sometimes |= {"rollout/intervention_rate", "rollout/helped_episodes"}
    # Nobody joins it.
    sometimes.add("env/joined_transitions")
    # Its weights travel through the host, and it filters no groups.
    sometimes |= {f"time/weights_by_{transport}" for transport in ("ipc", "nccl", "gloo")} | {"env/filtered"}
    # All of its numbers are finite, and its loss is ppo.
    sometimes |= {
        "env/nonfinite",
        "env/nonfinite_episodes",
        "env/failed",
        "eval/nonfinite",
        "train/nonfinite_skipped",
        "train/empty_minibatches",
        "train/behave_weight",
    }
    assert documented - sometimes == logged - sometimes
    assert sometimes <= documented


def documented_files() -> list[re.Pattern[str]]:
    """The paths in the tables of the run folder's page; `<N>` and `<k>` are numbers, other `<…>` names."""
    found = []
    for path in re.findall(r"^\| `([^`]+)` \|", (DOCS / "reference/run-folder.md").read_text(), re.M):
        pattern = re.escape(path)
        pattern = re.sub(r"<(N|k|n|rank)>", r"\\d+", pattern)
        pattern = re.sub(r"<[a-z -]+>", r"[^/]+", pattern.replace("\\-", "-").replace("\\ ", " "))
        pattern = re.sub(r"\\{([^}]*)\\}", lambda m: "(" + m.group(1).replace(",", "|") + ")", pattern)
        found.append(re.compile(pattern + (".*" if path.endswith("/") else "")))
    return found


@pytest.mark.timeout(300)
def test_every_file_of_a_run_is_documented(tiny_run):
    patterns = documented_files()
    files = [str(path.relative_to(tiny_run)) for path in tiny_run.rglob("*") if path.is_file()]
    segment = SegmentJournal(RunPaths(tiny_run), 0)
    files += [
        str(path.relative_to(tiny_run))
        for path in (segment.record, segment.exit, segment.attempts, segment.cancel, segment.lease,
                     segment.claim(1), segment.driver_out, segment.driver_err, segment.marker)
    ]  # fmt: skip
    unknown = [name for name in files if not any(pattern.fullmatch(name) for pattern in patterns)]
    assert not unknown
    assert len(files) > 40


def test_the_fields_of_json_files_are_documented(tiny_run):
    text = (DOCS / "reference/run-folder.md").read_text()
    sections = dict(re.findall(r"^## `([^`\n]+)`\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    where = {
        "metrics.jsonl": None,
        "status.json": tiny_run / "status.json",
        "provenance.json": tiny_run / "provenance.json",
        "segments/<k>.json": tiny_run / "segments/0.json",
        "checkpoints/global_step_<N>/": tiny_run / "checkpoints/global_step_2/manifest.json",
        "eval/global_step_<N>/<suite>.json": tiny_run / "eval/global_step_2/default.json",
        "export/global_step_<N>/": tiny_run / "export/global_step_2/config.json",
    }
    for heading, file in where.items():
        assert heading in sections, heading
        for field in json.loads(file.read_text()) if file else ():
            assert f"`{field}`" in sections[heading], f"{heading}: {field}"


# -- README -----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("title", "extra"), [("A language model by GRPO", "llm"), ("A robot policy by PPO", "embodied")]
)
@pytest.mark.usefixtures("commands")
def test_the_examples_of_the_readme_run(title, extra, tmp_path):
    """Runs a section's commands on the files that it shows, with few and small steps."""
    need_extra(extra)
    (section,) = re.findall(rf"^## {title}\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)
    (tmp_path / "configs" / "mine").mkdir(parents=True)
    for path in (ROOT / "configs").iterdir():
        (tmp_path / "configs" / path.name).symlink_to(path)
    small = SMALL[:3] if extra == "llm" else SMALL
    for language, content in re.findall(r"```(\w+)\n(.*?)```", section, re.S):
        if language == "bash":
            run(["bash", "-c", SHELL + content], tmp_path, SMALL=" ".join(small), PYTHONPATH="")
        else:
            (tmp_path / re.findall(r"\A# ([\w./]+)\n", content)[0]).write_text(content)
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 2


# -- tutorial and how-to ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("commands")
def test_the_tutorials_commands_run_in_order(tmp_path):
    """Every block of the tutorial, from the first to the last, in a folder of its own, with few and small steps."""
    page = DOCS / "tutorial/quickstart.md"
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    recipe = re.search(r"^quickstart: setup .*\n\t(.*)\n", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None and recipe[1] == "rlhpc run $(RUN)"
    made = 'make() { [ "$1" = quickstart ] && rlhpc run configs/quickstart.yaml; }\n'
    said = ""
    for language, content in all_blocks(page):
        if language == "bash":
            said += run(["bash", "-c", SHELL + made + content], tmp_path, SMALL=" ".join(SMALL))
        else:
            assert language == "python"
            said += run([sys.executable, "-c", content], tmp_path)
    assert re.search(r"quickstart: done in .*, mean return [\d.]+ \(95 % interval", said)
    assert "[rollout-0]" in said and "acts with mlp on cpu for" in said  # the group's log is not empty
    assert re.search(r"^return \d+$", said, re.M)


#: Tutorials that run here, and what makes their training short; the policy of a robot learns in seconds as it is.
TUTORIALS = {
    "first-language-model.md": (
        *SMALL_LANGUAGE,
        "workflow.sft_overrides=[runner.name=demo-sft,runner.max_steps=2,runner.save_interval=2,data.prompts_per_step=32]",
    ),
    "own-reward.md": SMALL_LANGUAGE,
    "own-environment.md": (),
    "own-algorithm.md": SMALL_LANGUAGE,
}
#: Output that a tutorial's commands and code must have printed at the end.
RESULTS = {
    "first-language-model.md": r"demo: done in .*accuracy(.|\n)*^train/reward .* -> (.|\n)*pass\.json(.|\n)*^answer: ",
    "own-reward.md": r"grpo: done in .*accuracy(.|\n)*pass\.json(.|\n)*^answer: ",
    "own-environment.md": r"ppo: done in .*success(.|\n)*seed7(.|\n)*^(not )?reached$",
    "own-algorithm.md": r"10 passed(.|\n)*anchored: done in(.|\n)*^2\n1,[\d.]+\n2,[\d.]+$",
}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TUTORIALS)
@pytest.mark.usefixtures("commands")
def test_a_tutorial_runs_from_its_first_command_to_its_last(name, tmp_path):
    """Each command is executed as it stands, in the folder and with the module path that those before it left."""
    if TUTORIALS[name]:
        need_extra("llm")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    output, folder = "", tmp_path
    environment = {"SMALL": " ".join(TUTORIALS[name]), "PYTHONPATH": ""}
    environment["PATH"] = f"{os.environ['PATH']}:{Path(sys.executable).parent}"
    for language, content in all_blocks(DOCS / "tutorial" / name):
        if language == "bash":
            state = f'\nprintf "%s\\n%s" "$PWD" "$PYTHONPATH" > {tmp_path}/state'
            output += run(["bash", "-c", SHELL + content + state], folder, 600, **environment)
            where, environment["PYTHONPATH"] = (tmp_path / "state").read_text().split("\n")
            folder = Path(where)
        elif file := re.match(r"# ([\w.]+)\n", content):
            (folder / file[1]).write_text(content)
        else:
            assert language == "python"
            output += run([sys.executable, "-c", content], folder, **environment)
    assert re.search(RESULTS[name], output, re.M), output


@pytest.mark.parametrize("path", sorted((DOCS / "tutorial").glob("*.md")), ids=name_of)
def test_every_tutorial_is_executed(path):
    """That of a cluster runs on the test cluster: `tests/slurm/test_tutorial.py`."""
    assert path.name in TUTORIALS or path.name in ("quickstart.md", "first-cluster-run.md")


def install(project: str, folder: Path) -> None:
    """What `pip install -e` leaves of a project: its name and its entry points, beside its modules."""
    content = tomllib.loads(project)["project"]
    info = folder / f"{content['name'].replace('-', '_')}-{content['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {content['name']}\nVersion: {content['version']}\n")
    points = configparser.ConfigParser()
    points.read_dict(content["entry-points"])
    with (info / "entry_points.txt").open("w") as file:
        points.write(file)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
@pytest.mark.usefixtures("commands")
def test_the_pages_commands_and_code_run(page, tmp_path):
    """Blocks that begin with `# name.py` are files; the others run, in order. Training takes few and small steps."""
    if page.name in LANGUAGE:
        need_extra("llm")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    small = {
        "add-kind.md": SMALL[:3], "add-algorithm.md": SMALL_LANGUAGE, "distil.md": SMALL_LANGUAGE,
        "train-dpo.md": SMALL[:3], "train-reward-model.md": SMALL[:3],
    }.get(page.name, SMALL)  # fmt: skip
    shell = SMALL_PAIRS if page.name in ("train-dpo.md", "train-reward-model.md") else SHELL
    environment = {"SMALL": " ".join(small), "PYTHONPATH": str(tmp_path)}
    for language, content in all_blocks(page):
        named = re.match(r"# ([\w.]+)\n", content)
        if named:
            (tmp_path / named.group(1)).write_text(content)
            if named.group(1) == "pyproject.toml":
                install(content, tmp_path)
        elif language == "bash":
            if "export PYTHONPATH=" in content or page.name == "resume.md":
                run(["bash", "-c", shell + content], tmp_path, **{**environment, "PYTHONPATH": ""})
            else:
                run(["bash", "-c", shell + content], tmp_path, **environment)
        elif language == "python":
            run([sys.executable, "-c", content], tmp_path, **environment)
        elif language != "yaml":  # test_yaml_is_part_of_a_configuration
            pytest.fail(f"{page.name}: a block of {language} that no test runs")
