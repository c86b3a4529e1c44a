"""Bad input through the real command line: one message, exit code 2, nothing left behind."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhpc import cli
from rlhpc.config import config_to_yaml
from rlhpc.runs.configuration import load_config

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
DEMO = ROOT / "configs" / "reasoning" / "demo.yaml"
INCLUDE = f"defaults: [{QUICKSTART}]\n"
#: Should a check be lost one day, its case trains one step only.
SHORT = ("runner.max_steps=1", "runner.segments=1", "runner.save_interval=-1")
TOGETHER = "cluster.component_placement="


@dataclass(frozen=True)
class Case:
    """One kind of bad input.

    Attributes:
        name: What is wrong.
        says: Texts that the message must have: what was found, where, what is allowed.
        overrides: Given after the file.
        file: Content of the configuration; None for the quickstart's.
    """

    name: str
    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    file: str | bytes | None = None


def override(name: str, text: str, *says: str) -> Case:
    return Case(name, says, (text,))


def content(name: str, text: str | bytes, *says: str) -> Case:
    return Case(name, ("c.yaml", *says), file=text)


CASES = [
    override(
        "accelerators that are not there",
        "cluster.accelerators_per_node=8",
        "cluster.accelerators_per_node is 8",
        "this machine",
        "cluster.accelerators_per_node=0",
    ),
    # Keys and types.
    content(
        "misspelt key",
        INCLUDE + "algorithm: {gama: 0.9}\n",
        "unknown key algorithm.gama",
        "did you mean algorithm.gamma?",
    ),
    content("misspelt section", INCLUDE + "algorithms: {gamma: 0.9}\n", "did you mean algorithm?", "cluster, runner"),
    override("misspelt key in an override", "runner.max_step=3", "override 'runner.max_step=3'", "runner.max_steps"),
    override("key of another project", "actor.optim.learning_rate=1", "did you mean actor.optim.lr?"),
    override("key without its section", "lr=1", "did you mean actor.optim.lr?"),
    content("wrong type", INCLUDE + "runner: {max_steps: many}\n", "runner.max_steps is 'many'", "must be int"),
    override("wrong type in an override", "runner.max_steps=many", "override", "must be int"),
    override("fraction for a count", "env.train.num_envs=1.5", "env.train.num_envs is 1.5", "must be int"),
    override("yes for a count", "env.train.num_envs=true", "must be int"),
    override("word for a switch", "algorithm.anneal_lr=maybe", "must be bool"),
    override("number for a list", "actor.model.hidden_sizes=64", "list[int]"),
    override("word in a list of numbers", "actor.model.hidden_sizes=[a]", "list[int]"),
    override(
        "number for a section",
        "actor.optim=5",
        "actor.optim is 5",
        "is a section with the keys value_lr, critic_warmup_steps, name, lr",
    ),
    override("mapping for a number", "runner.seed={a: 1}", "runner.seed is {'a': 1}", "must be int"),
    override("key below a number", "runner.seed.x=1", "runner.seed", "must be int"),
    override("null for a count", "env.train.num_envs=null", "must be int"),
    override("override without =", "runner.max_steps", "write key=value"),
    override("override as an option", "--runner.max_steps=3", "unknown argument", "--help"),
    override("override with an empty part", "env.train.kwargs.=3", "env.train.kwargs.name=value"),
    override("override without a key", "=3", "write key=value"),
    override("override that is no YAML", "runner.name=[a", "not valid YAML"),
    override("reference to nothing", "runner.name=${nosuch}", "runner.name", "nosuch"),
    override("environment variable that is not set", "runner.run_dir=${oc.env:NO_SUCH_X}", "NO_SUCH_X"),
    # Numbers.
    override("negative count", "env.train.num_envs=-8", "greater than 0"),
    override("zero", "algorithm.rollout_steps=0", "greater than 0"),
    override("not a number", "actor.optim.lr=nan", "finite"),
    override("infinite", "actor.optim.lr=.inf", "finite"),
    override("integer too large", "env.train.num_envs=99999999999999999999999", "must not be greater than"),
    override("seed too large", "runner.seed=4294967296", "4294967295"),
    override("discount above 1", "algorithm.gamma=1.5", "between 0 and 1"),
    override("dual clip below 1", "algorithm.clip_ratio_c=0.5", "above 1"),
    override("layer of width 0", "actor.model.hidden_sizes=[64, 0]", "greater than 0"),
    # Numbers that do not fit one another.
    override("stages do not divide", "rollout.pipeline_stage_num=3", "env.train.num_envs is 8", "(3)"),
    override("batch does not divide", "actor.global_batch_size=300", "env.train.num_envs(8)", "= 256"),
    override("micro batch does not divide", "actor.micro_batch_size=100", "global_batch_size (256)"),
    override("micro batch above the batch", "actor.micro_batch_size=512", "global_batch_size (256)"),
    override("group does not divide", "env.train.group_size=3", "env.train.group_size (3)"),
    override(
        "more ranks than slots", TOGETHER + "{actor: 0, rollout: 0, env: '0:0-8'}", "env gives 9 processes", "(8)"
    ),
    override("more segments than steps", "runner.segments=5", "more segments than training steps (1)"),
    Case("no length", ("max_steps", "max_epochs"), ("runner.max_steps=-1", "runner.max_epochs=-1")),
    # Names.
    override("unknown environment", "env.train.env_id=CartPol-v1", "env.train.env_id is 'CartPol-v1'", "CartPole-v1"),
    override("environment in a missing module", "env.train.env_id=nosuch:X-v0", "nosuch"),
    override("environment refuses an argument", "env.train.kwargs={nosuch: 1}", "nosuch"),
    override("unknown environment type", "env.train.env_type=gymnasum", "did you mean 'gymnasium'?"),
    override("wrapper that is not there", "env.train.wrappers=[nosuch:Wrap]", "wrappers", "nosuch"),
    override("unknown advantage", "algorithm.adv_type=gaee", "did you mean 'gae'?", "grpo"),
    override("unknown loss", "algorithm.loss_type=pppo", "did you mean 'ppo'?", "cispo"),
    override("unknown model", "actor.model.model_type=mpl", "did you mean 'mlp'?", "cnn"),
    override("model in a missing module", "actor.model.model_type=nosuch:Net", "nosuch"),
    override("argument that the model does not take", "actor.model.kwargs={width: 3}", "width", "critic_gain"),
    override("gain that is no size", "actor.model.kwargs={critic_gain: -1}", "critic_gain", "greater than 0"),
    override("model for other observations", "actor.model.model_type=cnn", "images"),
    override("unknown optimizer", "actor.optim.name=adm", "did you mean 'adam'?", "adamw"),
    override("unknown activation", "actor.model.activation=tahn", "did you mean 'tanh'?"),
    override("unknown backend", "actor.training_backend=locl", "did you mean 'local'?"),
    override("unknown logger", "runner.logger.logger_backends=[wandbb]", "did you mean 'wandb'?", "jsonl, mlflow"),
    override("logger that is not installed", "runner.logger.logger_backends=[wandb]", "pip install 'rlhpc[wandb]'"),
    override("arguments of no logger", "runner.logger.kwargs={wandbb: {}}", "did you mean 'wandb'?"),
    override("argument that a logger does not take", "runner.logger.kwargs={tensorboard: {x: 1}}", "allowed: none"),
    override("unknown task", "runner.task_type=embodid", "did you mean 'embodied'?"),
    override("name with a slash", "runner.name=a/b", "runner.name is 'a/b'", "letters, digits"),
    override("name that climbs", "runner.name=..", "letters, digits"),
    override("suite with a slash", "workflow.eval_suites=[a/b]", "letters, digits"),
    override(
        "suite of an unknown key", "workflow.suites={hard: [env.eval.nope=1]}", "workflow.suites.hard", "env.eval.nope"
    ),
    override("suite of words", "workflow.suites={hard: [nope]}", "workflow.suites.hard: override 'nope'", "key=value"),
    override("suite of an unknown task", "workflow.suites={hard: [env.eval.env_id=Nope-v1]}", "suites.hard", "Nope-v1"),
    Case(
        "suite in small letters",
        ("did you mean 'Hard'?",),
        ("workflow.suites={Hard: []}", "workflow.eval_suites=[hard]"),
    ),
    override("endless value", "runner.name=" + "a" * 100_000, "runner.name is 'aaa", "(100002 characters)"),
    override("endless key", "a" * 100_000 + "=1", "unknown key aaa", "(100000 characters)"),
    override("endless name of a folder", "runner.run_dir=/tmp/" + "a" * 300, "runner.run_dir", "300 bytes"),
    # Placement.
    override("resource twice", TOGETHER + "{actor: '0,0', rollout: 0, env: 0}", "actor", "unique and ascending"),
    override(
        "resource that does not exist", TOGETHER + "{actor: 7, rollout: 0, env: 0}", "actor", "7", "does not exist"
    ),
    override("placement of words", TOGETHER + "{actor: first, rollout: 0, env: 0}", "'first'", "0-3"),
    override("component twice", TOGETHER + "{'actor,rollout': 0, 'actor,env': 0}", "actor", "placed twice"),
    override("component missing", TOGETHER + "{actor: 0, rollout: 0}", "no component 'env'"),
    override("unknown component", TOGETHER + "{'actor,rollout,env': 0, evn: 0}", "evn", "did you mean 'env'?"),
    override("unknown node group", TOGETHER + "{'actor,rollout': 0, env: {node_group: cpu, placement: 0}}", "'cpu'"),
    override("reserved label", "cluster.node_groups=[{label: node}]", "reserved"),
    override("node group without label", "cluster.node_groups=[{node_ranks: 0}]", "node_groups[0].label is missing"),
    override("misspelt key of a node group", "cluster.node_groups=[{label: a, partion: x}]", "[0].partition?"),
    override(
        "wrong type in a node group", "cluster.node_groups=[{label: a, num_nodes: two}]", "[0].num_nodes is 'two'"
    ),
    override("negative count in a node group", "cluster.node_groups=[{label: a, num_nodes: -1}]", "greater than 0"),
    override(
        "walltime of words", "cluster.node_groups=[{label: a, time: 2 hours}]", "[0].time is '2 hours'", "02:00:00"
    ),
    override("memory of words", "cluster.node_groups=[{label: a, mem: lots}]", "[0].mem is 'lots'", "64G"),
    override(
        "directive that breaks its line", 'cluster.node_groups=[{label: a, partition: "a\\n#SBATCH x"}]', "one word"
    ),
    override("more nodes than there are", "cluster.num_nodes=3", "cluster.num_nodes"),
    # Files.
    content("empty file", "", "is empty", "quickstart"),
    content("comments only", "# later\n", "is empty"),
    content("list at the top", "- a\n- b\n", "found a list"),
    content("word at the top", "hello\n", "found a str"),
    content("YAML syntax", "runner: {name: a\nenv: 3\n", "line 2, column"),
    content("tab", "runner:\n\tname: a\n", "line 2, column 1", r"'\t'"),
    content("key twice", INCLUDE + "runner:\n  seed: 1\n  seed: 2\n", "line 4, column 3", "'seed' is given twice"),
    content("list as a key", "? [a, b]\n: 1\n", "line 1", "key"),
    content("Python object", "runner: !!python/object/apply:os.getcwd []\n", "line 1, column 9"),
    content("brackets without end", "a: " + "[" * 5000, "nested too deeply"),
    override("brackets without end in an override", "runner.max_steps=" + "[" * 5000, "nested too deeply"),
    override("wrapper that is no class", "env.train.wrappers=[math:pi]", "'math:pi'", "no class"),
    override("environment type that is no class", "env.train.env_type=math:pi", "'math:pi'", "no class"),
    override("model that is no class", "actor.model.model_type=math:pi", "'math:pi'", "no class"),
    content("two documents", "a: 1\n---\nb: 2\n", "another document"),
    content("not text", b"\x00\x01\xff\xfe", "cannot be read"),
    content("section left empty", INCLUDE + "actor:\n", "actor is None", "is a section"),
    content("nothing to train on", "runner: {name: x}\n", "env.train.env_id is missing", "env.train.env_id="),
    content("include that is not there", "defaults: [nosuch.yaml]\n", "c.yaml: defaults: no configuration file"),
    content("include of itself", "defaults: [c.yaml]\n", "circle", "c.yaml → c.yaml"),
    content("includes that are no list", "defaults: 5\n", "give a list of files"),
    # Folders.
    override("checkpoint that is not there", "runner.resume_dir=/no/such/global_step_3", "no such checkpoint", "auto"),
    override("file for a checkpoint", f"runner.resume_dir={QUICKSTART}", "no such checkpoint"),
]


@dataclass(frozen=True)
class Outcome:
    code: int
    err: str
    out: str = ""


class Terminal:
    """Runs `rlhpc` in this process and looks at what it leaves in its run folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys, self.runs = folder, capsys, folder / "runs"

    def train(self, config: str | Path, *overrides: str) -> Outcome:
        return self("train", str(config), f"runner.run_dir={self.runs}", *SHORT, *overrides)

    def __call__(self, *argv: str) -> Outcome:
        self.capsys.readouterr()
        try:
            code = cli.main(argv)
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            code = ended.code
        said = self.capsys.readouterr()
        return Outcome(code, said.err, said.out)

    def process(self, before: Sequence[str] = (), config: str | Path = QUICKSTART, *overrides: str) -> Outcome:
        """`train` as a process of its own, behind the words of another command."""
        words = ["train", str(config), f"runner.run_dir={self.runs}", *SHORT, *overrides]
        ended = subprocess.run(
            [*before, sys.executable, "-m", "rlhpc.cli", *words],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.folder,
            check=False,
        )
        return Outcome(ended.returncode, ended.stderr, ended.stdout)


@pytest.fixture
def rlhpc(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("RLHPC_DEBUG", raising=False)
    return Terminal(tmp_path, capsys)


def refused(outcome: Outcome, *says: str) -> None:
    """One message, of the user's making."""
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err
    assert outcome.err.startswith("rlhpc: error: ") and outcome.err.count("rlhpc: error:") == 1, outcome.err
    assert outcome.err.endswith("\n") and len(outcome.err) < 1500
    for text in says:
        assert text in outcome.err, f"{text!r} not in: {outcome.err}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_refused_before_anything_is_written(case: Case, rlhpc: Terminal) -> None:
    config = QUICKSTART
    if case.file is not None:
        config = rlhpc.folder / "c.yaml"
        config.write_bytes(case.file if isinstance(case.file, bytes) else textwrap.dedent(case.file).encode())
    before = sorted(rlhpc.folder.rglob("*"))
    refused(rlhpc.train(config, *case.overrides), *case.says)
    assert sorted(rlhpc.folder.rglob("*")) == before


def test_there_are_enough_kinds() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 26


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (str(QUICKSTART.parent / "quikstart.yaml"), ("no configuration file", "did you mean", "quickstart.yaml?")),
        ("/no/such/folder/c.yaml", ("no configuration file /no/such/folder/c.yaml",)),
        (str(QUICKSTART.parent), ("is a folder",)),
    ],
    ids=["misspelt", "folder-missing", "folder"],
)
def test_configuration_that_is_not_there(path: str, says: tuple[str, ...], rlhpc: Terminal) -> None:
    refused(rlhpc.train(path), *says)
    assert not rlhpc.runs.exists()


def test_environment_of_an_extra_that_is_not_installed(rlhpc: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "mujoco" or "envs.mujoco" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    refused(rlhpc.train(QUICKSTART, "env.train.env_id=HalfCheetah-v5"), "HalfCheetah-v5", "pip install", "embodied")
    assert not rlhpc.runs.exists()


class TestRunFolder:
    """Where nothing can be written."""

    def test_below_a_file(self, rlhpc: Terminal) -> None:
        (rlhpc.folder / "runs").write_text("mine")
        refused(rlhpc.train(QUICKSTART), "runner.run_dir", "is a file, not a folder")
        assert (rlhpc.folder / "runs").read_text() == "mine"

    def test_the_runs_name_is_a_file(self, rlhpc: Terminal) -> None:
        rlhpc.runs.mkdir()
        (rlhpc.runs / "quickstart").write_text("mine")
        refused(rlhpc.train(QUICKSTART), "is a file, not a folder")
        assert [path.name for path in rlhpc.runs.iterdir()] == ["quickstart"]

    @pytest.mark.skipif(not Path("/proc/1").is_dir(), reason="needs /proc")
    def test_on_a_filesystem_that_takes_no_files(self, rlhpc: Terminal) -> None:
        refused(rlhpc.train(QUICKSTART, "runner.run_dir=/proc/rlhpc"), "runner.run_dir", "/proc")

    def test_without_permission(self, rlhpc: Terminal) -> None:
        rlhpc.runs.mkdir(mode=0o500)
        drop = "-dac_override,-dac_read_search"
        # root without the capabilities that let it write everywhere
        limits = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"] if os.geteuid() == 0 else []
        refused(rlhpc.process(limits), "runner.run_dir", "not writable")
        assert list(rlhpc.runs.iterdir()) == []

    @pytest.mark.parametrize(
        ("options", "says"), [("size=64k", "is full"), ("ro", "read-only")], ids=["full", "read-only"]
    )
    def test_mounted(self, options: str, says: str, rlhpc: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        rlhpc.runs.mkdir()
        mount = f"mount -t tmpfs -o {options} tmpfs {shlex.quote(str(rlhpc.runs))}"
        namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
        if subprocess.run([*namespace, mount], capture_output=True, check=False).returncode == 0:
            # the mount is gone with its namespace: what the run left is looked for within
            look = f'{mount} && {{ "$@"; code=$?; ls -A {shlex.quote(str(rlhpc.runs))}; exit $code; }}'
            outcome = rlhpc.process([*namespace, look, "sh"])
        else:  # where nothing may be mounted (most containers) the system call answers as it would
            real = os.statvfs(rlhpc.runs)
            full = {"f_bavail": 0, "f_bfree": 0} if "size" in options else {"f_flag": real.f_flag | os.ST_RDONLY}
            names = [name for name in dir(real) if name.startswith("f_")]
            answer = SimpleNamespace(**{name: getattr(real, name) for name in names} | full)
            monkeypatch.setattr(os, "statvfs", lambda path: answer)
            outcome = rlhpc.train(QUICKSTART)
        refused(outcome, "runner.run_dir", says)
        assert outcome.out == "" and list(rlhpc.runs.iterdir()) == []

    def test_a_run_that_exists_is_not_overwritten(self, rlhpc: Terminal) -> None:
        checkpoint = rlhpc.runs / "quickstart" / "checkpoints" / "global_step_3"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMPLETE").touch()
        before = sorted(rlhpc.runs.rglob("*"))
        refused(rlhpc.train(QUICKSTART), "has checkpoints already", "runner.resume_dir=auto", "runner.name")
        assert sorted(rlhpc.runs.rglob("*")) == before


class TestOtherCommands:
    """What is no configuration."""

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (("trian",), "there is no command 'trian'; did you mean rlhpc train?"),
            (("train",), "config"),
            (("train", str(QUICKSTART), "--sgment", "1"), "--sgment"),
            (("train", str(QUICKSTART), "--segment", "one"), "invalid int value: 'one'"),
            (("train", str(QUICKSTART), "--segment", "9"), "segments 0 to 2"),
            (("submit", str(QUICKSTART), "--segment", "9"), "segments 0 to 2"),
            (("plan", str(QUICKSTART), "runner.seeed=1"), "did you mean runner.seed?"),
            (("plan", ""), "its path is empty"),
            (("plan", "a" * 300), "too long"),
            (("plan", str(DEMO), "reward.terms=[{name: maths}]"), "did you mean 'math'?"),
            (("plan", str(DEMO), "reward.terms=[{name: nosuch:f}]"), "No module named 'nosuch'"),
            (("plan", str(DEMO), "data.train.source=jsonll"), "data.train.source is 'jsonll'"),
            (("plan", str(DEMO), "data.eval=[{name: held_out, source: mine}]"), "data.eval[held_out].source is 'mine'"),
            (("plan", str(DEMO), "rollout.agent=tool"), "did you mean 'tools'?"),
            (("status", "/no/such/run"), "/no/such/run does not exist"),
            (("status", "a" * 300), "too long"),
            (("status", "/usr"), "/usr is no run folder"),
            (("status", str(QUICKSTART), "runner.nme=x"), "did you mean runner.name?"),
            (("logs", "/no/such/run"), "no such run folder"),
            (("report", "/usr"), "is no run folder"),
            (("cancel", "/usr"), "is no run folder"),
            (("eval",), "--checkpoint"),
            (("eval", "--checkpoint", "/no/such/global_step_3"), "/no/such/global_step_3"),
            (("eval", "--checkpoint", "/usr", "--episodes", "0"), "--episodes is 0"),
            (("eval", "--checkpoint", "/usr", "--suite", "a/b"), "--suite is 'a/b'"),
            (("eval", "--checkpoint", "/usr", "--run", "/usr"), "leave out --run"),
            (("convert", "--checkpoint", "/no/such/global_step_3"), "/no/such/global_step_3"),
            (("submit", str(QUICKSTART), "--deadline", "nan"), "--deadline is nan"),
            (("doctor", "--start", "nan"), "--start"),
            (("doctor", "--nodes", "0", "--json", "/usr"), "--json is /usr, a folder"),
            (("replay", "split", "/usr", "--output", "o", "--parts", "0"), "--parts is 0"),
            (("record", "--checkpoint", "/usr", "--output", "/proc/x/d.h5"), "--output is /proc/x/d.h5"),
            (("record", "--checkpoint", "/usr", "--output", "/usr"), "--output is /usr, a folder"),
            (("record", "--expert", "math:pi", "--config", str(QUICKSTART), "--output", "x.h5"), "no class"),
        ],
        ids=lambda value: "-".join(value).replace("/", "_")[-60:] if isinstance(value, tuple) else "",
    )
    def test_refused(self, argv: tuple[str, ...], says: str, rlhpc: Terminal) -> None:
        refused(rlhpc(*argv), says)


def test_variables_of_a_job_elsewhere_and_no_srun(rlhpc: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLURM_JOB_ID", "4242424")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    refused(rlhpc.train(QUICKSTART), "SLURM_JOB_ID is 4242424", "other hosts (n1)", "no srun here", "unset")
    for name in ("srun", "squeue", "sacct", "scontrol"):  # there are commands, and nobody answers
        (rlhpc.folder / name).write_text("#!/bin/sh\nexit 1\n")
        (rlhpc.folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{rlhpc.folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "nowhere-[1-2].invalid")
    refused(rlhpc.train(QUICKSTART), "finds no way to nowhere-1", "cluster.interface")
    assert not rlhpc.runs.exists()


def test_a_file_as_long_as_a_checkpoint_is_not_read_to_its_end(rlhpc: Terminal) -> None:
    path = rlhpc.folder / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(1 << 28)
    refused(rlhpc("plan", str(path)), "model.safetensors", "more than 2097152 characters")


def test_no_model_is_made_for_data_that_are_refused(rlhpc: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(rlhpc.folder)
    monkeypatch.delenv("RLHPC_MODELS", raising=False)
    config = DEMO.with_name("demo_sft.yaml")
    refused(rlhpc.train(config, "data.train={source: jsonl, path: no.jsonl, kwargs: {}}"), "no.jsonl")
    refused(rlhpc("eval", "--model", "builtin:tiny", "--config", str(config), "--suite", "nope"), "data.eval has")
    assert list(rlhpc.folder.iterdir()) == []


def test_a_reference_to_nothing_in_a_site_file(rlhpc: Terminal) -> None:
    (rlhpc.folder / "s.yaml").write_text("cluster: {partition: '${nosuch}'}\n")
    refused(rlhpc("plan", str(QUICKSTART), "--site", str(rlhpc.folder / "s.yaml")), "s.yaml", "partition", "nosuch")


def test_a_whole_number_for_a_fraction_in_a_list_is_taken_in_silence(rlhpc: Terminal) -> None:
    refused(
        rlhpc("plan", str(QUICKSTART.parent / "reasoning" / "gsm8k.yaml"), "reward.terms=[{weight: 1}]"),
        "reward.terms[0].name",
    )


class TestRunThatIsThere:
    """What is looked at, or written, of a run."""

    @pytest.fixture
    def run(self, rlhpc: Terminal) -> Path:
        folder = rlhpc.runs / "some"
        checkpoint = folder / "checkpoints" / "global_step_1"
        checkpoint.mkdir(parents=True)
        (folder / "config.yaml").write_text("runner: {name: some}\n")
        given = folder / "given.yaml"
        given.write_text(INCLUDE)
        (checkpoint / "config.yaml").write_text(config_to_yaml(load_config(given)))  # as a run writes it
        given.unlink()
        return folder

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (("compare", "RUN", "--output", "RUN"), "a folder; name a file in it"),
            (("compare", "RUN", "--output", "/proc/x.html"), "--output is /proc/x.html"),
            (("compare", "RUN", "--output", "RUN/config.yaml/x.html"), "is a file, not a folder"),
            (("report", "RUN", "--curves", "RUN/config.yaml"), "a file; name a folder"),
            (("eval", "--checkpoint", "RUN/checkpoints/global_step_1", "--output", "RUN"), "a folder; name a file in it"),
            (("convert", "--checkpoint", "RUN/checkpoints/global_step_1", "--output", "/proc/x"), "--output is /proc/x"),
            (("eval", "--run", "RUN", "--step", "²"), "--step is '²'"),
        ],
    )  # fmt: skip
    def test_output_that_cannot_be_written(self, argv: tuple[str, ...], says: str, run: Path, rlhpc: Terminal) -> None:
        before = sorted(rlhpc.folder.rglob("*"))
        refused(rlhpc(*(word.replace("RUN", str(run)) for word in argv)), says)
        assert sorted(rlhpc.folder.rglob("*")) == before

    def test_a_report_of_a_configuration_that_is_not_text(self, run: Path, rlhpc: Terminal) -> None:
        (run / "config.yaml").write_bytes(bytes(range(256)))
        outcome = rlhpc("report", str(run))
        assert outcome.code == 0 and (run / "report" / "index.html").is_file(), outcome

    def test_a_report_of_a_run_that_takes_no_page(self, run: Path, rlhpc: Terminal) -> None:
        (run / "report").write_text("mine\n")
        refused(rlhpc("report", str(run)), "report/index.html", "--curves FOLDER")
        (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
        outcome = rlhpc("report", str(run), "--curves", str(rlhpc.folder / "mine"))
        assert outcome.code == 0 and (rlhpc.folder / "mine" / "page.html").is_file(), outcome

    def test_a_checkpoint_is_refused_before_torch_is_imported(self, run: Path, rlhpc: Terminal) -> None:
        mine = rlhpc.folder / "path"
        mine.mkdir()
        (mine / "torch.py").write_text("raise SystemExit('torch was imported')\n")
        for command in ("eval", "convert"):
            words = [command, "--checkpoint", str(run / "checkpoints" / "global_step_1")]
            ended = subprocess.run(
                [sys.executable, "-m", "rlhpc.cli", *words],
                capture_output=True,
                text=True,
                timeout=60,
                env={**os.environ, "PYTHONPATH": str(mine)},
                check=False,
            )
            refused(Outcome(ended.returncode, ended.stderr), "COMPLETE: missing")


@pytest.mark.parametrize(
    "words",
    [("runner.max_stepz=3",), ("env.train.env_id=CartPol-v1",), ("--segment", "7"), (TOGETHER + "{actor: 9}",)],
    ids=["key", "environment", "segment", "placement"],
)
def test_as_a_process(words: tuple[str, ...], rlhpc: Terminal) -> None:
    outcome = rlhpc.process((), QUICKSTART, *words)
    refused(outcome)
    assert outcome.out == "" and list(rlhpc.folder.iterdir()) == []


def test_an_error_that_cannot_be_said_keeps_its_exit_code(rlhpc: Terminal) -> None:
    outcome = rlhpc.process(("sh", "-c", 'exec "$@" 2>/dev/full', "sh"), QUICKSTART, "runner.seeed=1")
    assert outcome == Outcome(2, "", "")
