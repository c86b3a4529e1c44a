"""Commands on checkpoints: `eval`, `check-policy`, `play`, `record`, `pairs`, `convert`; and `dagger`, to clone an expert."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.cli.arguments import check_file, check_folder, checkpoint_of, require_positive
from rlhpc.cli.data import FORMAT, format_options
from rlhpc.cli.parser import CHECKPOINT, RUN, TRUST, add_command, argument, positionals
from rlhpc.jobs.paths import CONFIG, RunPaths, step_of
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.trust import Trust, without_variables

if TYPE_CHECKING:
    from rlhpc.embodied.config import EmbodiedConfig

_EXAMPLES = {
    "eval": (
        "rlhpc eval --run runs/quickstart --step latest",
        "rlhpc eval --checkpoint /elsewhere/checkpoints/global_step_60 --episodes 10 --output result.json",
        "rlhpc eval --run runs/gsm8k --step 60 --layers rollout.rollout_backend=vllm",
        "rlhpc eval --run runs/quickstart --suite long env.eval.max_episode_steps=1000",
        "rlhpc eval --model Qwen/Qwen2.5-0.5B-Instruct --config configs/reasoning/gsm8k.yaml --suite test",
    ),
    "check-policy": (
        "rlhpc check-policy runs/push_cube_bc --demos demos/push_cube.h5",
        "rlhpc check-policy configs/embodied/libero_openvla_oft.yaml --demos lerobot/libero_goal --control-hz 20",
    ),
    "play": (
        "rlhpc play runs/quickstart",
        "rlhpc play runs/quickstart --step 60 --episodes 2 --seed 7",
        "rlhpc play runs/gsm8k --system 'Answer in one word.' --max-tokens 200",
        "rlhpc play --checkpoint /elsewhere/checkpoints/global_step_60 --output video.mp4",
    ),
    "record": (
        "rlhpc record --run runs/quickstart --episodes 100 --output demos.h5",
        "rlhpc record --checkpoint runs/push/checkpoints/global_step_60 --episodes 200 --only-success --output demos.h5",
        "rlhpc record --expert rlhpc.embodied.envs.experts:push_cube --config configs/embodied/push_cube_bc.yaml "
        "--only-success --output demos/push_cube.h5",
        "rlhpc record --run runs/push --episodes 200 --to lerobot --videos --task 'push the cube' --output lerobot/push",
    ),
    "pairs": (
        "rlhpc pairs --run runs/demo_sft --output train.jsonl",
        "rlhpc pairs --run runs/demo_sft --suite held_out --output held_out.jsonl",
        "rlhpc pairs --model Qwen/Qwen2.5-0.5B-Instruct --config configs/reasoning/gsm8k.yaml --output train.jsonl",
    ),
    "convert": (
        "rlhpc convert --run runs/quickstart",
        "rlhpc convert --checkpoint /elsewhere/checkpoints/global_step_60 --output policy",
    ),
    "dagger": (
        "rlhpc dagger configs/embodied/push_cube_bc.yaml --expert rlhpc.embodied.envs.experts:push_cube "
        "--rounds 2 demos.path=null",
        "rlhpc dagger configs/embodied/panda_pick_hil.yaml --intervene keyboard env.eval.num_envs=1",
        "rlhpc dagger configs/embodied/panda_pick_hil.yaml --intervene keyboard --to lerobot --task 'pick the cube' "
        "env.eval.num_envs=1",
    ),
}

_INTERVENE = "who watches and takes over: keyboard, gamepad, scripted, or one with settings: '{keyboard: {hz: 5}}'"


def _source(
    args: argparse.Namespace, alternative_option: str = "", model_purpose: str = ""
) -> tuple[Path | None, Path, Trust | None]:
    """Returns the checkpoint, the configuration file, and the code that a checkpoint's configuration may import.

    The third value is None for a configuration file that the user names, which may import any code.

    Args:
        alternative_option: Option that replaces the checkpoint, which is then None; "" if there is no such option.
        model_purpose: Purpose of the configuration, for the message.
    """
    if alternative_option and getattr(args, alternative_option) is not None:
        if args.config is None or args.checkpoint or args.run:
            raise ConfigError(
                f"--{alternative_option} needs --config RUN.yaml, which {model_purpose}; and no checkpoint"
            )
        return None, Path(args.config), None
    checkpoint = checkpoint_of(args)
    if args.config is not None:
        return checkpoint, Path(args.config), None
    config = checkpoint / CONFIG
    if not config.is_file():
        raise CheckpointError(f"{checkpoint} has no config.yaml, so it is no checkpoint of rlhpc, or incomplete")
    return checkpoint, config, Trust.from_overrides(args.overrides, _may_import_code(args, checkpoint))


def _may_import_code(args: argparse.Namespace, checkpoint: Path | None) -> bool:
    """Returns whether code that the checkpoint names may be imported: the user allows it, or a run of the
    user wrote the checkpoint.
    """
    from rlhpc.checkpoint.manifest import is_trusted

    return bool(args.trust_checkpoint_code) or (checkpoint is not None and is_trusted(checkpoint))


def _eval(args: argparse.Namespace) -> int:
    from rlhpc.runs.configuration import load_config
    from rlhpc.runs.task_type import task_type_of

    require_positive(args, "episodes")
    suite_name = args.suite or "default"
    if args.layers:
        return _compare_layers(args, suite_name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", suite_name):
        raise ConfigError(f"--suite is {suite_name!r}; it becomes a file's name: use letters, digits, '.', '_' and '-'")
    checkpoint, config, code_trust = _source(args, "model", "says how it is asked and judged")
    if checkpoint is None:
        return _eval_model(args, config, suite_name)
    cfg = load_config(config, args.overrides, training=False, trust=code_trust)
    if suite_overrides := list(cfg.workflow.suites.get(suite_name, ())):
        if code_trust is not None and not code_trust.everything:
            # These overrides come from the checkpoint, not from the user.
            without_variables({"suites": suite_overrides}, code_trust, str(config))
        cfg = load_config(config, [*suite_overrides, *args.overrides], training=False, trust=code_trust)
    run = RunPaths.from_checkpoint(checkpoint)
    output = check_file("--output", Path(args.output)) if args.output else None
    if output is None and run is not None and (step := step_of(checkpoint.name)) is not None:
        output = run.eval_result(step, suite_name)
        suite_changes = [*args.overrides, *([] if args.episodes is None else [f"--episodes {args.episodes}"])]
        if suite_changes and args.suite is None:
            raise ConfigError(
                f"the run's own evaluation belongs in {output}, and {', '.join(suite_changes)} makes it another one: say with "
                "--suite whose result it is (a new name keeps both), or name a file with --output"
            )
    summary = task_type_of(cfg).offline.evaluate(
        cfg,
        checkpoint,
        suite=suite_name,
        episodes=args.episodes,
        output=output,
        trust_code=_may_import_code(args, checkpoint),
    )
    print(f"{checkpoint.name}: {summary}" + (f" → {output}" if output else ""))
    return 0


def _list_model_overrides(args: argparse.Namespace) -> list[str]:
    return [*args.overrides, *([f"actor.model.model_path={args.model}"] if args.model else [])]


def _eval_model(args: argparse.Namespace, config: Path, suite: str) -> int:
    """Evaluates the language model that a configuration names, without a checkpoint."""
    from rlhpc.config.typed import select
    from rlhpc.runs.configuration import load_config
    from rlhpc.runs.task_type import task_type_of

    cfg = load_config(config, _list_model_overrides(args), training=False)
    output = check_file("--output", Path(args.output)) if args.output else None
    summary = task_type_of(cfg).offline.evaluate_model(cfg, suite=suite, output=output)
    name = Path(str(select(cfg, "actor.model.model_path"))).name
    print(f"{name}: {summary}" + (f" → {output}" if output else ""))
    return 0


def _compare_layers(args: argparse.Namespace, suite: str) -> int:
    """Prints by layer how far the hidden states of trainer and engine differ."""
    from rlhpc.language.config.run import answers
    from rlhpc.runs.configuration import load_config

    checkpoint, config, code_trust = _source(args, "model", "says how it is asked")
    overrides = args.overrides if checkpoint is not None else _list_model_overrides(args)
    cfg = load_config(config, overrides, training=False, trust=code_trust)
    if not answers(cfg):
        raise ConfigError(
            f"{config}: --layers compares a trainer with a rollout engine, and {cfg.runner.task_type} runs have none"
        )
    from rlhpc.language.evaluation.layer_mismatch import NUM_PROBLEMS, format_table, measure_layer_mismatch
    from rlhpc.language.models.builtin import resolve_model

    output = check_file("--output", Path(args.output)) if args.output else None
    model = resolve_model(cfg.actor.model) if checkpoint is None else checkpoint
    num_problems = args.episodes or NUM_PROBLEMS
    print(format_table(measure_layer_mismatch(cfg, model, suite, num_problems=num_problems, output=output)))
    return 0


def _check_policy(args: argparse.Namespace) -> int:
    """Checks a policy against demonstrations; returns 1 if something is wrong with its inputs or outputs."""
    require_positive(args, "episodes", "frames")
    if args.control_hz is not None and not 0 < args.control_hz < math.inf:
        raise ConfigError(f"--control-hz is {args.control_hz}; it must be a number above 0")
    policy_source, code_trust = Path(args.path), None
    cfg: EmbodiedConfig | None = None
    if policy_source.suffix in (".yaml", ".yml"):
        from rlhpc.embodied.config import plays
        from rlhpc.runs.configuration import load_config

        loaded_cfg = load_config(policy_source, args.overrides, training=False)
        if not plays(loaded_cfg):
            raise ConfigError(
                f"{policy_source}: a run of kind {loaded_cfg.runner.task_type} has no environment (section env)"
            )
        cfg = loaded_cfg
    else:
        from rlhpc.checkpoint.start import find_weights

        if args.overrides:
            raise ConfigError(
                f"overrides ({args.overrides[0]}) belong to a configuration, and {policy_source} is a folder"
            )
        policy_source = find_weights(args.path, "PATH")
        code_trust = Trust(_may_import_code(args, policy_source))
    from rlhpc.embodied.evaluation.open_loop import format_check
    from rlhpc.embodied.preflight import check_against_demonstrations
    from rlhpc.embodied.python_env import call_where_importable

    policy_check = call_where_importable(
        policy_source,
        check_against_demonstrations,
        policy_source,
        args.demos,
        num_episodes=args.episodes,
        num_frames=args.frames,
        control_hz=args.control_hz,
        cfg=cfg,
        trust=code_trust,
    )
    print(format_check(policy_check))
    return 1 if policy_check.faults else 0


def _play(args: argparse.Namespace) -> int:
    from rlhpc.runs.configuration import load_config
    from rlhpc.runs.task_type import PlayOptions, task_type_of

    if args.run is not None and "=" in args.run and not Path(args.run).exists():
        args.run, args.overrides = None, [args.run, *args.overrides]
    require_positive(args, "episodes", "max_tokens")
    if args.seed is not None and args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}; it must be 0 or more")
    checkpoint, config, code_trust = _source(args)
    assert checkpoint is not None
    cfg = load_config(config, args.overrides, training=False, trust=code_trust)
    run, step = RunPaths.from_checkpoint(checkpoint), step_of(checkpoint.name)
    default_video = run.video(step) if run is not None and step is not None else Path(f"{checkpoint.name}.mp4")
    summary = task_type_of(cfg).offline.play(
        cfg,
        checkpoint,
        PlayOptions(
            video=check_file("--output", Path(args.output)) if args.output else default_video,
            episodes=args.episodes,
            seed=args.seed,
            system=args.system,
            max_tokens=args.max_tokens,
            trust_code=_may_import_code(args, checkpoint),
        ),
    )
    if summary:
        print(f"{checkpoint.name}: {summary}")
    return 0


def _record(args: argparse.Namespace) -> int:
    from rlhpc.runs.configuration import load_config

    require_positive(args, "episodes")
    options = format_options(args)
    output = (check_file if args.to == "hdf5" else check_folder)("--output", Path(args.output))
    checkpoint, config, code_trust = _source(args, "expert", "names the environment")
    cfg = load_config(config, args.overrides, training=False, trust=code_trust)
    policy_mode = "train" if args.sample else "eval"
    from rlhpc.embodied.config import plays

    if not plays(cfg):
        raise ConfigError(f"{config}: a run of kind {cfg.runner.task_type} has no environment (section env) to record")
    from rlhpc.embodied.evaluation.evaluate import record_episodes
    from rlhpc.embodied.python_env import call_where_importable

    policy_source = str(checkpoint or args.expert)
    record_summary = call_where_importable(
        policy_source,
        record_episodes,
        policy_source,
        cfg,
        output,
        episodes=args.episodes,
        only_success=args.only_success,
        mode=policy_mode,
        teacher=args.teacher,
        intervene=args.intervene,
        trust_code=_may_import_code(args, checkpoint),
        options=options,
    )
    success_text = f", success_once {record_summary['success_once']:.1%}" if "success_once" in record_summary else ""
    print(
        f"{record_summary['episodes']} of {record_summary['played']} episodes of {record_summary['env_id']} "
        f"({record_summary['steps']} steps, mean return {record_summary['return_mean']:.2f}{success_text}) → {args.output}"
    )
    return 0


def _write_pairs(args: argparse.Namespace) -> int:
    """Writes scored answers of a language model as data for a reward model."""
    from rlhpc.runs.configuration import load_config

    if args.samples < 2:
        raise ConfigError(f"--samples is {args.samples}; it must be at least 2: a pair needs two responses")
    if not 0 < args.temperature < float("inf"):
        raise ConfigError(f"--temperature is {args.temperature}; it must be above 0: a pair needs different responses")
    checkpoint, config, code_trust = _source(args, "model", "says how it is asked and judged")
    cfg = load_config(config, _list_model_overrides(args), training=False, trust=code_trust)
    output = check_file("--output", Path(args.output))
    from rlhpc.language.config.run import answers

    if not answers(cfg):
        raise ConfigError(
            f"{config}: runs of kind {cfg.runner.task_type} do not answer problems; pairs come from reasoning or sft runs"
        )
    from rlhpc.language.evaluation.preference_pairs import describe, make_pairs

    pairs_result = make_pairs(
        cfg, checkpoint, output, suite=args.suite, num_samples=args.samples, temperature=args.temperature,
        form="labels" if args.labels else "pairs", shuffled=args.shuffle,
    )  # fmt: skip
    print(f"{describe(pairs_result)} → {args.output}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    from rlhpc.runs.task_type import Exporting, task_type_of_checkpoint

    checkpoint = checkpoint_of(args, args.overrides)
    output = check_folder("--output", Path(args.output)) if args.output else None
    run = RunPaths.from_checkpoint(checkpoint)
    if output is None and run is not None and (step := step_of(checkpoint.name)) is not None:
        output = run.export(step) if not args.critic else run.export(step).with_name(f"{checkpoint.name}-critic")
    options = Exporting(
        licence=args.license,
        adapter_only=args.adapter_only,
        base=args.base,
        dtype=args.dtype,
        critic=args.critic,
        released=args.released,
        trust_code=_may_import_code(args, checkpoint),
    )
    print(task_type_of_checkpoint(checkpoint).offline.export(checkpoint, output, options))
    return 0


def _run_dagger(args: argparse.Namespace) -> int:
    from rlhpc.embodied.runners.dagger import dagger

    if args.rounds < 1 or args.episodes < 1:
        raise ConfigError("--rounds and --episodes must be at least 1")
    if (args.expert is None) == (args.intervene is None):
        raise ConfigError(
            "name who labels: --expert for every step that the clone plays, or --intervene for those it is led in"
        )
    rounds = dagger(args.config, args.overrides, expert=args.expert, num_rounds=args.rounds, num_episodes=args.episodes,
                  intervene=args.intervene, trust_code=args.trust_checkpoint_code,
                  options=format_options(args))  # fmt: skip
    print(rounds[-1]["checkpoint"])
    return 0


#: Options for the format of written episodes.
_EPISODE_FORMAT = (
    argument(
        "--to",
        choices=("hdf5", "lerobot"),
        default="hdf5",
        help="format of what is written: ManiSkill's HDF5 (default), or LeRobot's v3.0",
    ),
    *FORMAT,
)


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "eval",
        _eval,
        "evaluate a checkpoint: a policy by deterministic episodes, a language model on a suite of problems",
        _EXAMPLES["eval"],
        *CHECKPOINT,
        argument("--output", help="where to write; default in the checkpoint's own run folder"),
        *positionals(),
        argument(
            "--suite",
            help="name of the evaluation (default: default); with changed settings it has to be named, or --output",
        ),
        argument("--episodes", type=int, help="default: env.eval.num_episodes"),
        argument(
            "--layers",
            action="store_true",
            help="language models: compare the hidden states of trainer and rollout engine after each layer, on answers to "
            "the suite's first problems (--episodes, default 4), instead of scoring them",
        ),
        argument("--config", help="configuration to use instead of the checkpoint's own"),
        argument("--model", help="language model as it is, instead of a checkpoint ('' takes that of --config)"),
    )
    add_command(
        commands,
        "check-policy",
        _check_policy,
        "compare a policy's predictions with demonstrations: cameras, statistics, chunk and frame rate, before it trains",
        _EXAMPLES["check-policy"],
        argument(
            "path",
            metavar="PATH",
            help=f"{RUN}, checkpoint or export; or the YAML file of a run with pretrained weights",
        ),
        *positionals(),
        argument(
            "--demos",
            nargs="+",
            required=True,
            metavar="DATA",
            help="files of trajectories, or LeRobot's or Minari's datasets",
        ),
        argument("--episodes", type=int, default=20, help="most episodes to read (default 20)"),
        argument("--frames", type=int, default=256, help="frames to compare, drawn from all of them (default 256)"),
        argument("--control-hz", type=float, help="rate at which the policy acts (default: not compared)"),
        TRUST,
    )
    add_command(
        commands,
        "play",
        _play,
        "watch a trained policy play, or talk with a trained language model in the terminal",
        _EXAMPLES["play"],
        argument("run", nargs="?", help=f"{RUN}; or --checkpoint"),
        *positionals(),
        argument("--checkpoint", help="checkpoint folder (global_step_<N>) of any run"),
        argument("--step", default="latest", help="global step of the run's checkpoint (default: latest)"),
        argument("--config", help="configuration to use instead of the checkpoint's own"),
        argument("--episodes", type=int, help="how many episodes are played (default 4)"),
        argument("--seed", type=int, help="of the environment, or of sampling (default: that of evaluations)"),
        argument(
            "--output", help="video to write where there is no display (default: in the checkpoint's own run folder)"
        ),
        argument("--system", help="language models: first message of the conversation"),
        argument(
            "--max-tokens", type=int, help="language models: most tokens of a reply (default: rollout.max_new_tokens)"
        ),
        TRUST,
    )
    add_command(
        commands,
        "record",
        _record,
        "record episodes of a policy or an expert as trajectories (ManiSkill's HDF5, or a LeRobot dataset)",
        _EXAMPLES["record"],
        *CHECKPOINT,
        argument("--expert", help="function of observations, as module:function, instead of a checkpoint"),
        argument("--config", help="configuration to use instead of the checkpoint's own; its env.eval is played"),
        argument("--episodes", type=int, default=100, help="episodes to write (default 100)"),
        argument("--only-success", action="store_true", help="write only episodes that succeeded"),
        argument("--sample", action="store_true", help="sample actions instead of taking the most likely"),
        argument(
            "--teacher", help="write the actions of this expert or checkpoint in the place of those played (DAgger)"
        ),
        argument("--intervene", metavar="WHO", help=_INTERVENE),
        argument(
            "--output", required=True, help="the .h5 file; a .json of the same name goes beside it. LeRobot: the folder"
        ),
        *_EPISODE_FORMAT,
        *positionals(),
    )
    add_command(
        commands,
        "pairs",
        _write_pairs,
        "let a language model answer, and write a right answer beside each wrong one: data for a reward model",
        _EXAMPLES["pairs"],
        *CHECKPOINT,
        argument("--config", help="configuration to use instead of the checkpoint's own"),
        argument("--model", help="language model as it is, instead of a checkpoint ('' takes that of --config)"),
        argument("--suite", help="of this suite's problems (default: of those of training)"),
        argument("--samples", type=int, default=8, help="answers to each problem (default 8)"),
        argument("--temperature", type=float, default=1.0, help="of sampling (default 1)"),
        argument("--labels", action="store_true", help="each answer with its reward as label, rather than pairs"),
        argument("--shuffle", action="store_true", help="a control: which of a pair is preferred is drawn by lot"),
        argument("--output", required=True, help="the .jsonl file"),
        *positionals(),
    )
    add_command(
        commands,
        "convert",
        _convert,
        "export a checkpoint's policy: safetensors and a config",
        _EXAMPLES["convert"],
        *CHECKPOINT,
        argument("--output", help="where to write; default in the checkpoint's own run folder"),
        *positionals(),
        argument("--adapter-only", action="store_true", help="with LoRA: the adapter in peft's format, not merged"),
        argument(
            "--critic", action="store_true", help="the critic of a language model's run, as a sequence classifier"
        ),
        argument(
            "--released",
            action="store_true",
            help="an OpenVLA or LeRobot policy as its family is released: for its own code",
        ),
        argument(
            "--base",
            help="with LoRA or frozen parts: where the model is now that training began from (default: where it was)",
        ),
        argument("--license", help="for the model card, such as apache-2.0 (default: it says other)"),
        argument(
            "--dtype", choices=("float32", "bfloat16", "float16"), help="of a language model (default: as trained)"
        ),
    )
    add_command(
        commands,
        "dagger",
        _run_dagger,
        "clone an expert, let the clone play, label what it sees, and clone again",
        _EXAMPLES["dagger"],
        *positionals(config="YAML file of a run of behaviour cloning (runner.task_type: bc)"),
        TRUST,
        argument("--expert", help="who labels all steps: a function as module:function, or a checkpoint"),
        argument("--intervene", metavar="WHO", help=f"{_INTERVENE}; only what they do is cloned"),
        argument("--rounds", type=int, default=3, help="how often the clone plays (default 3)"),
        argument("--episodes", type=int, default=20, help="episodes it plays each time (default 20)"),
        *_EPISODE_FORMAT,
    )
