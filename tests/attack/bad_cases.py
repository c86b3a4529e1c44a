"""The cases of `bad_inputs`: drawn from the schema, from the command line's own parser, and written down."""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import resource
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhpc.cli import build_parser
from rlhpc.runs.task_type import TaskType, all_task_types, find_task_type
from tests.attack.bad_inputs import HERE, QUICKSTART, ROOT, Case, plan_words, train_words

INCLUDE = f"defaults: [{QUICKSTART}]\n"
TOGETHER = "cluster.component_placement="
RUN = "runs/tiny"
CHECKPOINT = f"{RUN}/checkpoints/global_step_1"
_NOBODY = 65534


def all_cases(seed: int) -> list[Case]:
    """All classes, in their order; the same for the same seed."""
    draw = random.Random(seed)
    return [
        *misspelt_keys(draw), *wrong_types(draw), *out_of_range(draw), *names(), *data_files(), *placements(), *yaml_files(), *overrides(),
        *parsed_arguments(), *arguments(), *long_words(), *files_of_a_run(), *outputs(), *environments(), *sites(), *workflows(),
    ]  # fmt: skip


# -- the schema ---------------------------------------------------------------------------------------------------------


#: A configuration of each kind of run.
_OF = {
    "embodied": str(QUICKSTART),
    "off_policy": str(ROOT / "configs" / "embodied" / "pendulum_sac.yaml"),
    "bc": str(ROOT / "configs" / "embodied" / "push_cube_bc.yaml"),
    "reasoning": str(ROOT / "configs" / "reasoning" / "gsm8k.yaml"),
    "sft": str(ROOT / "configs" / "reasoning" / "demo_sft.yaml"),
    "reward_model": str(ROOT / "configs" / "reasoning" / "reward_model.yaml"),
    "dpo": str(ROOT / "configs" / "reasoning" / "dpo.yaml"),
}


def owner(key: str) -> TaskType[Any]:
    """The first kind of run that has a key."""
    return next(kind for kind in all_task_types() if key in kind.schema)


def asked(key: str, word: str) -> tuple[str, ...]:
    """A plan of a run that has the key."""
    return ("plan", _OF[owner(key).name], "runner.name=tiny", word)


def all_types() -> dict[str, Any]:
    """Every key of every kind of run, outside lists of sections, with its type."""
    return {key: kind for each in reversed(all_task_types()) for key, kind in schema_types(each.config)}


def schema_types(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key outside lists of sections, with its type."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from schema_types(kind, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind


def misspelt_keys(draw: random.Random) -> Iterator[Case]:
    """Every section gets one of its keys with a letter too few, too many or two in the wrong order."""
    keys = list(all_types())
    sections: dict[str, list[str]] = {}
    for key in keys:
        sections.setdefault(key.rpartition(".")[0], []).append(key.rpartition(".")[2])
    for section, own in sections.items():
        right = draw.choice([name for name in own if len(name) > 3] or own)
        at = draw.randrange(1, len(right))
        wrong = draw.choice(
            [right[:at] + right[at + 1 :], right[:at] + "x" + right[at:], right[:at] + right[at - 1] + right[at:]]
        )
        if wrong in own:
            wrong = right + "q"
        below = f"{section}." if section else ""
        says = (f"unknown key {below}{wrong}", "did you mean", "allowed here")
        yield Case("misspelt key", f"{below}{wrong}", asked(f"{below}{right}", f"{below}{wrong}=1"), says)
    for section in {key.partition(".")[0] for key in find_task_type("embodied").schema.keys}:
        content = f"{INCLUDE}{section}s: {{a: 1}}\n"
        yield Case(
            "misspelt key", f"{section}s in a file", plan_words(config="c.yaml"),
            ("c.yaml", f"unknown key {section}s", f"did you mean {section}?"), files={"c.yaml": content},
        )  # fmt: skip


_WRONG: dict[str, tuple[str, ...]] = {
    "int": ("many", "1.5", "true", "[1]", "{a: 1}", "2026-01-01"),
    "float": ("fast", "true", "[0.1]", "{a: 1}", "1/2"),
    "bool": ("maybe", "[true]", "{a: 1}"),
    "str": ("{a: 1}", "[x]"),
    "list": ("5", "{a: 1}", "true"),
    "dict": ("5", "[1]", "word"),
}


def type_name(kind: Any) -> str:
    """`int` for `int | None`, `list` for `list[str]`; "" where everything goes."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if options and typing.get_origin(kind) not in (list, dict):
        return type_name(options[0])
    return str(getattr(typing.get_origin(kind) or kind, "__name__", "")) if kind is not Any else ""


def wrong_types(draw: random.Random) -> Iterator[Case]:
    """Every third key gets a value of another type."""
    typed = [(key, type_name(kind)) for key, kind in all_types().items()]
    typed = [(key, name) for key, name in typed if name in _WRONG]
    for key, name in sorted(draw.sample(typed, len(typed) // 3)):
        value = draw.choice(_WRONG[name])
        yield Case("wrong type", f"{key}={value}", asked(key, f"{key}={value}"), (f"{key} is", "override"))


def out_of_range(draw: random.Random) -> Iterator[Case]:
    """Every second number is put beside a bound of its range, is not finite or too large to be one."""
    numbers = [(key, type_name(kind)) for key, kind in all_types().items() if type_name(kind) in ("int", "float")]
    for key, name in sorted(draw.sample(numbers, len(numbers) // 2)):
        wide = owner(key).keys.by_path[key].range
        values = ["99999999999999999999999"] if name == "int" else [".nan", ".inf", "-.inf"]
        step = 1 if name == "int" else 0.5
        if wide is not None and wide.low is not None:
            below = wide.low if wide.above else wide.low - step
            values += [f"{below:g}", "-77"] if below not in wide else ["-77"]
        if wide is not None and wide.high is not None:
            values.append(f"{int(wide.high) + 1}")
        value = draw.choice(values)
        yield Case("number", f"{key}={value}", asked(key, f"{key}={value}"), (f"{key} is", "must"))


# -- names --------------------------------------------------------------------------------------------------------------


def names() -> Iterator[Case]:
    """Names of environments, models, algorithms and places that there are not."""
    near: dict[str, tuple[str, ...]] = {
        "env.train.env_id=CartPol-v1": ("CartPole-v1",),
        "env.train.env_id=Hopper": ("Hopper-v",),
        "env.train.env_id=5": ("env_id",),
        "env.train.env_id=''": ("env.train.env_id",),
        "env.train.env_id='a b'": ("env_id",),
        "env.train.env_id=nosuch:X-v0": ("nosuch",),
        "env.train.env_id=math:X-v0": ("X",),
        "env.train.env_id=../CartPole-v1": ("env_id",),
        "env.eval.env_id=CartPol-v1": ("env.eval.env_id", "CartPole-v1"),
        "env.train.env_type=gymnasum": ("did you mean 'gymnasium'?",),
        "env.train.env_type=math:pi": ("math:pi",),
        "env.train.env_type=nosuch:Env": ("nosuch",),
        "env.train.wrappers=[nosuch:Wrap]": ("wrappers", "nosuch"),
        "env.train.wrappers=[gymnasium.wrappers:NoSuch]": ("wrappers", "NoSuch"),
        "env.train.wrappers=[math:pi]": ("wrappers", "math:pi"),
        "env.train.wrappers=[TimeLimit]": ("wrappers", "TimeLimit"),
        "env.train.kwargs={nosuch: 1}": ("nosuch",),
        "env.train.kwargs={render_mode: human}": ("render_mode",),
        "algorithm.adv_type=gaee": ("did you mean 'gae'?",),
        "algorithm.adv_type=math:pi": ("math:pi",),
        "algorithm.adv_type=nosuch:f": ("nosuch",),
        "algorithm.loss_type=pppo": ("did you mean 'ppo'?",),
        "algorithm.loss_type=math:pi": ("math:pi",),
        "algorithm.loss_type=sac": ("loss_type",),
        "algorithm.loss_agg=token-mean": ("is for a task type", "reasoning"),
        "algorithm.normalize_advantages=yep": ("minibatch",),
        "algorithm.logprob_type=token": ("token_level",),
        "algorithm.reward_type=chunk": ("chunk_level",),
        "actor.model.model_type=mpl": ("did you mean 'mlp'?",),
        "actor.model.model_type=nosuch:Net": ("nosuch",),
        "actor.model.model_type=math:pi": ("math:pi",),
        "actor.model.model_type=cnn": ("images",),
        "actor.model.model_type=vla": ("model",),
        "actor.model.kwargs={width: 3}": ("width", "critic_gain"),
        "actor.model.activation=tahn": ("did you mean 'tanh'?",),
        "actor.optim.name=adm": ("did you mean 'adam'?",),
        "actor.training_backend=locl": ("did you mean 'local'?",),
        "actor.offload_in_rollout=true": ("reasoning",),
        "actor.training_backend=megatron": ("training_backend", "local"),
        "runner.task_type=embodid": ("did you mean 'embodied'?",),
        "runner.task_type=reasoning": ("",),
        "runner.task_type=bc": ("is for",),
        "runner.task_type=off_policy": ("",),
        "runner.logger.logger_backends=[wandb]": ("wandb",),
        "runner.logger.logger_backends=[nosuchlogger]": ("jsonl",),
        "runner.name=a/b": ("letters, digits",),
        "runner.name=..": ("letters, digits",),
        "runner.name=''": ("letters, digits",),
        "runner.name=-x": ("letters, digits",),
        f"runner.name={'a' * 300}": ("runner.name",),
        "runner.resume_dir=nosuch": ("no such checkpoint", "auto"),
        "runner.resume_dir=/etc/passwd": ("runner.resume_dir",),
        "runner.init_from=/no/such/run": ("/no/such/run",),
        "runner.run_dir=/proc/rlhpc": ("runner.run_dir", "/proc"),
        "runner.run_dir=/dev/null": ("runner.run_dir",),
        "rollout.weight_sync=carrier": ("broadcast",),
        "cluster.interface=nosuch0": ("nosuch0",),
    }  # fmt: skip
    accepted_by_plan = "cluster.interface"
    for override, says in near.items():
        if not override.startswith(accepted_by_plan):
            yield Case("name", override[:60], train_words(override), says)
    judged = ROOT / "configs" / "reasoning" / "demo.yaml"
    language = {
        "reward.terms=[{name: maths}]": ("math",),
        "reward.terms=[{name: nosuch:f}]": ("nosuch",),
        "reward.terms=[{nme: math}]": ("reward.terms[0]",),
        "reward.terms=[]": ("reward.terms",),
        "data.eval=[{nme: x}]": ("data.eval[0].name?",),
        "data.eval=5": ("is a list",),
        "reward.terms=[{weight: 1}]": ("reward.terms[0].name",),
        "data.train.source=jsonll": ("jsonl",),
        "data.train.source=nosuch:S": ("nosuch",),
        "data.eval=[{name: held_out, source: arithmetics}]": ("data.eval[held_out]", "did you mean 'arithmetic'?"),
        "rollout.rollout_backend=vlm": ("vllm",),
        "rollout.agent=nosuch": ("nosuch",),
        "algorithm.kl_type=k9": ("k3",),
        "algorithm.loss_agg=token-men": ("token-mean",),
        "actor.model.model_type=mlp": ("is for task types", "embodied"),
        "actor.model.dtype=int8": ("bfloat16",),
        "data.overlong_prompts=cut": ("drop",),
    }
    for override, says in language.items():
        yield Case("name", f"language: {override}", train_words(override, config=str(judged)), says)
        yield Case("name", f"language, plan: {override}", plan_words(override, config=str(judged)), says)


def data_files() -> Iterator[Case]:
    """Files of problems and demonstrations that are none."""
    language = str(ROOT / "configs" / "reasoning" / "demo_sft.yaml")
    cloning = str(ROOT / "configs" / "embodied" / "push_cube_bc.yaml")
    junk = bytes(range(256)) * 8
    short = ("runner.run_dir=runs", "runner.name=tiny", "runner.max_steps=1", "runner.segments=1")
    for source, file, content, says in (
        ("jsonl", "d.jsonl", junk, "not UTF-8"),
        ("jsonl", "d.jsonl", "", "is empty"),
        ("jsonl", "d.jsonl", '{"prompt": "a"', "not JSON"),
        ("jsonl", "d.jsonl", '{"q": 1}\n', "prompt_key"),
        ("jsonl", "d.jsonl", "[1, 2]\n", "d.jsonl:1"),
        ("jsonl", "d.txt", "a\n", "d.txt"),
        ("jsonl", "none/x", "", "without files"),
        ("parquet", "d.parquet", junk, "Parquet"),
        ("hdf5", "d.h5", junk, "HDF5"),
    ):
        path = file.removesuffix("/x")
        section = f"data.train={{source: {source}, path: {path}, kwargs: {{}}}}"
        yield Case(
            "data", f"{source} {file}: {says}", ("train", language, *short, section), (says,), files={file: content}
        )
    for file, path, content, says in (
        ("d.h5", "d.h5", junk, "HDF5"), ("d.h5", "nosuch.h5", junk, "no such file"), ("none/x", "none", "", "without files"),
        ("d.h5", "./*.hdf5", junk, "no file fits"), ("c/meta/info.json", "c", "junk {", "info.json"),
        ("c/meta/info.json", "c", "{}", "info.json"),
    ):  # fmt: skip
        words = ("train", cloning, *short, "workflow.demos_expert=null", f"demos.path={path}")
        yield Case("data", f"demonstrations {path} {content[:6]!r}", words, (says,), files={file: content})
    words = ("eval", "--model", "builtin:tiny", "--config", language)
    yield Case("data", "eval: no such suite", (*words, "--suite", "nope"), ("nope", "data.eval has"))


def placements() -> Iterator[Case]:
    """Each rule of a placement, broken."""
    rules: dict[str, tuple[str, ...]] = {
        "{actor: '0,0', rollout: 0, env: 0}": ("actor", "unique and ascending"),
        "{actor: '1,0', rollout: 0, env: 0}": ("actor",),
        "{actor: '2-0', rollout: 0, env: 0}": ("actor", "2-0"),
        "{actor: 7, rollout: 0, env: 0}": ("actor", "7"),
        "{actor: -1, rollout: 0, env: 0}": ("actor", "-1"),
        "{actor: 1.5, rollout: 0, env: 0}": ("actor", "1.5"),
        "{actor: first, rollout: 0, env: 0}": ("'first'", "0-3"),
        "{actor: '', rollout: 0, env: 0}": ("actor",),
        "{actor: null, rollout: 0, env: 0}": ("actor",),
        "{actor: [0], rollout: 0, env: 0}": ("actor",),
        "{actor: '0:', rollout: 0, env: 0}": ("actor", "0:"),
        "{actor: '0:1', rollout: 0, env: 0}": ("actor", "0:1"),
        "{actor: '0:0:0', rollout: 0, env: 0}": ("actor", "0:0:0"),
        "{actor: '0:0-0,2', rollout: 0, env: 0}": ("actor",),
        "{actor: 0-99999999999, rollout: 0, env: 0}": ("actor",),
        "{actor: '0:0-99999999999', rollout: 0, env: 0}": ("actor",),
        "{actor: '٣', rollout: 0, env: 0}": ("actor",),
        "{actor: '0;rm', rollout: 0, env: 0}": ("actor",),
        "{'actor,rollout': 0, 'actor,env': 0}": ("actor", "placed twice"),
        "{actor: 0, rollout: 0}": ("no component 'env'",),
        "{}": ("component_placement",),
        "5": ("component_placement",),
        "[actor]": ("component_placement",),
        "{'': 0, 'actor,rollout,env': 0}": ("component_placement",),
        "{'actor,,rollout,env': 0}": ("component_placement",),
        "{1: 0, 'actor,rollout,env': 0}": ("component_placement",),
        "{'actor,rollout,env': 0, evn: 0}": ("evn", "did you mean 'env'?"),
        "{actor: 0, rollout: 0, env: '0:0-8'}": ("env gives 9 processes",),
        "{actor: '0:0-2', rollout: 0, env: 0}": ("actor gives 3 processes",),
        "{'actor,rollout': 0, env: {node_group: cpu, placement: 0}}": ("'cpu'",),
        "{'actor,rollout': 0, env: {node_grup: cpu, placement: 0}}": ("node_grup",),
        "{'actor,rollout': 0, env: {node_group: cluster}}": ("env",),
        "{'actor,rollout': 0, env: {}}": ("env",),
    }  # fmt: skip
    for text, says in rules.items():
        yield Case("placement", text[:60], plan_words(TOGETHER + text), says)
    groups: dict[str, tuple[str, ...]] = {
        "cluster.node_groups=[{label: node}]": ("reserved",),
        "cluster.node_groups=[{node_ranks: 0}]": ("label is missing",),
        "cluster.node_groups=[{label: a, partion: x}]": ("[0].partition?",),
        "cluster.node_groups=[{label: a, num_nodes: two}]": ("[0].num_nodes is 'two'",),
        "cluster.node_groups=[{label: a, num_nodes: -1}]": ("greater than 0",),
        "cluster.node_groups=[{label: a, node_ranks: 5}]": ("node_ranks",),
        "cluster.node_groups=[{label: a, node_ranks: '3-1'}]": ("node_ranks",),
        "cluster.node_groups=[{label: a}, {label: a}]": ("a",),
        "cluster.node_groups=[5]": ("node_groups[0]",),
        "cluster.node_groups=[null]": ("node_groups[0]",),
        "cluster.node_groups=[{label: a, env_vars: 5}]": ("env_vars",),
        "cluster.node_groups=[{label: a, time: 2 hours}]": ("02:00:00",),
        "cluster.node_groups=[{label: a, mem: lots}]": ("64G",),
        "cluster.mem=lots": ("64G",),
        "cluster.time=tomorrow": ("02:00:00",),
        "cluster.partition='a b'": ("one word",),
        'cluster.partition="a\\n#SBATCH --uid=0"': ("one word",),
    }
    for override, says in groups.items():
        yield Case("placement", override[:60], plan_words(override), says)
    for override, named in {
        "rollout.pipeline_stage_num=3": "(3)", "actor.global_batch_size=300": "= 256", "actor.micro_batch_size=100": "(256)",
        "env.train.group_size=3": "(3)", "runner.segments=5": "(1)",
    }.items():  # fmt: skip
        yield Case("placement", override, plan_words(override), (override.partition("=")[0].rpartition(".")[2], named))
    yield Case(
        "placement", "nodes that this machine is not", train_words("cluster.num_nodes=4"), ("cluster.num_nodes",)
    )


# -- files of YAML, and overrides -----------------------------------------------------------------------------------------


def _huge(here: Path) -> None:
    with (here / "huge.yaml").open("wb") as file:  # as long as a checkpoint, and without a block on the disk
        file.truncate(1 << 35)


def yaml_files() -> Iterator[Case]:
    """Configurations that are no YAML, not text, or not what a configuration is."""
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + level)}: &{chr(98 + level)} [{', '.join([f'*{chr(97 + level)}'] * 9)}]\n" for level in range(9)
    )
    merges = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 40))
    texts: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
        "empty": ("", ("is empty", "quickstart")),
        "blank": ("\n \n\n", ("is empty",)),
        "comments": ("# later\n", ("is empty",)),
        "null": ("null\n", ("is empty",)),
        "list on top": ("- a\n- b\n", ("found a list",)),
        "word on top": ("hello\n", ("found a str",)),
        "number on top": ("5\n", ("found a int",)),
        "binary": (bytes(range(256)) * 4, ("cannot be read",)),
        "zeros": (b"\0" * 4096, ("cannot be read",)),
        "an ELF": (b"\x7fELF\x02\x01\x01" + b"\0" * 64, ("cannot be read",)),
        "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", ("cannot be read",)),
        "UTF-16": ((INCLUDE + "runner: {seed: 3}\n").encode("utf-16"), ("cannot be read",)),
        "latin-1": (INCLUDE.encode() + b"# \xe4\nrunner: {name: x\xf6}\n", ("cannot be read",)),
        "tab": ("runner:\n\tname: a\n", ("line 2",)),
        "key twice": (INCLUDE + "runner:\n  seed: 1\n  seed: 2\n", ("line 4", "given twice")),
        "section twice": (INCLUDE + "runner: {seed: 1}\nrunner: {seed: 2}\n", ("line 3", "given twice")),
        "list as a key": ("? [a, b]\n: 1\n", ("line 1", "key")),
        "not closed": ("runner: {name: a\nenv: 3\n", ("line 2",)),
        "quote not closed": ('runner: {name: "a\n', ("line",)),
        "indentation": (INCLUDE + "runner:\n  seed: 1\n   name: x\n", ("line 4",)),
        "Python object": ("runner: !!python/object/apply:os.system [id]\n", ("line 1",)),
        "own tag": ("runner: !Secret x\n", ("line 1",)),
        "two documents": ("a: 1\n---\nb: 2\n", ("another document",)),
        "unknown anchor": ("runner: *nothing\n", ("line 1", "nothing")),
        "alias of itself": ("a: &a [*a]\n", ("a",)),
        "mapping of itself": (INCLUDE + "runner: &r {name: *r}\n", ("r",)),
        "alias bomb": (bomb, ("values, counted as often as aliases",)),
        "merge bomb": (INCLUDE + merges, ("values, counted as often as aliases",)),
        "bomb in kwargs": (INCLUDE + "env: {train: {kwargs: {" + ", ".join(bomb.replace("\n", "\x00").split("\x00")[:-1]) + "}}}\n", ("values, counted as often as aliases",)),
        "5000 brackets": ("a: " + "[" * 5000 + "\n", ("nested",)),
        "5000 braces": ("a: " + "{b: " * 5000 + "}" * 5000 + "\n", ("nested",)),
        "1200 levels": ("a: " + "[" * 1200 + "]" * 1200 + "\n", ("nested",)),
        "5000 indentations": ("".join(" " * level + "a:\n" for level in range(2000)), ("nested",)),
        "long line": (INCLUDE + "runner: {name: " + "a" * 1_000_000 + "}\n", ("runner.name",)),
        "section left empty": (INCLUDE + "actor:\n", ("is a section",)),
        "section is a number": (INCLUDE + "actor: 5\n", ("is a section",)),
        "nothing to train on": ("runner: {name: x}\n", ("env.train.env_id is missing",)),
        "key of number": (INCLUDE + "5: 3\n", ("unknown key 5",)),
        "key of null": (INCLUDE + "~: 3\n", ("unknown key",)),
        "include missing": ("defaults: [nosuch.yaml]\n", ("no configuration file", "nosuch.yaml")),
        "include of itself": ("defaults: [c.yaml]\n", ("circle", "c.yaml → c.yaml")),
        "circle of two": ("defaults: [d.yaml]\n", ("circle",)),
        "include of a folder": ("defaults: [.]\n", ("is a folder",)),
        "include no list": ("defaults: 5\n", ("give a list of files",)),
        "include of a number": ("defaults: [5]\n", ("no configuration file", "5")),
        "include of null": ("defaults: [null]\n", ("give a list of files",)),
        "reference to nothing": (INCLUDE + "runner: {name: '${nosuch}'}\n", ("runner.name", "nosuch")),
        "reference to itself": (INCLUDE + "runner: {name: '${runner.name}'}\n", ("runner.name",)),
        "reference left open": (INCLUDE + "runner: {name: '${runner'}\n", ("runner.name",)),
        "missing value": (INCLUDE + "runner: {name: '???'}\n", ("runner.name is missing",)),
    }  # fmt: skip
    for name, (content, says) in texts.items():
        files: dict[str, str | bytes] = {"c.yaml": content}
        if name == "circle of two":
            files["d.yaml"] = "defaults: [c.yaml]\n"
        words = (
            ("plan", "c.yaml")
            if name in ("long line", "nothing to train on", "missing value") or "reference" in name
            else plan_words(config="c.yaml")
        )
        yield Case("YAML", name, words, ("c.yaml" if name != "include missing" else "", *says), files=files)
    good = (INCLUDE + "runner: {seed: 3}\n").encode()
    for name, content in {
        "BOM": b"\xef\xbb\xbf" + good, "CRLF": good.replace(b"\n", b"\r\n"), "no last line end": good.rstrip(),
        "unicode in a comment": good + "# größer 漢字\n".encode(),
    }.items():  # fmt: skip
        yield Case("YAML", f"fine: {name}", plan_words(config="c.yaml"), codes=(0,), files={"c.yaml": content})
    for path, says in {
        "nosuch.yaml": ("no configuration file",), ".": ("is a folder",), "": ("configuration",), "/dev/null": ("no regular file",),
        str(QUICKSTART).replace("quick", "quik"): ("did you mean", "quickstart.yaml?"), "a" * 300: ("configuration",),
        "/proc/self/mem": ("cannot be read",), "/dev/zero": ("no regular file",), "huge.yaml": ("more than 2097152",),
        "/root\0x": (), "c.yaml/x": ("configuration",),
    }.items():  # fmt: skip
        if "\0" not in path:
            yield Case("YAML", f"path {path[:40]!r}", plan_words(config=path), says, files={"c.yaml": good},
                       prepare=_huge if path == "huge.yaml" else None)  # fmt: skip
    yield Case("YAML", "another user's", plan_words(config="c.yaml"), ("c.yaml", "Permission denied"), files={"c.yaml": good},
               prepare=lambda here: (here / "c.yaml").chmod(0o600), inside=as_nobody)  # fmt: skip


def overrides() -> Iterator[Case]:
    """Words that are no overrides."""
    words: dict[str, tuple[str, ...]] = {
        "runner.max_steps": ("write key=value",),
        "--runner.max_steps=3": ("unknown argument", "--help"),
        "-runner.seed=3": ("unknown argument",),
        "=3": ("write key=value",),
        " =3": ("write key=value",),
        "runner.name=[a": ("not valid YAML",),
        "runner.name={a: b: c}": ("not valid YAML",),
        "runner.name=a: b: c": ("not valid YAML",),
        "runner.name=*x": ("not valid YAML",),
        "runner.name=!!python/name:os.system": ("not valid YAML",),
        "runner.name=\x01": ("not valid YAML",),
        "runner.max_steps=" + "[" * 5000: ("runner.max_steps", "nested"),
        "runner.seed=1 2": ("runner.seed", "int"),
        "runner..seed=1": ("unknown key",),
        ".runner.seed=1": ("unknown key",),
        "runner.=1": ("unknown key",),
        "runner=1": ("is a section",),
        "runner.seed.x=1": ("runner.seed",),
        "runner.seed=": ("runner.seed", "int"),
        "lr=1": ("did you mean actor.optim.lr?",),
        "actor.optim.learning_rate=1": ("did you mean actor.optim.lr?",),
        "Runner.seed=1": ("did you mean runner?",),
        "runner.SEED=1": ("did you mean runner.seed?",),
        "runner.seed=${nosuch}": ("nosuch",),
        "runner.run_dir=${oc.env:NO_SUCH_X}": ("NO_SUCH_X",),
        "runner.run_dir=${oc.decode:1}": ("runner.run_dir",),
        "runner.name=???": ("runner.name is missing",),
        "defaults=[c.yaml]": ("unknown key defaults",),
        "cluster.node_groups[0].label=x": ("cluster.node_groups",),
        "env.train.kwargs=5": ("env.train.kwargs",),
        "env.train.kwargs.=5": ("env.train.kwargs",),
        "workflow.suites={a: 5}": ("workflow.suites",),
        "workflow.suites.a=5": ("workflow.suites",),
        "actor.model.hidden_sizes=[a]": ("list[int]",),
        "actor.model.hidden_sizes=[64, 0]": ("greater than 0",),
        "actor.model.hidden_sizes=[null]": ("hidden_sizes",),
        "runner.seed=\udcff": ("runner.seed",),
        "a" * 1000 + "=1": ("unknown key",),
    }  # fmt: skip
    for word, says in words.items():
        yield Case("override", repr(word)[:50], ("plan", str(QUICKSTART), word), says)


# -- commands -------------------------------------------------------------------------------------------------------------

#: Positional arguments that parse, for commands that have them.
_FIRST = {
    "config": str(QUICKSTART),
    "run": RUN,
    "runs": RUN,
    "folder": "new",
    "shell": "bash",
    "folders": "x",
    "path": "x",
    "file": "x.yaml",
    "what": "x",
    "number": "rollout=2",
    "paths": "x.h5",
    "completion": "chatcmpl-1",
    "reward": "1",
    "bundle": "x.zip",
    "repository": "me/x",
}


def parsed_arguments() -> Iterator[Case]:
    """Of every command: an option that it has not, options without their values or with wrong ones, too few words."""
    for command, parser in build_parser().commands.items():
        named = [a for a in parser._actions if not a.option_strings]
        first = [
            str(next(iter(a.choices))) if a.choices else _FIRST[a.dest] for a in named if a.choices or a.dest in _FIRST
        ]
        needed = [
            word for a in parser._actions if a.required and a.option_strings for word in (a.option_strings[0], "x")
        ]
        yield Case(
            "command", f"{command}: unknown option", (command, *first, *needed, "--nosuch"), ("--nosuch", "--help")
        )
        yield Case("command", f"{command}: unknown short option", (command, *first, *needed, "-Z"), ("-Z", "--help"))
        if first and any(a.nargs not in ("?", "*") for a in named):  # `rlhpc serve` and `watch` need no word
            yield Case("command", f"{command}: nothing", (command,), ("--help",))
        if needed:
            yield Case("command", f"{command}: required option", (command, *first), (needed[0], "--help"))
        for action in parser._actions:
            if not action.option_strings or isinstance(action, argparse._HelpAction):
                continue
            option = action.option_strings[0]
            if action.nargs == 0:
                yield Case(
                    "command", f"{command}: {option}=x", (command, *first, *needed, f"{option}=x"), (option, "--help")
                )
                continue
            yield Case(
                "command",
                f"{command}: {option} without a value",
                (command, *first, *needed, option),
                (option, "--help"),
            )
            if action.type in (int, float):
                yield Case(
                    "command", f"{command}: {option} one", (command, *first, *needed, option, "one"), (option, "'one'")
                )
            if action.choices:
                yield Case(
                    "command",
                    f"{command}: {option} nope",
                    (command, *first, *needed, option, "nope"),
                    (option, "'nope'"),
                )


def arguments() -> Iterator[Case]:
    """Arguments that parse and make no sense."""
    config = str(QUICKSTART)
    plain: dict[tuple[str, ...], tuple[str, ...]] = {
        ("trian",): ("did you mean rlhpc train?",),
        ("",): ("command",),
        ("help", "trian"): ("did you mean rlhpc train?",),
        ("completion", "fish"): ("bash",),
        ("plan", config, "--launcher", "pbs"): ("pbs",),
        (*train_words(), "--segment", "1"): ("segments 0 to 0",),
        (*train_words(), "--segment", "-1"): ("--segment",),
        ("submit", config, "--segment", "9"): ("segments 0 to 2",),
        ("submit", config, f"runner.run_dir={HERE}/r", "--deadline", "-5"): ("--deadline",),
        ("submit", config, f"runner.run_dir={HERE}/r", "--deadline", "0"): ("--deadline",),
        ("submit", config, f"runner.run_dir={HERE}/r", "--deadline", "nan"): ("--deadline",),
        ("status", "/no/such/run"): ("/no/such/run", "does not exist"),
        ("status", "/usr/bin"): ("/usr/bin",),
        ("status", config, "runner.nme=x"): ("did you mean runner.name?",),
        ("status", config, "runner.name=never"): ("never",),
        ("logs", "/no/such/run"): ("no such run folder",),
        ("report", "/usr"): ("is no run folder",),
        ("cancel", "/usr"): ("is no run folder",),
        ("compare", "/no/such/run"): ("no such run folder",),
        ("compare", "a=/no/such/run", "b=/no/such/other"): ("no such run folder",),
        ("eval",): ("--checkpoint",),
        ("eval", "--run", "/no/such"): ("no such run folder",),
        ("eval", "--checkpoint", "/no/such/global_step_3"): ("/no/such/global_step_3",),
        ("eval", "--checkpoint", "/usr"): ("/usr",),
        ("eval", "--checkpoint", "/usr", "--episodes", "0"): ("--episodes is 0",),
        ("eval", "--checkpoint", "/usr", "--episodes", "-1"): ("--episodes is -1",),
        ("eval", "--checkpoint", "/usr", "--suite", "a/b"): ("--suite is 'a/b'",),
        ("eval", "--checkpoint", "/usr", "--run", "/usr"): ("leave out --run",),
        ("eval", "--model", "x"): ("--config",),
        ("record", "--output", "x.h5"): ("--checkpoint",),
        ("record", "--output", "x.h5", "--episodes", "0", "--checkpoint", "/usr"): ("--episodes is 0",),
        ("record", "--output", "x.h5", "--checkpoint", "/no/such"): ("/no/such",),
        ("record", "--output", "x.h5", "--expert", "math:pi"): ("--config",),
        ("record", "--output", "x.h5", "--expert", "nosuch:f", "--config", config): ("nosuch",),
        ("record", "--output", "x.h5", "--expert", "math:pi", "--config", config): ("math:pi",),
        ("record", "--output", "x.h5", "--expert", "word", "--config", config): ("word",),
        ("convert",): ("--checkpoint",),
        ("convert", "--checkpoint", "/no/such/global_step_3"): ("/no/such/global_step_3",),
        ("dagger", config, "--expert", "math:sin"): ("bc",),
        ("dagger", config, "--expert", "math:sin", "--rounds", "0"): ("--rounds",),
        ("replay", "inspect", "/no/such"): ("/no/such",),
        ("replay", "inspect", "/usr", "/usr"): ("one folder",),
        ("replay", "inspect", "/usr"): ("/usr",),
        ("replay", "merge", "/usr"): ("--output",),
        ("replay", "split", "/usr", "--output", "o", "--parts", "0"): ("--parts",),
        ("replay", "split", "/usr", "--output", "o", "--parts", "-2"): ("--parts",),
        ("replay", "inspect", "/usr", "a=1"): ("one folder",),
        ("doctor", "--nodes", "-1"): ("--nodes",),
        ("doctor", "--start", "0"): ("--start",),
        ("doctor", "--start", "nan"): ("--start",),
        ("doctor", "a=1"): ("key=value",),
        ("doctor", "--site", "nosuch"): ("nosuch",),
        ("init", "new", "--config", "nosuch"): ("nosuch",),
        ("init", "new", "--config", "../../etc"): ("etc",),
        ("init", "/proc/x"): ("/proc/x",),
    }  # fmt: skip
    for argv, says in plain.items():
        yield Case("argument", " ".join(argv).replace(str(ROOT), "")[-60:] or "no word", argv, says)
    of_a_run: dict[tuple[str, ...], tuple[str, ...]] = {
        ("logs", RUN, "-n", "-3"): ("--lines",),
        ("logs", RUN, "--group", "nope"): ("nope", "actor"),
        ("logs", RUN, "--rank", "99"): ("99",),
        ("logs", RUN, "--rank", "-1"): ("--rank",),
        ("logs", RUN, "--group", "env", "--rank", "7"): ("7",),
        ("eval", "--run", RUN, "--step", "999"): ("no checkpoint of step 999", "1"),
        ("eval", "--run", RUN, "--step", "-5"): ("--step",),
        ("eval", "--run", RUN, "--step", "x"): ("--step is 'x'",),
        ("eval", "--run", RUN, "--step", "²"): ("--step",),
        ("eval", "--run", RUN, "--suite", "nosuch suite"): ("--suite",),
        ("eval", "--run", RUN, "env.eval.num_episods=3"): ("num_episodes",),
        ("eval", "--run", RUN, "env.eval.env_id=Pendulum-v1"): ("Pendulum-v1",),
        ("eval", "--run", RUN, "env.eval.env_id=nosuch"): ("env_id",),
        ("eval", "--run", RUN, "--config", "/no/such.yaml"): ("/no/such.yaml",),
        ("record", "--run", RUN, "--step", "99", "--output", "x.h5"): ("99",),
        ("record", "--run", RUN, "--output", "x.h5", "--teacher", "nosuch:f"): ("nosuch",),
        ("convert", "--run", RUN, "--step", "99"): ("99",),
        ("convert", "--run", RUN, "--dtype", "bfloat16"): ("language models",),
        ("convert", "--run", RUN, "--adapter-only"): ("language models",),
        ("compare", RUN, "/no/such/run"): ("no such run folder",),
        ("status", RUN, "runner.name=never"): ("never",),
        ("replay", "inspect", CHECKPOINT): ("global_step_1",),
        (*train_words(),): ("has checkpoints already",),
        (*train_words(), "runner.resume_dir=global_step_99"): ("no such checkpoint",),
        ("train", "c.yaml"): ("c.yaml",),
        (*train_words("actor.model.hidden_sizes=[8]", "runner.max_steps=2"), "runner.resume_dir=auto"): ("hidden_sizes",),
        (*train_words("env.train.env_id=Acrobot-v1", "runner.max_steps=2"), "runner.resume_dir=auto"): ("env_id",),
    }  # fmt: skip
    for argv, says in of_a_run.items():
        yield Case("argument", " ".join(argv).replace(str(ROOT), "")[-60:], argv, says, run=True)


# -- files of a run ---------------------------------------------------------------------------------------------------------


def _change(name: str, change: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda here: change(here / name)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(bytes(data))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _junk(path: Path) -> None:
    path.write_bytes(b"\xff\xfe junk {" * 20)


def _list(path: Path) -> None:
    path.write_text("[1, 2]\n")


def _null(path: Path) -> None:
    path.write_text("null\n")


_DAMAGE = {
    "truncated": _truncate,
    "empty": _empty,
    "flipped": _flip,
    "missing": Path.unlink,
    "a folder": _folder,
    "junk": _junk,
}


def long_words() -> Iterator[Case]:
    """Names and values that are longer than any file's name, or than anybody reads."""
    long, config = "a" * 300, str(QUICKSTART)
    too_long: dict[tuple[str, ...], tuple[str, ...]] = {
        ("plan", long): ("configuration", "too long"),
        ("plan", config, "--site", long): ("aaa", "too long"),
        ("run", config, "--profile", long): ("aaa", "too long"),
        ("run", _OF["reasoning"], f"workflow.sft={long}"): ("aaa", "too long"),
        ("init", long): ("aaa", "too long"),
        ("init", "new", "--config", long): ("--config",),
        ("status", long): ("aaa",),
        ("logs", long): ("aaa",),
        ("report", long): ("aaa",),
        ("compare", long): ("aaa",),
        ("cancel", long): ("aaa",),
        ("eval", "--run", long): ("aaa",),
        ("eval", "--checkpoint", long): ("aaa",),
        ("record", "--run", long, "--output", "x.h5"): ("aaa",),
        ("convert", "--checkpoint", long): ("aaa",),
        ("replay", "inspect", long): ("aaa",),
        ("doctor", "--nodes", "0", "--folder", long): ("aaa",),
        train_words(f"runner.resume_dir={long}"): ("aaa",),
        train_words(f"runner.init_from={long}"): ("aaa",),
        train_words(f"runner.run_dir={HERE}/{long}"): ("runner.run_dir", "300"),
        ("train", _OF["bc"], "workflow.demos_expert=null", f"demos.path={long}"): ("aaa",),
    }
    for argv, says in too_long.items():
        yield Case("long word", " ".join(argv).replace(str(ROOT), "")[:40] + " " + argv[-1][:20], argv, says)
    endless = "b" * 100_000
    for word, says in {
        f"runner.name={endless}": "runner.name", f"runner.seed={endless}": "runner.seed", f"{endless}=1": "unknown key",
        f"env.train.kwargs={endless}": "env.train.kwargs", f"env.train.env_id={endless}": "env.train.env_id",
        f"env.train.env_type={endless}": "env_type", f"algorithm.adv_type={endless}": "adv_type",
        f"cluster.partition='{endless} b'": "cluster.partition", f"workflow.eval_suites=[{endless}]": "workflow.eval_suites",
        f"runner.logger.logger_backends=[{endless}]": "logger", f"actor.model.model_type={endless}": "model_type",
        f"actor.model.hidden_sizes=[{', '.join(['64'] * 20_000)}, x]": "hidden_sizes", f"actor.optim=[{'1, ' * 20_000}1]": "actor.optim",
        f"{TOGETHER}{{actor: '{endless}'}}": "component_placement", f"{TOGETHER}{{'{endless}': 0}}": "component_placement",
        f"defaults=[{endless}]": "unknown key", f"--{endless}": "unknown argument", endless: "key=value",
    }.items():  # fmt: skip
        yield Case("long word", f"{word[:30]}… {len(word)}", ("plan", config, word), (says,))


def files_of_a_run() -> Iterator[Case]:
    """Damaged files of checkpoints, and of runs that are looked at."""
    for file in ("model.safetensors", "model.json", "manifest.json", "runner.json", "config.yaml", "optimizer.pt"):
        for damage, change in _DAMAGE.items():
            yield Case("checkpoint", f"{file} {damage}", ("eval", "--checkpoint", CHECKPOINT, "--episodes", "1"),
                       ("global_step_1",), prepare=_change(f"{CHECKPOINT}/{file}", change), run=True)  # fmt: skip
    for damage, change in {"list": _list, "null": _null}.items():
        for file in ("manifest.json", "model.json", "config.yaml"):
            yield Case("checkpoint", f"{file} {damage}", ("convert", "--checkpoint", CHECKPOINT, "--output", "o"), ("global_step_1",),
                       prepare=_change(f"{CHECKPOINT}/{file}", change), run=True)  # fmt: skip
    for command in (
        ("convert", "--checkpoint", CHECKPOINT),
        ("record", "--checkpoint", CHECKPOINT, "--output", "x.h5", "--episodes", "1"),
    ):
        for file, change in (("model.safetensors", _truncate), ("COMPLETE", Path.unlink), ("model.json", _junk)):
            yield Case("checkpoint", f"{command[0]}: {file} {change.__name__.strip('_')}", command, ("global_step_1",),
                       prepare=_change(f"{CHECKPOINT}/{file}", change), run=True)  # fmt: skip
    resumed = train_words("runner.max_steps=2", f"runner.resume_dir={HERE}/{CHECKPOINT}")
    for file, change in (
        ("model.safetensors", _truncate),
        ("actor-0.pt", _flip),
        ("manifest.json", _junk),
        ("runner.json", _empty),
    ):
        yield Case("checkpoint", f"resume: {file} {change.__name__.strip('_')}", resumed, ("global_step_1",),
                   prepare=_change(f"{CHECKPOINT}/{file}", change), run=True)  # fmt: skip
    fresh = train_words("runner.name=fresh", f"runner.init_from={HERE}/{CHECKPOINT}")
    yield Case("checkpoint", "init_from: truncated", fresh, ("global_step_1",), run=True,
               prepare=_change(f"{CHECKPOINT}/model.safetensors", _truncate))  # fmt: skip
    yield Case("checkpoint", "truncated, said before torch is there", ("eval", "--checkpoint", CHECKPOINT), ("global_step_1", "model.safetensors"),
               prepare=_change(f"{CHECKPOINT}/model.safetensors", _truncate), run=True, env={"PYTHONPATH": f"{HERE}/notorch"},
               files={"notorch/torch.py": "raise SystemExit('torch was imported')\n"}, before=("env",))  # fmt: skip
    # Looking at a run works, whatever its files are like.
    looks = (("status", RUN), ("logs", RUN), ("report", RUN), ("compare", RUN, "--output", "o.html"), ("cancel", RUN))
    for words in looks:
        for file in ("config.yaml", "status.json", "metrics.jsonl", "provenance.json"):
            for change in (_junk, _empty, _list):
                if words[0] in ("status", "logs", "cancel") and file in ("metrics.jsonl", "provenance.json"):
                    continue
                nothing = words[0] == "compare" and file == "metrics.jsonl"  # there is nothing to draw
                yield Case("run folder", f"{words[0]}: {file} {change.__name__.strip('_')}", words, run=True, writes=not nothing,
                           codes=(1,) if nothing else (0,), says=("metrics.jsonl", "rlhpc status") if nothing else (),
                           prepare=_change(f"{RUN}/{file}", change))  # fmt: skip
    yield Case("run folder", "status: member is junk", ("status", RUN), codes=(0,), run=True,
               prepare=_change(f"{RUN}/registry/local-0/members/driver.json", _junk))  # fmt: skip
    yield Case("run folder", "status with an override: config.yaml junk", ("status", RUN, "runner.seed=1"), ("config.yaml",), run=True,
               prepare=_change(f"{RUN}/config.yaml", _junk))  # fmt: skip


# -- outputs, environment -----------------------------------------------------------------------------------------------------


def as_nobody() -> None:
    """Becomes a user who owns nothing here, and to whom the interpreter's own modules may be shut."""
    import rlhpc.runs.compare  # noqa: F401

    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)


def _read_only(here: Path) -> None:
    (here / "shut").mkdir(mode=0o555)
    for path in (here / "runs").rglob("*"):  # to be read by all, to be written by its owner
        path.chmod(0o755 if path.is_dir() else 0o644)


def _mask() -> None:
    os.umask(0o777)


def _file_size(limit: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def outputs() -> Iterator[Case]:
    """Results that cannot be written."""
    some = ("--run", RUN, "--episodes", "1")
    places: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "record to /proc": (("record", *some, "--output", "/proc/x/d.h5"), ("/proc/x",)),
        "record to a folder": (("record", *some, "--output", "."), ("--output",)),
        "record below a file": (("record", *some, "--output", f"{RUN}/config.yaml/d.h5"), ("config.yaml",)),
        "record to /dev/full": (("record", *some, "--output", "/dev/full"), ("/dev/full",)),
        "eval to /proc": (("eval", *some, "--output", "/proc/x/r.json"), ("/proc/x",)),
        "eval to a folder": (("eval", *some, "--output", "."), ("--output",)),
        "eval below a file": (("eval", *some, "--output", f"{RUN}/config.yaml/r.json"), ("config.yaml",)),
        "convert to /proc": (("convert", "--run", RUN, "--output", "/proc/x"), ("/proc/x",)),
        "convert to a file": (("convert", "--run", RUN, "--output", f"{RUN}/config.yaml"), ("config.yaml",)),
        "compare to a folder": (("compare", RUN, "--output", "."), ("--output", "folder")),
        "compare to /proc": (("compare", RUN, "--output", "/proc/x.html"), ("/proc/x.html",)),
        "compare below a file": (("compare", RUN, "--output", f"{RUN}/config.yaml/x.html"), ("config.yaml",)),
        "report to a file": (("report", RUN, "--curves", f"{RUN}/config.yaml"), ("--curves", "config.yaml")),
        "report to /proc": (("report", RUN, "--curves", "/proc/x"), ("/proc/x",)),
        "doctor's json to /proc": (("doctor", "--nodes", "0", "--folder", ".", "--json", "/proc/x.json"), ("/proc/x.json",)),
        "doctor's folder is a file": (("doctor", "--nodes", "0", "--folder", f"{RUN}/config.yaml", "--json", "."), ("--json",)),
        "init into a file": (("init", f"{RUN}/config.yaml"), ("config.yaml",)),
        "init over a project": (("init", "."), ("already",)),
    }  # fmt: skip
    for name, (argv, says) in places.items():
        files = {"configs/quickstart.yaml": "mine\n"} if name == "init over a project" else {}
        yield Case("output", name, argv, says, run=True, files=files)
    for name, argv in {
        "record": ("record", *some, "--output", "shut/d.h5"), "eval": ("eval", *some, "--output", "shut/r.json"),
        "convert": ("convert", "--run", RUN, "--output", "shut/e"), "compare": ("compare", RUN, "--output", "shut/x.html"),
        "report": ("report", RUN, "--curves", "shut/c"), "report of another's run": ("report", RUN),
        "init": ("init", "shut/p"), "train": train_words("runner.run_dir=shut/r"),
    }.items():  # fmt: skip
        says = ("shut",) if "shut" in " ".join(argv) else (RUN,)
        yield Case(
            "output", f"{name}: another user's folder", argv, says, run=True, prepare=_read_only, inside=as_nobody
        )
    yield Case(
        "output", "train: below a file", train_words(f"runner.run_dir={HERE}/f"), ("is a file",), files={"f": "mine"}
    )
    yield Case("output", "train: the run is a file", train_words(), ("is a file",), files={"runs/tiny": "mine"})
    # Found while writing; what was complete before is as it was.
    yield Case(
        "output",
        "report: files of 4 KiB",
        ("report", RUN),
        ("large", "ulimit -f"),
        run=True,
        writes=True,
        inside=_file_size(4096),
    )
    yield Case(
        "output",
        "convert: files of 4 KiB",
        ("convert", "--run", RUN, "--output", "o"),
        ("large", "ulimit -f"),
        run=True,
        inside=_file_size(4096),
    )
    yield Case(
        "output",
        "train: files of 4 KiB",
        train_words(),
        ("large", "ulimit -f"),
        writes=True,
        before=("prlimit", "--fsize=4096"),
    )


def _shell(text: str) -> tuple[str, ...]:
    return ("sh", "-c", text, "sh")


def environments() -> Iterator[Case]:
    """Variables, descriptors, limits and folders that a process starts with."""
    plan, status = ("plan", str(QUICKSTART)), ("status", RUN)
    for name, env in {
        "HOME missing": {"HOME": None}, "HOME bad": {"HOME": "/no/such"}, "TMPDIR bad": {"TMPDIR": "/no/such"},
        "PATH empty": {"PATH": ""}, "PYTHONPATH bad": {"PYTHONPATH": "/no/such:\n"}, "TERM bad": {"TERM": "nonsense"},
        "COLUMNS of words": {"COLUMNS": "wide"}, "TZ bad": {"TZ": "Mars/Olympus"}, "LC_ALL bad": {"LC_ALL": "xx_YY.nope"},
        "OMP_NUM_THREADS of words": {"OMP_NUM_THREADS": "many"}, "XDG_CONFIG_HOME bad": {"XDG_CONFIG_HOME": "/dev/null"},
        "SLURM variables without a job": {"SLURM_NODELIST": "n[1-", "SLURM_NNODES": "two"},
    }.items():  # fmt: skip
        yield Case("environment", name, plan, codes=(0,), env=env)
    yield Case("environment", "RLHPC_SITE of nowhere", plan, ("nosuch",), env={"RLHPC_SITE": "nosuch"})
    yield Case("environment", "RLHPC_SITE a folder", plan, (HERE,), env={"RLHPC_SITE": f"{HERE}/"})
    yield Case(
        "environment",
        "RLHPC_SITE binary",
        plan,
        ("s.yaml",),
        env={"RLHPC_SITE": f"{HERE}/s.yaml"},
        files={"s.yaml": bytes(range(200))},
    )
    slurm = {"SLURM_JOB_ID": "4242424", "SLURM_JOBID": "4242424", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2",
             "SLURM_JOB_NUM_NODES": "2", "SLURM_NODELIST": "n[1-2]", "SLURM_JOB_PARTITION": "p"}  # fmt: skip
    # What it says depends on the machine: Slurm knows no such job, or there is no srun, or no way to the nodes.
    for words in (train_words("cluster.num_nodes=2"), train_words()):
        yield Case("environment", f"SLURM_* of a dead job, {words[-1][:20]}", words, env=slurm)
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    for words in (("train", "--help"), ("help",), ("help", "submit"), plan):
        yield Case("environment", f"ascii: {words[0]}", words, codes=(0,), env=ascii_only, before=("env",))
    yield Case("environment", "ascii: eval", ("eval", "--run", RUN, "--episodes", "1", "--output", "r.json"), codes=(0,), env=ascii_only,
               before=("env",), run=True, writes=True)  # fmt: skip
    for name, closing, code in (
        ("stdin closed", "<&-", 0), ("stdout closed", ">&-", 0), ("stderr closed", "2>&-", 0), ("all closed", "<&- >&- 2>&-", 0),
        ("stdout full", ">/dev/full", 1), ("stderr full", "2>/dev/full", 0),
    ):  # fmt: skip
        yield Case("environment", name, status, codes=(code,), before=_shell(f'exec "$@" {closing}'), run=True)
    yield Case(
        "environment", "train: stderr closed", train_words("runner.max_steps=0"), before=_shell('exec "$@" 2>&-')
    )
    yield Case(
        "environment", "train: stderr full", train_words("runner.max_steps=0"), before=_shell('exec "$@" 2>/dev/full')
    )
    yield Case("environment", "a pipe nobody reads", status, codes=(0, 141), before=_shell('"$@" | true'), run=True)
    gone = _shell('mkdir x && cd x && rmdir ../x && exec "$@"')
    for words in (("train", str(QUICKSTART)), plan, ("status", HERE + "/" + RUN)):
        yield Case(
            "environment",
            f"folder removed: {words[0]}",
            words,
            codes=(2,) if words[0] == "train" else (0, 2),
            before=gone,
            run=True,
        )
    yield Case(
        "environment",
        "24 descriptors: train",
        train_words(),
        ("24 files", "ulimit -n"),
        before=("prlimit", "--nofile=24:24"),
    )
    yield Case(
        "environment", "24 descriptors: status", status, codes=(0,), before=("prlimit", "--nofile=24:24"), run=True
    )
    piped = (
        "bash",
        "-o",
        "pipefail",
        "-c",
        'ulimit -f 0; "$@" 2>&1 | cat > /dev/null',
        "bash",
    )  # its own output is a file
    yield Case("environment", "no files: plan", plan, codes=(0,), before=piped)
    yield Case("environment", "no core: plan", plan, codes=(0,), before=("prlimit", "--core=0", "--memlock=0"))
    yield Case("environment", "umask 777: eval", ("eval", "--run", RUN, "--episodes", "1", "--output", "r.json"), codes=(0, 1, 2), run=True, writes=True,
               inside=_mask)  # fmt: skip


# -- sites and workflows --------------------------------------------------------------------------------------------------------


def sites() -> Iterator[Case]:
    """Site files."""
    contents: dict[str, tuple[str, tuple[str, ...]]] = {
        "empty": ("", ("is empty",)),
        "list": ("- a\n", ("found a list",)),
        "run keys": ("runner: {seed: 1}\n", ("a site file has the sections",)),
        "workflow keys": ("workflow: {eval_suites: [a]}\n", ("workflow.eval_suites",)),
        "workflow of words": ("workflow: nope\n", ("workflow",)),
        "misspelt": ("cluster: {partion: p}\n", ("did you mean cluster.partition?",)),
        "wrong type": ("cluster: {accelerators_per_node: many}\n", ("must be int",)),
        "nodes": ("cluster: {num_nodes: 3}\n", ("belongs to a run",)),
        "placement": ("cluster: {component_placement: {actor: 0}}\n", ("belongs to a run",)),
        "two words": ("cluster: {partition: 'a b'}\n", ("one word",)),
        "walltime": ("cluster: {time: tomorrow}\n", ("02:00:00",)),
        "negative": ("cluster: {cpus_per_node: -1}\n", ("cpus_per_node",)),
        "circle": ("defaults: [s.yaml]\n", ("circle",)),
        "setup is a word": ("cluster: {setup: module load x}\n", ("cluster.setup",)),
        "reference": ("cluster: {partition: '${nosuch}'}\n", ("nosuch",)),
    }
    for name, (content, says) in contents.items():
        yield Case(
            "site",
            name,
            (*plan_words(), "--site", "s.yaml"),
            ("s.yaml" if name != "circle" else "", *says),
            files={"s.yaml": content},
        )
    for name, says in {"nosuch": ("no site 'nosuch'", "example"), "exampel": ("did you mean 'example'?",), "./nosuch.yaml": ("no site file",),
                       "a/b": ("no site file",), "..": ("..",), "": ()}.items():  # fmt: skip
        yield Case("site", f"name {name!r}", (*plan_words(), "--site", name), says, codes=(2,) if name else (0,))


def workflows() -> Iterator[Case]:
    """What the workflow is told."""
    overrides_: dict[str, tuple[str, ...]] = {
        "workflow.eval_suites=[a/b]": ("letters, digits",),
        "workflow.eval_suites=[nope]": ("nope",),
        "workflow.eval_suites=default": ("workflow.eval_suites",),
        "workflow.suites={hard: [env.eval.nope=1]}": ("env.eval.nope",),
        "workflow.suites={hard: [nope]}": ("workflow.suites.hard", "write key=value"),
        "workflow.suites={hard: [env.eval.env_id=CartPol-v1]}": ("workflow.suites.hard", "CartPole-v1"),
        "workflow.suites={hard: [env.eval.num_envs=many]}": ("workflow.suites.hard", "must be int"),
        "workflow.eval_job.time=soon": ("workflow.eval_job.time",),
        "workflow.eval_job.mem=much": ("workflow.eval_job.mem",),
        "workflow.eval_job.cpus=0": ("workflow.eval_job.cpus",),
        "workflow.record_episodes=-1": ("workflow.record_episodes",),
        "workflow.demos_expert=math:sin": ("is for", "off_policy, bc"),
        "workflow.sft=nosuch.yaml": ("is for", "reasoning, sft"),
    }
    yield Case("workflow", "no such sft", ("run", _OF["reasoning"], "workflow.sft=nosuch.yaml"), ("nosuch.yaml",))
    yield Case(
        "workflow", "demonstrations nowhere",
        ("run", _OF["off_policy"], "workflow.demos_expert=math:sin"), ("algorithm.demo_buffer.load_path",),
    )  # fmt: skip
    for override, says in overrides_.items():
        yield Case("workflow", override, ("run", str(QUICKSTART), *SHORT_RUN, override), says)
        if "suites" in override:
            for command in ("plan", "train", "submit"):
                words = (command, str(QUICKSTART), *SHORT_RUN, override)
                yield Case("workflow", f"{command}: {override}", words, says)
    capitals = ("workflow.suites={Hard: [env.eval.seed=3]}", "workflow.eval_suites=[hard]")
    yield Case("workflow", "capitals of a suite", ("plan", str(QUICKSTART), *capitals), ("did you mean 'Hard'?",))
    yield Case(
        "workflow",
        "profile of nowhere",
        ("run", str(QUICKSTART), *SHORT_RUN, "--profile", "no/such"),
        ("no such folder",),
    )
    yield Case(
        "workflow", "profile by a wrong name", ("run", str(QUICKSTART), *SHORT_RUN, "--profile", "slurn"), ("slurn",)
    )
    yield Case("workflow", "site of nowhere", ("run", str(QUICKSTART), *SHORT_RUN, "--site", "nosuch"), ("nosuch",))
    for folder in ("{x}", "a{b", "}"):
        words = ("run", str(QUICKSTART), *SHORT_RUN, f"runner.run_dir={HERE}/{folder}/runs")
        yield Case("workflow", f"braces in the path: {folder}", words, ("braces in a path", "rlhpc train"))
    yield Case("workflow", "configuration of nowhere", ("run", "nosuch.yaml"), ("nosuch.yaml",))
    yield Case("workflow", "unknown key", ("run", str(QUICKSTART), "runner.seeed=1"), ("did you mean runner.seed?",))
    yield Case(
        "workflow", "run_dir cannot be made", ("run", str(QUICKSTART), "runner.run_dir=/proc/x"), ("runner.run_dir",)
    )


SHORT_RUN = (f"runner.run_dir={HERE}/runs", "runner.name=tiny", "runner.max_steps=1", "runner.segments=1")
