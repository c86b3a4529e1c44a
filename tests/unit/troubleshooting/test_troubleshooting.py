"""Each message that ends a command leads to an explanation; explanations name commands, keys and pages that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from rlhpc import troubleshooting
from rlhpc.algorithms import nonfinite
from rlhpc.cli import build_parser
from tests.baseline import lists
from tests.users import BOB, needs_root, run_as

ROOT = Path(__file__).resolve().parents[3]
#: Calls that print a note, or answer a request over HTTP: they end no command.
NOTES = {
    "say",
    "report",
    "print_line",
    "print_message",
    "tell",
    "error",
    "RequestError",
    "UnknownModelError",
    "TemporaryRefusal",
    "TooEarly",
}
#: Rules of a configuration; a message begins with the key and its value.
RULES = {"check_rules", "fail", "_fail"}
#: Messages that consist of another message.
FRAMES = {"{}: {}: run {} ({}): {}"}


@cache
def messages() -> dict[str, set[str]]:
    """Returns the messages that end a command, with the calls that make them."""
    return {text: calls for text, calls in lists.messages_by_call().items() if calls - NOTES and text not in FRAMES}


def as_printed(text: str, calls: set[str]) -> str:
    """Returns a template with words in place of what is filled in, as the command prints it."""
    return ("algorithm.part.key is 'x'; " if calls <= RULES else "") + text.replace("{}", "X").replace("\\n", "\n")


def slug_of(message: str) -> str:
    cause = troubleshooting.find_by_message(message)
    return "" if cause is None else cause.slug


def test_every_message_that_ends_a_command_leads_to_an_explanation() -> None:
    baseline = {text for text in lists.read("messages") if text in messages()}
    assert len(baseline) > 1100 and len(messages()) >= len(baseline)
    silent = [text for text, calls in messages().items() if not slug_of(as_printed(text, calls))]
    assert not silent, "rlhpc/troubleshooting has no cause for:\n" + "\n".join(silent)


def test_no_pattern_fits_everything() -> None:
    """An explanation that every message leads to would explain nothing."""
    for text in ("an elephant", "x", "X: X", "the weather is fine today", "3.14"):
        assert slug_of(text) == "", text
    slugs = [slug_of(as_printed(text, calls)) for text, calls in messages().items()]
    assert len(set(slugs)) > 50 and max(map(slugs.count, set(slugs))) < 0.1 * len(slugs)


@pytest.mark.parametrize(
    ("message", "slug"),
    [
        ("override 'a.b=1': unknown key a.b; did you mean a.c? allowed here: c", "unknown-key"),
        ("actor.optim.lr is -1.0; it must be above 0 and at most 10", "value-not-allowed"),
        ("algorithm.adv_type is 'gaee', which is unknown; did you mean 'gae'? allowed: gae, grpo", "unknown-name"),
        ("accelerators 0, 1 of n1 were granted, but cannot be used by torch 2.9+cpu, which …", "no-usable-gpu"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB", "gpu-memory"),
        ("metrics could not be written: /home/me/runs/a/metrics.jsonl: Disk quota exceeded. Your quota …", "disk-full"),
        ("rollout[2] on node n3 was killed by signal 9 (SIGKILL) (log /runs/a/rollout-2.err)", "host-memory"),
        ("rollout[2] on node n3 raised ValueError: bad (log /runs/a/logs/segment_0/rollout-2.err)", "rank-lost"),
        ("actor[0] waited for rollout[1] which never arrived in 300 s", "rendezvous"),
        ("[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", "network"),
        ("/runs/a is being trained by process 7 on n1: one run, one driver", "second-driver"),
        ("/runs/a has checkpoints already (newest: global_step_3). To continue", "run-has-checkpoints"),
        ("/c/global_step_2: the weights in it do not fit actor.model of this configuration", "checkpoint-mismatch"),
        ("checkpoint /runs/a/checkpoints/global_step_3 cannot be used: actor-0.pt has another checksum", "checkpoint-damaged"),
        ("f: policy is 'm:C', which is imported; a file that comes with weights may not. If you know …", "untrusted-code"),
        ("the reward of problem 3, sample 0 is nan (math nan); see reward.terms", "non-finite"),
        ("sandbox: the program could not be confined, and was not run: bwrap: No permissions", "sandbox"),
        ("vLLM refuses the model or the section rollout: unknown architecture", "engine-start"),
        ("the rollout engine cannot generate with this model on this device: AssertionError", "engine-start"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition", "slurm-refused"),
        ("Slurm does not answer\n  tried for 300 s; see `scontrol ping`", "slurm-silent"),
        ("generation 12-0 was replaced by 12-1: this process is from an earlier attempt", "stale-process"),
        ("run folder /r/a can be written by everybody (mode 777): chmod o-w /r/a", "private-folder"),
        ("OSError: [Errno 116] Stale file handle: '/home/me/runs/a'", "folder-removed"),
        ("data.train.path is 'x.jsonl'; there is no such file or folder", "dataset"),
        ("cluster.component_placement.actor: '0-9': resource 9 does not exist", "placement"),
        ("/r/a/report/index.html: /r/a/report is not writable for you; --curves FOLDER writes the pictures …", "not-readable"),
        ("/r/a/report/index.html: /r is on a read-only filesystem; --curves FOLDER writes the pictures …", "not-readable"),
        ("/r/a/report/index.html: it cannot be looked at: Permission denied; --curves FOLDER writes …", "not-readable"),
        ("/r/a/report/index.html: the filesystem of /r/a is full; --curves FOLDER writes the pictures …", "disk-full"),
        ("/r/a/report/index.html: could not be written: Permission denied. Check that the folder is writable", "not-readable"),
        ("/r/a/report/index.html: could not be written: Not a directory. Check that the folder is writable", "not-readable"),
        ("[Errno 13] Permission denied: '/r/a/metrics.jsonl'", "not-readable"),
        ("teacher.model.model_path is not set, but algorithm.name=distillation learns from it: …", "model-not-found"),
        ("actor.model.model_path is not set; a language model needs a Hugging Face folder or hub name", "model-not-found"),
        ("the variable WANDB_API_KEY is not set", "secret-variable"),
        ("data.prompts_per_step(3) % actor ranks with other samples(2) != 0", "keys-disagree"),
        ("x.yaml: runner.segments is 8; there cannot be more segments than training steps (2)", "keys-disagree"),
        ("override 'critic.deepspeed.zero_stage=8': critic.deepspeed.zero_stage is 8; it must lie …", "training-backend"),
        ("override 'runner.patience=2': runner.patience is 2; it counts evaluations by a metric", "keys-disagree"),
        ("x.yaml: actor.optim.critic_warmup_steps is 1; the actor has no value head: set …", "keys-disagree"),
        ("push needs credentials of the hub, and there are none: set HF_TOKEN to a token that may write", "sharing"),
        ("runs of label a differ in actor.optim.lr: they are no seeds of one configuration", "command-line"),
        ("actor.parallel.context is 2; it shares out rows without padding: set it true", "training-backend"),
        ("a requeued job may be refused by a node whose clock is behind", "clock-skew"),
        ("KeyError: 'x' (a fault of rlhpc itself, or of code it called)", "fault"),
    ],
)  # fmt: skip
def test_messages_lead_to_their_cause(message: str, slug: str) -> None:
    assert slug_of(f"rlhpc: error: {message}") == slug
    pointer = troubleshooting.pointer(message)
    assert pointer.endswith(f"rlhpc explain {slug}")
    assert slug_of(f"{message}\n{pointer}") == slug and troubleshooting.pointer(f"{message}\n{pointer}") == ""


#: A reason of the operating system in a message's template, after what could not be done.
REASON = re.compile(r"((?:cannot|could not) (?:be )?(?:read|written|write|make|made|opened|saved|looked at)[^:;(]*: )X")


@pytest.mark.parametrize(
    ("reason", "slug"),
    [
        ("Permission denied", "not-readable"),
        ("Operation not permitted", "not-readable"),
        ("Read-only file system", "not-readable"),
        ("No space left on device", "disk-full"),
        ("Disk quota exceeded", "disk-full"),
        ("Too many open files", "file-limit"),
        ("Stale file handle", "folder-removed"),
    ],
)
def test_the_systems_reason_decides_the_cause(reason: str, slug: str) -> None:
    """Whatever a command could not read or write, it leads to the same explanation."""
    texts = [as_printed(text, calls) for text, calls in messages().items()]
    printed = {REASON.sub(lambda match: match[1] + reason, text) for text in texts if REASON.search(text)}
    assert len(printed) > 30
    wrong = {text: slug_of(text) for text in printed if slug_of(text) != slug and "as YAML" not in text}
    assert not wrong


def test_every_error_of_a_number_that_is_not_finite_leads_to_its_page() -> None:
    remedies = [text for name, text in vars(nonfinite).items() if name.startswith("_") and "rlhpc train" in str(text)]
    assert len(remedies) == 3
    for remedy in remedies:
        message = str(nonfinite.nonfinite("step 1, prompt 0, rollout-0: the reward of response 0 is inf", remedy))
        assert slug_of(message) == "non-finite", message


def test_the_command_that_goes_on_says_nothing_about_the_cause() -> None:
    remedy = (
        "; go on from the newest checkpoint: rlhpc train <config> runner.resume_dir=auto algorithm.x=1 --resume-with"
    )
    assert slug_of(remedy) == ""
    for text, calls in messages().items():
        message = as_printed(text, calls)
        assert slug_of(message + remedy) == slug_of(f"{message}; go on from the : "), message


@needs_root
def test_a_report_that_may_not_be_written_leads_to_permissions(tmp_path: Path) -> None:
    (tmp_path / "run" / "report").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("runner: {name: run}\n")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    code = "import rlhpc.cli\nimport rlhpc.runs.report\nsys.exit(rlhpc.cli.main(['report', sys.argv[1]]))"
    done = run_as(BOB, code, tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "  what to do: rlhpc explain not-readable"


def test_a_message_of_any_length_is_compared_in_time() -> None:
    for filler in ("a" * 1_000_000, "a." * 500_000, "x is y; " * 100_000):
        slug_of(f"override {filler}: {filler} is {filler}")


def test_every_cause_has_a_message_or_an_example() -> None:
    """No explanation stands for something that nothing says."""
    source = Path(__file__).read_text()
    reached = {slug_of(as_printed(text, calls)) for text, calls in messages().items()}
    reached |= {cause.slug for cause in troubleshooting.causes() if f'"{cause.slug}")' in source}
    assert {cause.slug for cause in troubleshooting.causes()} <= reached


def test_names_are_unique_and_stable_words() -> None:
    slugs = [cause.slug for cause in troubleshooting.causes()]
    assert len(set(slugs)) == len(slugs) > 50
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", slug) for slug in slugs)


@pytest.mark.parametrize("cause", troubleshooting.causes(), ids=lambda cause: cause.slug)
def test_an_explanation_names_what_exists(cause: troubleshooting.Cause) -> None:
    text = f"{cause.cause} {cause.look} {cause.fix} {' '.join(cause.commands)}"
    commands = set(build_parser().commands)
    assert {*re.findall(r"`?rlhpc ([a-z]+)", " ".join([*cause.commands, *re.findall(r"`[^`]+`", text)]))} <= commands
    keys = {line.split(" | ")[0] for line in lists.read("config_keys")}
    sections = {key.partition(".")[0] for key in keys}
    named = [
        key for key in re.findall(r"(?<![\w/.])[a-z_]+(?:\.[a-z_]+)+\b", text) if key.partition(".")[0] in sections
    ]
    assert [key for key in named if key not in keys and not any(k.startswith(f"{key}.") for k in keys)] == []
    assert not cause.page or (ROOT / "docs" / cause.page).is_file()
    assert cause.commands and all(part.endswith((".", "?", "`")) for part in (cause.cause, cause.fix))


def test_nothing_else_is_imported_to_explain() -> None:
    code = "import sys, rlhpc.troubleshooting; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "torch", "yaml"} & {*done.stdout.split()}
