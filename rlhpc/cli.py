"""The `rlhpc` command. Heavy modules are imported by the subcommand that needs them."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import rlhpc
from rlhpc.runtime.errors import CheckpointError, ConfigError, RlhpcError
from rlhpc.runtime.paths import RunPaths

Command = Callable[[argparse.Namespace], int]
_OVERRIDES = "key=value of the configuration, such as runner.max_steps=20; the value is YAML"
_SITE = "site file of the cluster, by name or path (default: what RLHPC_SITE says)"
_RUN = "run folder, or the run's configuration file (with the overrides it was started with)"
_EXAMPLES = {
    "plan": (
        "rlhpc plan configs/quickstart.yaml",
        "rlhpc plan configs/quickstart.yaml rollout.pipeline_stage_num=2",
        "rlhpc plan configs/quickstart.yaml --launcher slurm --site mycluster",
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
    "cancel": ("rlhpc cancel runs/quickstart",),
    "status": (
        "rlhpc status runs/quickstart",
        "rlhpc status configs/quickstart.yaml runner.name=try",
    ),
    "logs": (
        "rlhpc logs runs/quickstart",
        "rlhpc logs runs/quickstart --group env --rank 0 --follow",
    ),
    "eval": (
        "rlhpc eval --run runs/quickstart --step latest",
        "rlhpc eval --checkpoint /elsewhere/checkpoints/global_step_60 --episodes 10 --output result.json",
        "rlhpc eval --run runs/quickstart --suite long env.eval.max_episode_steps=1000",
        "rlhpc eval --model Qwen/Qwen2.5-0.5B-Instruct --config configs/reasoning/gsm8k.yaml --suite test",
    ),
    "record": (
        "rlhpc record --run runs/quickstart --episodes 100 --output demos.h5",
        "rlhpc record --checkpoint runs/push/checkpoints/global_step_60 --episodes 200 --only-success --output demos.h5",
        "rlhpc record --expert rlhpc.envs.experts:push_cube --config configs/embodied/push_cube_bc.yaml --only-success "
        "--output demos/push_cube.h5",
    ),
    "dagger": (
        "rlhpc dagger configs/embodied/push_cube_bc.yaml --expert rlhpc.envs.experts:push_cube --rounds 2 demos.path=null",
    ),
    "convert": (
        "rlhpc convert --run runs/quickstart",
        "rlhpc convert --checkpoint /elsewhere/checkpoints/global_step_60 --output policy",
    ),
    "report": (
        "rlhpc report runs/quickstart",
        "rlhpc report configs/quickstart.yaml runner.name=try",
    ),
    "replay": (
        "rlhpc replay inspect runs/pendulum_sac/checkpoints/global_step_60",
        "rlhpc replay merge runs/a/checkpoints/global_step_60 runs/b/checkpoints/global_step_60 --output prior",
        "rlhpc replay split prior --parts 4 --output pieces",
    ),
    "compare": (
        "rlhpc compare runs/push-s1 runs/push-s2 runs/scratch-s1 runs/scratch-s2 --output compare.html",
        "rlhpc compare 'from demos=runs/push-s1' 'from scratch=runs/other' --output compare.html",
    ),
    "doctor": (
        "rlhpc doctor --site mycluster",
        "rlhpc doctor --site mycluster --folder /scratch/me/runs --nodes 16 --json doctor.json",
        "rlhpc doctor --nodes 0",
    ),
}


class _Parser(argparse.ArgumentParser):
    """argparse with the project's error format."""

    def error(self, message: str) -> NoReturn:
        print(f"rlhpc: error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _run_paths(text: str, overrides: Sequence[str] = ()) -> RunPaths:
    """The run that the user names by its folder, or by its configuration file and overrides.

    Raises:
        ConfigError: There is no such run; names those that lie beside it.
    """
    given = Path(text).expanduser().absolute()
    root = given
    if given.is_file() or overrides:
        from rlhpc.config import load_config

        folder = given.is_dir()
        cfg = load_config(RunPaths(given).config if folder else given, overrides, check=False)
        changed = {override.partition("=")[0].strip() for override in overrides}
        run_dir = given.parent if folder and "runner.run_dir" not in changed else cfg.runner.run_dir
        name = given.name if folder and "runner.name" not in changed else cfg.runner.name
        root = RunPaths.of(run_dir, name).root
    paths = RunPaths(root)
    if any(mark.exists() for mark in (paths.config, paths.submit, paths.checkpoints, paths.registry)):
        return paths
    near = sorted(found.parent.name for found in root.parent.glob("*/config.yaml")) if root.parent.is_dir() else []
    hint = f"; runs there: {', '.join(near)}" if near else ""
    raise ConfigError(f"{root} {'is no run folder' if root.is_dir() else 'does not exist: no such run folder'}{hint}")


def _checkpoint(args: argparse.Namespace, overrides: Sequence[str] = ()) -> Path:
    """The checkpoint named by --checkpoint, or by --run (and overrides) and --step."""
    if args.checkpoint and args.run:
        raise ConfigError("--checkpoint names the checkpoint already; leave out --run")
    if args.checkpoint:
        checkpoint = Path(args.checkpoint).expanduser().absolute()
        if overrides and (checkpoint / "config.yaml").is_file():
            from rlhpc.config import load_config

            load_config(checkpoint / "config.yaml", overrides, check=False)
            print("rlhpc: --checkpoint names the checkpoint; the overrides change nothing here", file=sys.stderr)
        return checkpoint
    if not args.run:
        raise ConfigError("say which checkpoint: --checkpoint FOLDER, or --run FOLDER with --step N or --step latest")
    from rlhpc.checkpoint import newest_valid

    paths = _run_paths(args.run, overrides)
    if args.step == "latest":
        found = newest_valid(paths)
        for path, reason in found.skipped:
            print(f"rlhpc: skipped {path.name}: {reason}", file=sys.stderr)
        if found.path is None:
            raise CheckpointError(f"{paths.root} has no complete checkpoint yet; see rlhpc status {paths.root}")
        return found.path
    if not args.step.isdigit():
        raise ConfigError(f"--step is {args.step!r}; give a number or latest")
    checkpoint = paths.checkpoint(int(args.step))
    if not checkpoint.is_dir():
        there = ", ".join(str(step) for step, _ in paths.checkpoint_steps()) or "none"
        raise CheckpointError(f"{paths.root} has no checkpoint of step {args.step}; there are: {there}")
    return checkpoint


def _own_run(checkpoint: Path) -> RunPaths | None:
    """The run folder a checkpoint lies in, if it lies in one."""
    return RunPaths(checkpoint.parent.parent) if checkpoint.parent.name == "checkpoints" else None


def _plan(args: argparse.Namespace) -> int:
    from rlhpc.config import load_config
    from rlhpc.runtime.launch.plan import build_plan, render_plan

    print(render_plan(build_plan(load_config(args.config, args.overrides, site=args.site), launcher=args.launcher)))
    return 0


def _train(args: argparse.Namespace) -> int:
    from rlhpc.config import load_config

    cfg = load_config(args.config, args.overrides)
    if args.segment is not None and not 0 <= args.segment < cfg.runner.segments:
        raise ConfigError(f"--segment is {args.segment}; the run has segments 0 to {cfg.runner.segments - 1}")
    from rlhpc.runners.train import train

    return int(train(cfg, segment=args.segment)["exit_code"])


def _submit(args: argparse.Namespace) -> int:
    from rlhpc.config import find_site, load_config
    from rlhpc.runtime.launch.plan import build_plan
    from rlhpc.runtime.launch.submit import choose_executor, submit_segment

    cfg = load_config(args.config, args.overrides, site=args.site)
    if not 0 <= args.segment < cfg.runner.segments:
        raise ConfigError(f"--segment is {args.segment}; the run has segments 0 to {cfg.runner.segments - 1}")
    executor = choose_executor(args.executor)
    result = submit_segment(
        args.config,
        args.overrides,
        run_root=RunPaths.of(cfg.runner.run_dir, cfg.runner.name).root,
        segment=args.segment,
        executor=executor,
        environment={"RLHPC_SITE": str(find_site(args.site).absolute())} if args.site else None,
        slurm=build_plan(cfg, launcher="slurm").submitit_parameters() if executor == "slurm" else None,
        wait=not args.no_wait,
        deadline_s=args.deadline,
        max_restarts=int(cfg.runner.max_restarts),
    )
    print(json.dumps(result))
    return 0


def _cancel(args: argparse.Namespace) -> int:
    from rlhpc.runtime.launch.submit import cancel

    print("\n".join(cancel(_run_paths(args.run, args.overrides))) or "nothing is running")
    return 0


def _status(args: argparse.Namespace) -> int:
    from rlhpc.runtime.launch.status import render_status

    print(render_status(_run_paths(args.run, args.overrides)))
    return 0


def _logs(args: argparse.Namespace) -> int:
    from rlhpc.runtime.launch.status import print_logs

    print_logs(
        _run_paths(args.run, args.overrides), group=args.group, rank=args.rank, follow=args.follow, lines=args.lines
    )
    return 0


def _eval(args: argparse.Namespace) -> int:
    from rlhpc.config import load_config

    if args.episodes is not None and args.episodes < 1:
        raise ConfigError(f"--episodes is {args.episodes}; it must be at least 1")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", args.suite):
        raise ConfigError(f"--suite is {args.suite!r}; it becomes a file's name: use letters, digits, '.', '_' and '-'")
    if args.model is not None:
        return _eval_model(args)
    checkpoint = _checkpoint(args)
    config = Path(args.config) if args.config else checkpoint / "config.yaml"
    if args.config is None and not config.is_file():
        raise CheckpointError(f"{checkpoint} has no config.yaml, so it is no checkpoint of rlhpc, or incomplete")
    cfg = load_config(config, args.overrides, training=False)
    if changes := list(cfg.workflow.suites.get(args.suite, ())):
        cfg = load_config(config, [*changes, *args.overrides], training=False)
    run = _own_run(checkpoint)
    output = Path(args.output) if args.output else None
    if output is None and run is not None and (step := checkpoint.name.removeprefix("global_step_")).isdigit():
        output = run.eval_result(int(step), args.suite)
    if str(cfg.runner.task_type).lower() in ("reasoning", "sft"):
        return _eval_language(cfg, checkpoint, args.suite, output)
    from rlhpc.runners.evaluate import evaluate_checkpoint

    result = evaluate_checkpoint(checkpoint, cfg=cfg, suite=args.suite, episodes=args.episodes, output=output)
    low, high = result["return_ci95"]
    print(
        f"{checkpoint.name}: mean return {result['return_mean']:.2f} (95 % CI {low:.2f} to {high:.2f}) over "
        f"{result['episodes']} episodes of {result['env_id']}" + (f" → {output}" if output else "")
    )
    return 0


def _eval_model(args: argparse.Namespace) -> int:
    """A model as it is, without a checkpoint: a Hugging Face folder or name, or a built-in one."""
    from rlhpc.config import load_config

    if args.config is None or args.checkpoint or args.run:
        raise ConfigError("--model needs --config RUN.yaml, which says how it is asked and judged; and no checkpoint")
    words = [*args.overrides, *([f"actor.model.model_path={args.model}"] if args.model else [])]
    cfg = load_config(args.config, words, training=False)
    from rlhpc.data.builtin import resolve_model

    return _eval_language(cfg, resolve_model(cfg.actor.model), args.suite, Path(args.output) if args.output else None)


def _eval_language(cfg: Any, model: str | Path, suite: str, output: Path | None) -> int:
    from rlhpc.runners.evaluate_lm import describe, evaluate_language_model

    result = evaluate_language_model(cfg, model, suite, output)
    name = model.name if isinstance(model, Path) else model
    print(f"{name}: {describe(result)}" + (f" → {output}" if output else ""))
    return 0


def _record(args: argparse.Namespace) -> int:
    from rlhpc.config import load_config
    from rlhpc.runners.evaluate import record_episodes

    if args.episodes < 1:
        raise ConfigError(f"--episodes is {args.episodes}; it must be at least 1")
    if args.expert is None:
        checkpoint = _checkpoint(args)
        config = Path(args.config) if args.config else checkpoint / "config.yaml"
        source = str(checkpoint)
    elif args.config is None or args.checkpoint or args.run:
        raise ConfigError("--expert needs --config RUN.yaml, which names the environment; and no checkpoint")
    else:
        config, source = Path(args.config), args.expert
    cfg = load_config(config, args.overrides, training=False)
    mode = "train" if args.sample else "eval"
    result = record_episodes(
        source,
        cfg,
        Path(args.output),
        episodes=args.episodes,
        only_success=args.only_success,
        mode=mode,
        teacher=args.teacher,
    )
    success = f", success_once {result['success_once']:.1%}" if "success_once" in result else ""
    print(
        f"{result['episodes']} of {result['played']} episodes of {result['env_id']} ({result['steps']} steps, mean return "
        f"{result['return_mean']:.2f}{success}) → {args.output}"
    )
    return 0


def _dagger(args: argparse.Namespace) -> int:
    from rlhpc.runners.dagger import dagger

    if args.rounds < 1 or args.episodes < 1:
        raise ConfigError("--rounds and --episodes must be at least 1")
    made = dagger(args.config, args.overrides, expert=args.expert, rounds=args.rounds, episodes=args.episodes)
    print(made[-1]["checkpoint"])
    return 0


def _convert(args: argparse.Namespace) -> int:
    from rlhpc.checkpoint.convert import export_checkpoint

    checkpoint = _checkpoint(args, args.overrides)
    output = Path(args.output) if args.output else None
    run = _own_run(checkpoint)
    if output is None and run is not None and (step := checkpoint.name.removeprefix("global_step_")).isdigit():
        output = run.export(int(step))
    if (checkpoint / "backend.json").is_file():
        from rlhpc.checkpoint.convert_lm import export_language_model

        options = {"adapter_only": args.adapter_only, "base": args.base, "dtype": args.dtype}
        print(export_language_model(checkpoint, output, **options))
    elif args.adapter_only or args.base or args.dtype:
        raise ConfigError(f"--adapter-only, --base and --dtype are for language models; {checkpoint} is none")
    else:
        print(export_checkpoint(checkpoint, output))
    return 0


def _report(args: argparse.Namespace) -> int:
    from rlhpc.metrics.report import write_report

    paths = _run_paths(args.run, args.overrides)
    if args.curves:
        from rlhpc.metrics.curves import write_curves

        for path in write_curves(paths, Path(args.curves)):
            print(path)
    print(write_report(paths))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from rlhpc.metrics.compare import label_of, write_comparison

    named = []
    for word in args.runs:
        label, _, folder = word.rpartition("=") if not Path(word).exists() else ("", "", word)
        paths = _run_paths(folder)
        named.append((label or label_of(paths.root.name), paths))
    print(write_comparison(named, Path(args.output), args.suite))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from rlhpc.config import load_site
    from rlhpc.runtime.doctor import examine, render, to_json, worst

    if args.overrides:
        raise ConfigError(f"doctor takes no key=value words: {' '.join(args.overrides)}")
    if args.nodes < 0 or args.start <= 0:
        raise ConfigError("--nodes must be at least 0, and --start more than 0")
    site = args.site or os.environ.get("RLHPC_SITE")
    section = load_site(site) if site else None
    lines = examine(section, Path(args.folder), start_s=args.start, most_nodes=args.nodes)
    print(render(lines))
    if args.json:
        Path(args.json).write_text(to_json(lines) + "\n")
    return int(worst(lines) == "fail")


def _add(commands: Any, name: str, function: Command, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in _EXAMPLES[name]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(function=function)
    return parser


def _with_overrides(parser: argparse.ArgumentParser, **first: str) -> None:
    """The positional arguments: one of the command's own, perhaps, and overrides."""
    for name, text in first.items():
        parser.add_argument(name, help=text)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)


def _checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", help="checkpoint folder (global_step_<N>) of any run")
    parser.add_argument("--run", help=f"{_RUN}; together with --step")
    parser.add_argument("--step", default="latest", help="global step of the checkpoint (default: latest)")
    parser.add_argument("--output", help="where to write; default in the checkpoint's own run folder")
    _with_overrides(parser)


def _replay(args: argparse.Namespace) -> int:
    from rlhpc.data import replay_files

    if args.overrides:
        raise ConfigError(f"rlhpc replay takes no overrides ({args.overrides[0]})")
    if args.action != "merge" and len(args.folders) > 1:
        raise ConfigError(
            f"rlhpc replay {args.action} takes one folder, {len(args.folders)} are given; merge them first"
        )
    if args.action == "inspect":
        print(json.dumps(replay_files.inspect(args.folders[0]), indent=1))
        return 0
    if not args.output:
        raise ConfigError(f"rlhpc replay {args.action} needs --output FOLDER")
    if args.action == "merge":
        print(f"{args.output}: {replay_files.merge(args.folders, args.output)} transitions")
        return 0
    for number, count in enumerate(replay_files.split(args.folders[0], args.output, args.parts)):
        print(f"{Path(args.output) / str(number)}: {count} transitions")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(prog="rlhpc", description="Reinforcement learning on batch-scheduled clusters.")
    parser.add_argument("--version", action="version", version=f"rlhpc {rlhpc.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True, parser_class=_Parser)

    plan = _add(commands, "plan", _plan, "print what a run would start where, without starting anything")
    _with_overrides(plan, config="YAML file of the run")
    plan.add_argument("--site", help=_SITE)
    plan.add_argument("--launcher", choices=("auto", "slurm", "local"), default="auto", help="plan for Slurm or not")
    train = _add(commands, "train", _train, "train here and now: on this machine, or in this shell's allocation")
    _with_overrides(train, config="YAML file of the run")
    train.add_argument("--segment", type=int, help="train only this segment (0, 1, …), from the checkpoint before it")
    submit = _add(commands, "submit", _submit, "submit a segment as a job and wait for it; attach if it runs already")
    _with_overrides(submit, config="YAML file of the run")
    submit.add_argument("--segment", type=int, default=0, help="segment to train (default 0)")
    submit.add_argument("--executor", choices=("auto", "local", "slurm"), default="auto", help="who runs the job")
    submit.add_argument("--site", help=_SITE)
    submit.add_argument("--no-wait", action="store_true", help="return once the job is submitted")
    submit.add_argument("--deadline", type=float, help="seconds after which to stop waiting (the job goes on)")
    cancel = _add(commands, "cancel", _cancel, "stop a run's job; it saves a checkpoint first")
    _with_overrides(cancel, run=_RUN)
    status = _add(commands, "status", _status, "show where a run is")
    _with_overrides(status, run=_RUN)
    logs = _add(commands, "logs", _logs, "print the logs of a run's groups and ranks")
    _with_overrides(logs, run=_RUN)
    logs.add_argument("--group", help="only this group")
    logs.add_argument("--rank", type=int, help="only this rank")
    logs.add_argument("--follow", "-f", action="store_true", help="go on printing what is added")
    logs.add_argument("--lines", "-n", type=int, default=50, help="last lines of each file (default 50)")
    evaluate = _add(commands, "eval", _eval, "evaluate a checkpoint with deterministic actions")
    _checkpoint_arguments(evaluate)
    evaluate.add_argument("--suite", default="default", help="name of the evaluation (default: default)")
    evaluate.add_argument("--episodes", type=int, help="default: env.eval.num_episodes")
    evaluate.add_argument("--config", help="configuration to use instead of the checkpoint's own")
    evaluate.add_argument(
        "--model", help="language model as it is, instead of a checkpoint ('' takes that of --config)"
    )
    record = _add(
        commands, "record", _record, "record episodes of a policy or an expert as trajectories (ManiSkill's HDF5)"
    )
    record.add_argument("--checkpoint", help="checkpoint folder (global_step_<N>) of any run")
    record.add_argument("--run", help=f"{_RUN}; together with --step")
    record.add_argument("--step", default="latest", help="global step of the checkpoint (default: latest)")
    record.add_argument("--expert", help="function of observations, as module:function, instead of a checkpoint")
    record.add_argument("--config", help="configuration to use instead of the checkpoint's own; its env.eval is played")
    record.add_argument("--episodes", type=int, default=100, help="episodes to write (default 100)")
    record.add_argument("--only-success", action="store_true", help="write only episodes that succeeded")
    record.add_argument("--sample", action="store_true", help="sample actions instead of taking the most likely")
    record.add_argument(
        "--teacher", help="write the actions of this expert or checkpoint in the place of those played (DAgger)"
    )
    record.add_argument("--output", required=True, help="the .h5 file; a .json of the same name goes beside it")
    _with_overrides(record)
    dagger = _add(
        commands, "dagger", _dagger, "clone an expert, let the clone play, label what it sees, and clone again"
    )
    _with_overrides(dagger, config="YAML file of a run of behaviour cloning (runner.task_type: bc)")
    dagger.add_argument("--expert", required=True, help="who labels: a function as module:function, or a checkpoint")
    dagger.add_argument("--rounds", type=int, default=3, help="how often the clone plays (default 3)")
    dagger.add_argument("--episodes", type=int, default=20, help="episodes it plays each time (default 20)")
    convert = _add(commands, "convert", _convert, "export a checkpoint's policy: safetensors and a config")
    _checkpoint_arguments(convert)
    convert.add_argument(
        "--adapter-only", action="store_true", help="with LoRA: the adapter in peft's format, not merged"
    )
    convert.add_argument("--base", help="with LoRA: where the adapted model is now (default: where it was in training)")
    convert.add_argument("--dtype", choices=("float32", "bfloat16"), help="of a language model (default: as trained)")
    report = _add(commands, "report", _report, "write a run's report page")
    _with_overrides(report, run=_RUN)
    report.add_argument("--curves", help="folder to write the single plots to as well")
    replay = _add(commands, "replay", _replay, "inspect, merge and split replay buffers")
    replay.add_argument("action", choices=("inspect", "merge", "split"), help="what to do")
    replay.add_argument(
        "folders", nargs="+", help="checkpoints of off-policy runs, or folders that merge and split wrote"
    )
    replay.add_argument("--output", help="folder to write (merge, split)")
    replay.add_argument("--parts", type=int, default=2, help="parts to split into, oldest first (default 2)")
    replay.set_defaults(overrides=[])
    compare = _add(commands, "compare", _compare, "write a page that compares runs, with mean and spread over seeds")
    compare.add_argument(
        "runs", nargs="+", metavar="run", help="run folders; runs whose names differ in a number at the end are seeds of one "
        "thing, or say what they are as label=folder",
    )  # fmt: skip
    compare.add_argument("--output", default="compare.html", help="the page (default: compare.html)")
    compare.add_argument("--suite", default="default", help="evaluation suite that is compared (default: default)")
    compare.set_defaults(overrides=[])
    doctor = _add(commands, "doctor", _doctor, "check whether a cluster has what runs need, with small probe jobs")
    doctor.add_argument("--site", help=_SITE)
    doctor.add_argument("--folder", default="runs", help="where runs are to be written (default: runs)")
    doctor.add_argument("--nodes", type=int, default=8, help="nodes to probe in each partition (default 8; 0: no job)")
    doctor.add_argument("--start", type=float, default=60.0, help="seconds to wait for a probe to start (default 60)")
    doctor.add_argument("--json", help="file to write the findings to as well")
    doctor.set_defaults(overrides=[])
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line; overrides may stand anywhere, also after an option, where argparse gives up on them."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if unknown:
        parser.error(f"unknown argument{'s' if len(unknown) > 1 else ''}: {' '.join(unknown)}")
    args.overrides = [*args.overrides, *rest]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, 2 for what the user got wrong, 1 for what went wrong."""
    args = parse(argv)
    try:
        return int(args.function(args))
    except RlhpcError as error:
        print(f"rlhpc: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        hint = "a run that was training goes on from its last checkpoint with runner.resume_dir=auto"
        print(f"rlhpc: interrupted; {hint}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except Exception as error:
        if os.environ.get("RLHPC_DEBUG"):
            traceback.print_exc()
        hint = "a fault of rlhpc itself, or of code it called; set RLHPC_DEBUG=1 for the traceback"
        print(f"rlhpc: error: {type(error).__name__}: {error} ({hint})", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
