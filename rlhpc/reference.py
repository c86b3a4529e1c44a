"""Reference pages generated from the code: `python -m rlhpc.reference PAGE > docs/reference/PAGE.md`."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import rlhpc
from rlhpc.config.reference import render
from rlhpc.config.sweep import SWEEP, SweepConfig
from rlhpc.runs.task_type import all_task_types
from rlhpc.runtime.exit_codes import report_errors
from rlhpc.troubleshooting import render_page

_CLI_HEAD = """# Command line

Generated from the parser by `python -m rlhpc.reference cli`.

`key=value` words override the configuration and may stand anywhere; every key is in [config.md](config.md).
A command that takes a run also takes the run's configuration file, with the overrides that the run was started with.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | something failed on the way; the message names rank, node and log where a worker failed |
| 2 | what was asked for cannot be done (configuration, placement, checkpoint, submission); one message says why |
| 130 | interrupted |
| 128 + n | a run was told to stop by signal n; it saved a checkpoint first |

| environment variable | meaning |
|---|---|
| `RLHPC_SITE` | site file of the cluster, where `--site` is not given |
| `RLHPC_DEBUG` | `1` prints the traceback of an unexpected error |
"""

_RUNTIME_HEAD = """# Runtime

Generated from the docstrings by `python -m rlhpc.reference runtime`. All names import from `rlhpc`; `import rlhpc` alone loads
neither torch nor submitit. A script that uses them:

```python
from rlhpc import Cluster, NodePlacementStrategy, Worker


class Adder(Worker):
    def __init__(self, start):
        super().__init__()
        self.total = start

    def add(self, number):
        self.total += number + self.rank
        return self.total


if __name__ == "__main__":
    cluster = Cluster.local()
    group = Adder.create_group(10).launch(cluster, placement_strategy=NodePlacementStrategy([0, 0]), name="adder")
    assert group.add(1).wait() == [11, 12]
    assert group.execute_on(1).add(1).wait() == [14]
    group.shutdown()
```
"""

#: Sections of the runtime page → names in it; for a name with `…`, the page also lists its members.
_PAGE_SECTIONS = {
    "Cluster": ("Cluster…", "Node", "NodeGroup"),
    "Placement": (
        "Placement", "PackedPlacementStrategy", "FlexiblePlacementStrategy", "NodePlacementStrategy",
        "HybridComponentPlacement…", "ModelParallelComponentPlacement",
    ),
    "Groups and calls": ("Worker…", "WorkerGroup…", "Handle…"),
    "Channels": ("Channel…", "QueueFull", "QueueEmpty"),
    "Session": ("Session",),
    "Training": ("train", "TrainingRun…", "load_run", "LoadedRun…"),
    "Configuration": ("load_config",),
    "Roles and runners": (
        "EmbodiedActor", "MultiStepRolloutWorker", "EnvWorker", "Runner", "EmbodiedRunner", "OffPolicyRunner", "BcRunner",
        "ReasoningRunner", "SftRunner", "DpoRunner", "RewardModelRunner",
    ),
    "Environments and policies of your own": (
        "VectorEnv…", "SlotwiseVectorEnv", "SlotStep", "register_env", "Policy…", "register_model",
    ),
    "Rewards, agents and environments of language models": (
        "Prompt", "Sample", "Reward", "register_reward", "Agent…", "ToolAgent", "register_agent", "Environment…",
        "ToolEnvironment", "Step", "tool", "register_environment",
    ),
    "A trained policy": ("load_exported",),
    "Algorithms of language models": (
        "LanguageAlgorithm…", "Column", "Scorer…", "LogitReader…", "Rater…", "TokenBatch…", "register_algorithm",
        "register_scorer",
    ),
}  # fmt: skip
_INTRODUCTIONS = {
    "Placement": """`cluster.component_placement` maps components to `resource ranks[:process ranks]`:

- Ranks are single (`3`), ranges (`0-7`), lists (`0-1,4`) or `all`. Resource ranks are unique and ascending.
- The resources are accelerators, numbered over the cluster or the node group; nodes where there are no accelerators.
- Without process ranks each resource gets one process. With them (`0-3:0-7`, parts separated by commas) one count divides
  the other: several resources a process, or several processes a resource. Process ranks are contiguous and ascending.
- `actor,rollout: 0-7` gives both components the same resources; `env: {node_group: cpu, placement: 0-1}` counts within the
  group.
- The accelerators of a process share one node and one kind.

What breaks a rule is a `PlacementError` that names component, text and rule. Every strategy below has
`place(cluster) → list[Placement]`, one entry a rank, in rank order.""",
    "Groups and calls": """A public method of a worker class is called on the group: `group.method(*args)` runs on all ranks
and returns a `Handle` at once. Names that begin with `_` are refused.""",
}
#: Classes that other calls return; users do not construct them.
_WITHOUT_CONSTRUCTOR = ("WorkerGroup", "Handle", "Channel", "TrainingRun")
#: Descriptions of members without a docstring.
_MEMBER_DOCS = {
    "Cluster.num_nodes": "How many nodes there are.",
    "Cluster.num_accelerators": "How many accelerators all nodes have.",
    "HybridComponentPlacement.components": "Names of the components that have a place.",
    "HybridComponentPlacement.has_component": "Whether the component has a place.",
    "WorkerGroup.world_size": "Number of ranks.",
    "WorkerGroup.async_shutdown": "`shutdown` for coroutines.",
    "Channel.empty": "Whether nothing is queued under `key`.",
    "Channel.full": "Whether `put` would block.",
}
_SECTIONS = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):$")


def _format_cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _format_sentence(summary: str) -> str:
    """Returns a command's summary as a sentence."""
    return f"{summary[:1].upper()}{summary[1:]}."


def _format_argument(action: argparse.Action) -> tuple[str, str]:
    """Formats an argument for the usage line and for the table."""
    name = action.metavar or action.dest
    if not action.option_strings:
        return (f"[{name} …]" if action.nargs == "*" else str(name).upper()), str(name)
    value = "" if action.nargs == 0 else " " + ("|".join(action.choices) if action.choices else action.dest.upper())
    return f"[{action.option_strings[0]}{value}]", ", ".join(action.option_strings) + value


def render_cli() -> str:
    """Formats the page of all commands, in Markdown."""
    from rlhpc.cli import build_parser

    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    lines = [_CLI_HEAD]
    for name, command in commands.choices.items():
        arguments = [action for action in command._actions if action.dest != "help"]
        options = [action for action in arguments if action.option_strings]
        positionals = [action for action in arguments if not action.option_strings]
        usage_text = " ".join(_format_argument(action)[0] for action in [*positionals, *options])
        lines += [f"## rlhpc {name}\n", f"{_format_sentence(command.description or '')}\n", "```text"]
        lines += textwrap.wrap(f"rlhpc {name} {usage_text}", 110, subsequent_indent="    ", break_on_hyphens=False)
        lines += ["```\n", "| argument | meaning |", "|---|---|"]
        for action in [*positionals, *options]:
            argument = "`" + _format_cell(_format_argument(action)[1]) + "`"
            default_text = f" (default: {action.default})" if action.choices and action.default is not None else ""
            lines.append(f"| {argument} | {_format_cell(action.help)}{default_text} |")
        examples = [line.strip() for line in (command.epilog or "").splitlines()[1:]]
        lines += ["", "```bash", *examples, "```\n"]
    return "\n".join(lines).rstrip() + "\n"


def _format_annotation(value_type: Any) -> str:
    return value_type if isinstance(value_type, str) else getattr(value_type, "__name__", str(value_type))


def _signature(function: Any) -> str:
    """Formats a signature as `(a: int, b: str = 'x') → int`; the text is the same in all Python versions."""
    signature = inspect.signature(function)
    parameter_texts: list[str] = []
    has_star = False
    parameters = list(signature.parameters.values())
    if inspect.isfunction(function) and parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            parameter_texts.append("*")
        has_star = has_star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else "*" * (parameter.kind is parameter.VAR_POSITIONAL)
        parameter_text = stars + parameter.name
        has_annotation = parameter.annotation is not parameter.empty
        parameter_text += f": {_format_annotation(parameter.annotation)}" if has_annotation else ""
        if parameter.default is not parameter.empty:
            value = repr(parameter.default)
            parameter_text += (" = " if has_annotation else "=") + ("…" if value.startswith("<") else value)
        parameter_texts.append(parameter_text)
    result = signature.return_annotation
    result_text = "" if result in (signature.empty, None, "None") else f" → {_format_annotation(result)}"
    return f"({', '.join(parameter_texts)}){result_text}"


def _iter_paragraphs(doc: str) -> Iterator[str]:
    """Yields the paragraphs of a docstring in Markdown; sections such as `Args:` become lists."""
    for block in re.split(r"\n\s*\n", doc) if doc else ():
        first_line, *entry_lines = block.splitlines()
        if not _SECTIONS.match(first_line):
            yield block
            continue
        body = textwrap.dedent("\n".join(entry_lines))
        entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=\S)", body)]
        if first_line == "Returns:":
            yield f"Returns: {' '.join(entries)}"
            continue
        items = [re.sub(r"^([\w*, ]+): ", lambda m: f"`{m.group(1)}`: ", entry) for entry in entries]
        yield "\n".join([first_line, "", *(f"- {item}" for item in items)])


def _render_doc(obj: Any) -> list[str]:
    """Returns the paragraphs of a docstring; for a class with an inherited constructor, also its sections on arguments."""
    docs = [*_iter_paragraphs(inspect.getdoc(obj) or "")]
    if isinstance(obj, type) and "__init__" not in vars(obj):
        constructor_class = next(cls for cls in obj.__mro__ if "__init__" in vars(cls))
        docs += [
            paragraph_text
            for paragraph_text in _iter_paragraphs(inspect.getdoc(constructor_class) or "")
            if paragraph_text.startswith(("Args:", "Raises:"))
        ]
    return [f"{paragraph}\n" for paragraph in docs if paragraph]


def _members(cls: type) -> Iterator[tuple[str, Any, str]]:
    """Yields the public methods and properties of a class: name, documented object, signature.

    Those of a base class are included if the page has no entry for the base.
    """
    bases = [
        base for base in cls.__mro__[1:] if base.__module__.startswith("rlhpc.") and base.__name__ not in rlhpc.__all__
    ]
    members: dict[str, Any] = {}
    for base in (cls, *bases):
        members = {**members, **{name: member for name, member in vars(base).items() if name not in members}}
    for name, member in members.items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            type_text = _format_annotation(inspect.signature(member.fget).return_annotation) if member.fget else ""
            yield name, member, f": {type_text}"
        elif isinstance(member, classmethod | staticmethod):
            yield name, member.__func__, _signature(member.__func__)
        elif inspect.isfunction(member):
            yield name, member, _signature(member)


def _entry(name: str) -> list[str]:
    name, members = name.rstrip("…"), name.endswith("…")
    obj = getattr(rlhpc, name)
    is_error = isinstance(obj, type) and issubclass(obj, Exception)
    lines = [f"### {name}\n"]
    if not is_error and name not in _WITHOUT_CONSTRUCTOR:
        lines += [f"```text\n{name}{_signature(obj)}\n```\n"]
    lines += _render_doc(obj)
    if members:
        for member, documented, signature in _members(obj):
            lines += [f"#### {name}.{member}\n", f"```text\n{member}{signature}\n```\n"]
            lines += _render_doc(documented) or [f"{_MEMBER_DOCS[f'{name}.{member}']}\n"]
    return lines


def render_runtime() -> str:
    """Formats the page of all names that `rlhpc` exports, in Markdown."""
    lines = [_RUNTIME_HEAD]
    for title, names in _PAGE_SECTIONS.items():
        lines.append(f"## {title}\n")
        if title in _INTRODUCTIONS:
            lines.append(f"{_INTRODUCTIONS[title]}\n")
        for name in names:
            lines += _entry(name)
    documented = {name.rstrip("…") for names in _PAGE_SECTIONS.values() for name in names}
    lines += ["## Errors\n", "Every error that is meant for a user is an `RlhpcError`. A command ends with its exit code.\n",
              "| error | is a | exit code | meaning |", "|---|---|---|---|"]  # fmt: skip
    error_names = [name for name in rlhpc.__all__ if name not in documented]
    for name in error_names:
        error = getattr(rlhpc, name)
        meaning = (inspect.getdoc(error) or "").split("\n\n")[0]
        lines.append(f"| `{name}` | `{error.__bases__[0].__name__}` | {error.exit_code} | {_format_cell(meaning)} |")
    for name in error_names:
        if "\n\n" in (inspect.getdoc(getattr(rlhpc, name)) or ""):
            lines += ["", f"`{name}`:\n", *_render_doc(getattr(rlhpc, name))[1:]]
            lines[-1] = lines[-1].rstrip()
    return "\n".join(lines).rstrip() + "\n"


def render_config() -> str:
    """Formats the page of all configuration keys, in Markdown."""
    return render({task_type.name: task_type.keys for task_type in all_task_types()}, {SWEEP: SweepConfig})


PAGES = {"cli": render_cli, "config": render_config, "runtime": render_runtime, "troubleshooting": render_page}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `python -m rlhpc.reference PAGE`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlhpc.reference", description="Prints a generated page.")
    parser.add_argument("page", choices=PAGES)
    page = parser.parse_args(argv).page

    def run_command() -> int:
        print(PAGES[page](), end="")
        return 0

    return report_errors(run_command)


if __name__ == "__main__":
    sys.exit(main())
