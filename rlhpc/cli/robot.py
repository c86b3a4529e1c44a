"""`robot`: invites a robot on another machine to a run, connects it, and releases a stopped robot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlhpc.cli.arguments import check_file
from rlhpc.cli.parser import add_command, argument
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.standard_streams import tell

_EXAMPLES = (
    "rlhpc robot invite runs/arm --output arm.key",
    "scp arm.key lab-pc: && ssh lab-pc",
    "rlhpc robot serve arm.key --robot my_arm:Arm --kwargs 'address: 192.168.1.5' --ssh '-J me@login node07'",
    "rlhpc robot resume",
)


def _robot(args: argparse.Namespace) -> int:
    if args.overrides:
        raise ConfigError(f"rlhpc robot takes no overrides ({args.overrides[0]})")
    if args.action == "resume":
        return _resume(args)
    if not args.what:
        required_argument = "the run's folder" if args.action == "invite" else "the key's file"
        raise ConfigError(f"rlhpc robot {args.action} needs {required_argument}")
    return _write_invitation(args) if args.action == "invite" else _serve(args)


def _resume(args: argparse.Namespace) -> int:
    import time

    from rlhpc.embodied.robots.notices import resume, stopped_robots

    if args.what:
        print(f"{args.what} may move again; it was stopped: {resume(args.what)}")
        return 0
    for record in stopped_robots():
        print(
            f"{record['robot']}  stopped {max(0.0, time.time() - float(record['since'])):.0f} s ago: {record['reason']}"
        )
    print("look at the robot first, then: rlhpc robot resume NAME" if stopped_robots() else "no robot is stopped")
    return 0


def _find_registration_folder(folder_text: str) -> Path:
    """Returns the folder in which robots register: in a run's registry, or the named folder if a command waits there."""
    from rlhpc.cli.arguments import is_run, require_driver
    from rlhpc.jobs.paths import RunPaths
    from rlhpc.runtime.registry import ROBOTS

    paths = RunPaths(expand_home(folder_text).absolute())
    if is_run(paths):
        return require_driver(paths) / ROBOTS
    if any(paths.root.glob("slot_*.json")):
        return paths.root
    raise ConfigError(f"{folder_text} is no run folder, and in no such folder a robot is waited for (kwargs.folder)")


def _write_invitation(args: argparse.Namespace) -> int:
    from rlhpc.embodied.robots.joining import invite

    if not args.output:
        raise ConfigError("rlhpc robot invite needs --output, the file for the key")
    if args.minutes <= 0 or args.wait < 0:
        raise ConfigError(f"--minutes is {args.minutes:g} and --wait {args.wait:g}; above 0 and at least 0 are wanted")
    output = check_file("--output", Path(args.output))
    key = invite(
        _find_registration_folder(args.what), output, slot=args.slot, minutes=args.minutes, wait_s=args.wait, run=args.what
    )  # fmt: skip
    address = key.place
    print(
        f"{output}: a key for {address.robot} (slot {address.slot}), for one joining within {args.minutes:g} minutes. "
        f"Take it there (scp {output} ROBOT:), and there:\n"
        f"  rlhpc robot serve {output.name} --robot MODULE:CLASS --ssh {_choose_ssh_host(address)}"
    )
    return 0


def _choose_ssh_host(address: Any) -> str:
    return f"{address.node}" if address.address.startswith("127.") else "LOGIN_NODE"


def _serve(args: argparse.Namespace) -> int:
    from rlhpc.embodied.robots.joining import Key
    from rlhpc.embodied.robots.robot_env import positive_number
    from rlhpc.embodied.robots.safety import build_safe_robot
    from rlhpc.embodied.robots.server import BOUNDS, RobotRoute, RobotServer, machine_limits
    from rlhpc.runtime.files import read_yaml
    from rlhpc.runtime.interrupts import Interrupts

    if not args.robot:
        raise ConfigError("rlhpc robot serve needs --robot, the robot's class as module:Class")
    if args.patience < 0:
        raise ConfigError(f"--patience is {args.patience:g}; it must be 0 or more")
    key = Key.read(expand_home(args.what))
    connection = RobotRoute(key, args.ssh, args.address)
    try:
        kwargs = read_yaml("{" + args.kwargs + "}")
    except Exception:
        raise ConfigError(
            f"--kwargs is {args.kwargs!r}; it must be as YAML has it: 'address: 192.168.1.5, port: 5'"
        ) from None
    user_bounds = {name: getattr(args, name) for name in BOUNDS if getattr(args, name) is not None}
    bounds = {name: positive_number(name, bound_value) for name, bound_value in user_bounds.items()}
    with Interrupts():  # a signal ends the command after the robot is stopped
        robot = build_safe_robot(args.robot, "--robot", kwargs, machine_limits(bounds, args.resume))
        try:
            RobotServer(robot, bounds, tell).serve(key, connection, args.patience)
        finally:
            robot.close()
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    limit_text = "that this machine allows at most, whatever the run says (serve)"
    add_command(
        commands,
        "robot",
        _robot,
        "invite a robot on another machine to a run, bring it there, let it move again",
        _EXAMPLES,
        argument(
            "action",
            choices=("invite", "serve", "resume"),
            help="on the cluster: make a key; at the robot: join by it; after a stop for safety: let it move again",
        ),
        argument(
            "what",
            nargs="?",
            help="invite: the run's folder; serve: the key's file; resume: the robot's name, or nothing to list those stopped",
        ),
        argument("--output", help="the file to write the key to (invite)"),
        argument("--slot", type=int, help="whose key, where a run has several robots (invite)"),
        argument("--minutes", type=float, default=60.0, help="how long the key is good for (invite; default 60)"),
        argument(
            "--wait",
            type=float,
            default=0.0,
            metavar="SECONDS",
            help="how long to wait until the run waits for a robot (invite; default 0)",
        ),
        argument("--robot", help="the robot's class, as module:Class (serve)"),
        argument("--kwargs", default="", help="its arguments, as in YAML: 'address: 192.168.1.5, port: 5' (serve)"),
        argument(
            "--ssh",
            default="",
            help="options and host for ssh, which must reach the run's node: '-J me@login node07' (serve; default: no ssh)",
        ),
        argument("--address", default="", help="HOST:PORT of a tunnel of your own, in place of --ssh (serve)"),
        argument(
            "--patience",
            type=float,
            default=60.0,
            metavar="SECONDS",
            help="how long to try to reach the run, also when the line to it was lost (serve; default 60)",
        ),
        argument(
            "--resume",
            choices=("person", "auto"),
            default="person",
            help="who ends a stop for safety: a person (rlhpc robot resume), or it ends by itself (serve; default person)",
        ),
        argument("--hz", type=float, help=f"steps a second {limit_text}"),
        argument("--stale-s", type=float, help=f"seconds without a command {limit_text}"),
        argument("--max-change", type=float, help=f"change of a command from one step to the next {limit_text}"),
    )
