"""Commands that start and stop runs: `plan`, `train`, `submit`, `cancel`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhpc.cli.arguments import describe_saved, run_paths
from rlhpc.cli.parser import RESUME_WITH, RUN, SITE, add_command, argument, positionals
from rlhpc.cli.sweep import cancel_sweep, render_sweep_plan, sweep_paths
from rlhpc.jobs.paths import RunPaths, SweepPaths
from rlhpc.runtime.errors import ConfigError, RlhpcError, SubmitError, UserError

if TYPE_CHECKING:
    from rlhpc.config.sections import RunConfig
    from rlhpc.jobs.plan import JobPlan
    from rlhpc.runs.preflight import Check

_EXAMPLES = {
    "plan": (
        "rlhpc plan configs/quickstart.yaml",
        "rlhpc plan configs/quickstart.yaml rollout.pipeline_stage_num=2",
        "rlhpc plan configs/quickstart.yaml --launcher slurm --site mycluster",
        "rlhpc plan configs/quickstart.yaml --when --nodes 1,2 --partitions short,long",
    ),
    "train": (
        "rlhpc train configs/quickstart.yaml runner.name=try runner.max_steps=20",
        "rlhpc train configs/quickstart.yaml env.train.env_id=Acrobot-v1 runner.name=acrobot",
        "rlhpc train configs/quickstart.yaml runner.resume_dir=auto",
    ),
    "submit": (
        "rlhpc submit configs/quickstart.yaml --segment 0 --executor local",
        "rlhpc submit configs/quickstart.yaml --executor slurm --no-wait",
        "rlhpc submit configs/quickstart.yaml --site mycluster cluster.time=02:00:00",
    ),
    "cancel": ("rlhpc cancel runs/quickstart", "rlhpc cancel runs/cartpole-lr"),
}


def _plan(args: argparse.Namespace) -> int:
    from rlhpc.jobs.accelerators import with_likely_accelerators
    from rlhpc.runs.checks import check_planned
    from rlhpc.runs.configuration import load_config
    from rlhpc.runs.memory.plan import refuse_overfull
    from rlhpc.runs.preflight import FILES_ALONE, Need
    from rlhpc.runs.sweep import load_sweep, sft_export, sft_of

    sweep = load_sweep(args.config, args.overrides, site=args.site)
    if args.when and sweep is not None:
        raise ConfigError(f"--when is for a single run, and {args.config} is a sweep; add sweep=null")
    if args.when:
        return _print_start_estimates(args)
    if args.nodes or args.partitions:
        raise ConfigError("--nodes and --partitions are alternatives for --when; add it")
    resources = FILES_ALONE | {Need.PROCESS} if args.processes else FILES_ALONE
    if sweep is not None:
        skipped_checks = [skipped_check for run in sweep.runs for skipped_check in check_planned(run.cfg, resources)]
        print(render_sweep_plan(sweep, args.launcher))
        _print_skipped(skipped_checks)
        return 0
    cfg = load_config(args.config, args.overrides, site=args.site)
    cfg = with_likely_accelerators(cfg, args.launcher)
    if (sft_source := sft_of(args.config, cfg, args.site)) is not None:
        sft_export(args.config, cfg, sft_source)
    try:
        skipped_checks = check_planned(cfg, resources)
    except UserError:
        with contextlib.suppress(RlhpcError):  # the placement is useful despite the error
            _print_plan(args, cfg, [])
        raise
    plan = _print_plan(args, cfg, skipped_checks)
    refuse_overfull(cfg, args.config, plan.launcher)
    return 0


def _print_plan(args: argparse.Namespace, cfg: RunConfig, skipped_checks: Sequence[Check]) -> JobPlan:
    """Prints the processes of a run, their memory, and the skipped checks; returns the plan."""
    from rlhpc.jobs.plan import build_plan, render_plan
    from rlhpc.runs.conditional_keys import find_unused
    from rlhpc.runs.memory.plan import compute_memory_plan, render_memory

    plan = build_plan(cfg, launcher=args.launcher)
    print(render_plan(plan))
    if unused_keys := find_unused(args.config, args.overrides, site=args.site):
        print("\nno effect in this configuration:")
        print("\n".join(f"  {key}" for key in unused_keys))
    if memory := render_memory(compute_memory_plan(cfg, plan, measure=args.measure), is_measured=args.measure):
        print(f"\n{memory}")
    _print_skipped(skipped_checks)
    if plan.launcher == "slurm" and "SLURM_JOB_ID" not in os.environ:
        print(
            "\nThis is the job of `rlhpc submit` and profiles/slurm; `rlhpc train` here starts the ranks on this machine."
        )
    return plan


def _print_skipped(checks: Sequence[Check]) -> None:
    """Prints the checks that the plan has skipped, without duplicates."""
    if lines := list(dict.fromkeys(map(str, checks))):
        print("\nnot checked (checked at the start):")
        print("\n".join(f"  {line}" for line in lines))


def _print_start_estimates(args: argparse.Namespace) -> int:
    from rlhpc.runs.start_estimate import estimate_starts, render
    from rlhpc.runs.tuning.tune import TuneRequest

    node_counts, partition_names = (
        [list_item.strip() for list_item in (option_text or "").split(",") if list_item.strip()]
        for option_text in (args.nodes, args.partitions)
    )
    if invalid_counts := [argument for argument in node_counts if not argument.isdigit() or int(argument) < 1]:
        raise ConfigError(f"--nodes has {invalid_counts[0]!r}; write numbers of nodes, such as 1,2,4")
    if args.launcher == "local" or shutil.which("sbatch") is None:
        raise ConfigError("--when asks Slurm, and there is no sbatch here; run it on a login node of the cluster")
    request = TuneRequest(args.config, tuple(args.overrides), args.site or os.environ.get("RLHPC_SITE"))
    print(render(estimate_starts(request, [*map(int, node_counts)], partition_names)))
    return 0


def _train(args: argparse.Namespace) -> int:
    from rlhpc.runs.handle import load_for_training
    from rlhpc.runs.train import train

    cfg = load_for_training(args.config, args.overrides, segment=args.segment)
    try:
        exit_code = int(train(cfg, segment=args.segment, resume_with=args.resume_with)["exit_code"])
    except KeyboardInterrupt:
        exit_code = 130
    if exit_code != 0:
        print(_describe_stop(args, cfg), file=sys.stderr)
    return exit_code


def _describe_stop(args: argparse.Namespace, cfg: RunConfig) -> str:
    """Returns the message about an interrupted run: its saved steps, and the command that continues it."""
    from rlhpc.config import total_steps
    from rlhpc.jobs.signals import MAX_RESTARTS

    paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
    message = f"rlhpc: interrupted; {describe_saved(paths, total_steps(cfg), paths.root)}"
    if MAX_RESTARTS in os.environ:
        return message  # in a job, the submitter prints how to continue
    resume = ["runner.resume_dir=auto"] if paths.complete_steps() else []
    command_words = [
        "rlhpc",
        "train",
        args.config,
        *(override_word for override_word in args.overrides if not override_word.startswith("runner.resume_dir=")),
        *(resume if args.segment is None else ["--segment", str(args.segment)]),
    ]
    return f"{message}\nrlhpc: go on: {shlex.join(command_words)}"


def print_outcome(answer: dict[str, object], *, as_json: bool) -> None:
    """Prints the outcome of a submission: a line on stderr and, with `as_json`, JSON on stdout for scripts."""
    from rlhpc.jobs.waiter import answer_line

    print(f"rlhpc: {answer_line(answer)}", file=sys.stderr)
    if as_json:
        print(json.dumps(answer))


def _submit(args: argparse.Namespace) -> int:
    from rlhpc.config import find_site
    from rlhpc.jobs.accelerators import with_accelerators
    from rlhpc.jobs.plan import build_plan
    from rlhpc.jobs.probes import ProcessId
    from rlhpc.jobs.segment import SegmentJournal
    from rlhpc.jobs.submit import Submission, SubmitRequest, WaitOptions, choose_executor, driver_command
    from rlhpc.jobs.wait_client import Wait, hand_over
    from rlhpc.runs.checks import check_planned
    from rlhpc.runs.configuration import load_config
    from rlhpc.runs.memory.plan import refuse_overfull
    from rlhpc.runs.run_identity import SubmittedConfig, check_same_run, make_longer

    cfg = load_config(args.config, args.overrides, site=args.site)
    if not 0 <= args.segment < cfg.runner.segments:
        raise ConfigError(f"--segment is {args.segment}; the run has segments 0 to {cfg.runner.segments - 1}")
    if args.deadline is not None and not args.deadline > 0:  # also refuses nan
        raise ConfigError(f"--deadline is {args.deadline:g}; it must be more than 0 seconds")
    if args.attempt < 1:
        raise ConfigError(f"--attempt is {args.attempt}; the first one is 1")
    executor = choose_executor(args.executor)
    planned_cfg = with_accelerators(cfg, executor)
    refuse_overfull(planned_cfg, args.config, executor)
    check_planned(planned_cfg)
    paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
    enclosing_sweep = SweepPaths.from_run(paths)
    if args.asked_by is not None and enclosing_sweep is not None and enclosing_sweep.cancel_mark.exists():
        raise SubmitError(
            f"{paths.root}: not submitted, because the sweep {enclosing_sweep.root} was cancelled; rlhpc run goes on with it"
        )
    check_same_run(paths, cfg, resume_with=args.resume_with)
    make_longer(paths, cfg, args.segment, wait=True)
    submitted_config = SubmittedConfig(SegmentJournal(paths, args.segment), cfg, args.config, args.overrides)
    flags = ["--resume-with"] if args.resume_with else []
    as_json = not sys.stdout.isatty()  # for scripts

    request = SubmitRequest(
        run_root=paths.root,
        command=driver_command(submitted_config.path, flags, segment=args.segment),
        segment=args.segment,
        executor=executor,
        environment={"RLHPC_SITE": str(find_site(args.site).absolute())} if args.site else {},
        slurm=build_plan(planned_cfg, launcher="slurm").submitit_parameters() if executor == "slurm" else {},
        max_restarts=cfg.runner.max_restarts,
        attempt=args.attempt,
        on_decision=submitted_config,
    )
    wait_options = WaitOptions(
        enabled=not args.no_wait,
        deadline_s=args.deadline,
        requester=ProcessId.from_pid(args.asked_by) if args.asked_by is not None else None,
        hand_over=lambda waiter: hand_over(Wait.from_waiter(waiter, answers=as_json)) if args.whole_process else None,
    )
    print_outcome(Submission(request, wait_options).run(), as_json=as_json)
    return 0


def _cancel(args: argparse.Namespace) -> int:
    from rlhpc.jobs.submit import cancel

    sweep = sweep_paths(args.run, args.overrides)
    messages = cancel(run_paths(args.run, args.overrides)) if sweep is None else cancel_sweep(sweep)
    print("\n".join(messages) or "nothing is running")
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "plan",
        _plan,
        "print what a run would start where, without starting anything",
        _EXAMPLES["plan"],
        *positionals(config="YAML file of the run"),
        argument("--site", help=SITE),
        argument("--launcher", choices=("auto", "slurm", "local"), default="auto", help="plan for Slurm or not"),
        argument(
            "--when",
            action="store_true",
            help="ask Slurm when it would start, here and in other shapes, and say when it would end",
        ),
        argument(
            "--measure",
            action="store_true",
            help="also have PyTorch follow a training step without contents, and hold the account of memory against it",
        ),
        argument(
            "--processes",
            action="store_true",
            help="also make the checks that start processes of their own: simulators, judges, sandboxes",
        ),
        argument("--nodes", metavar="N,…", help="--when: numbers of nodes to ask about (default: half, and twice)"),
        argument("--partitions", metavar="P,…", help="--when: partitions to ask about (default: the site file's)"),
    )
    add_command(
        commands,
        "train",
        _train,
        "train here and now: on this machine, or in this shell's allocation",
        _EXAMPLES["train"],
        *positionals(config="YAML file of the run"),
        argument("--segment", type=int, help="train only this segment (0, 1, …), from the checkpoint before it"),
        argument("--resume-with", action="store_true", help=RESUME_WITH),
    )
    add_command(
        commands,
        "submit",
        _submit,
        "submit a segment as a job and wait for it; attach if it runs already",
        _EXAMPLES["submit"],
        *positionals(config="YAML file of the run"),
        argument("--segment", type=int, default=0, help="segment to train (default 0)"),
        argument("--executor", choices=("auto", "local", "slurm"), default="auto", help="who runs the job"),
        argument("--resume-with", action="store_true", help=RESUME_WITH),
        argument("--site", help=SITE),
        argument("--no-wait", action="store_true", help="return once the job is submitted"),
        argument("--deadline", type=float, help="seconds after which to stop waiting (the job goes on)"),
        argument(
            "--attempt",
            type=int,
            default=1,
            metavar="N",
            help="which try this is of a workflow engine; a retry (2 and more) does not start again what somebody cancelled",
        ),
        argument(
            "--asked-by", type=int, metavar="PID", help="process of this machine with whose end the waiting ends, too"
        ),
    )
    add_command(
        commands,
        "cancel",
        _cancel,
        "stop a run's job; it saves a checkpoint first",
        _EXAMPLES["cancel"],
        *positionals(run=RUN),
    )
