"""Verdicts of `rlhpc config import` over RLinf's example files: `python -m tests.rlinf_corpus FOLDER`.

FOLDER is a checkout of RLinf. Each file of its `examples/` is imported and planned; the table of verdicts is compared with
`tests/data/rlinf/verdicts.tsv`, which `--write` replaces. `--docs` writes the page that compares hyperparameters.

Verdicts:

- `same`: `rlhpc plan` accepts the file, and each left-out key that changes training is in `tests/data/rlinf/accepted.yaml`.
  The third column says which of them run RLinf's own simulator classes.
- `differs`: `rlhpc plan` accepts the file, and the third column has the left-out keys that change training.
- `plan refuses`, `import refuses`: the third column has the message, which names what is missing.

Paths, Pythons and trackers belong to a machine. So `plan` gets eight accelerators a node, no experiment tracker, a Python for
the simulators that need one of their own, and stand-ins for models, data, recorded environments and agents' programs, which
the files only name. RLinf's own simulator classes are not built: `plan` checks the rest of such a file.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from rlhpc import cli
from rlhpc.cli.foreign import translate
from rlhpc.cli.foreign.hydra import ComposedConfig, compose
from rlhpc.cli.foreign.rlinf_agents import OWN_AGENT
from rlhpc.cli.foreign.rules import Translation
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import cut
from tests.stderr import error_lines

DATA = Path(__file__).parent / "data/rlinf"
#: Values of the compared files, as RLinf's files and their `defaults:` give them.
RESOLVED = DATA / "resolved.json"
#: Page of the comparison.
PAGE = Path(__file__).parents[1] / "docs/reference/rlinf-files.md"
#: Task folders of RLinf's `examples/`.
TASKS = ("embodiment", "reasoning", "agent", "sft", "offline_rl", "reward", "diffusion")
#: Folders of pieces that a file's `defaults:` name.
_GROUPS = ("env", "model", "hybrid_engines", "weight_syncer", "profile", "training_backend")
_MACHINE = ("runner.logger.logger_backends=[jsonl]", "cluster.accelerators_per_node=8")
#: Third column of translated files whose simulator `plan` cannot build without RLinf.
NOT_BUILT = "simulator class of RLinf"
_PYTHON_OF_ITS_OWN = ("libero", "metaworld", "rlinf")


@dataclass(frozen=True)
class Verdict:
    """Verdict on a file, and what it names."""

    word: str
    names: str = ""


def files_of(folder: Path) -> Iterator[Path]:
    """Yields the files of RLinf's example runs, in the order of their names."""
    for task in TASKS:
        for file in sorted((folder / "examples" / task).rglob("*.yaml")):
            if file.parent.name not in _GROUPS:
                yield file


def accepted_differences() -> dict[str, str]:
    """Returns pattern of `key=value (reason of the report)` → why the run is the same in spite of it."""
    accepted: dict[str, str] = yaml.safe_load((DATA / "accepted.yaml").read_text())
    return accepted


def differences(translation: Translation) -> list[str]:
    """Returns the omitted keys that change training, without accepted differences."""
    accepted = accepted_differences()
    return [
        key
        for key, (reason, changes_training) in translation.omitted.items()
        if changes_training
        and not any(
            fnmatch.fnmatchcase(f"{key}={translation.foreign[key]} ({reason})", pattern) for pattern in accepted
        )
    ]


def _run(*words: str) -> tuple[int, str]:
    """Runs a command of rlhpc; returns its exit code and the last line of standard error, without the explanation's name."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = cli.main(list(words))
    return code, (error_lines(errors.getvalue()) or [""])[-1]


def verdict_on(file: Path, scratch: Path) -> Verdict:
    """Imports and plans a file."""
    target = scratch / file.name
    code, message = _run("config", "import", str(file), "-o", str(target))
    if code:
        return Verdict("import refuses", _brief(message, str(file), scratch))
    translation = translate(compose(file), str(file))
    code, message = _run("plan", str(target), *_machine(translation, scratch))
    if code:
        return Verdict("plan refuses", _brief(message, str(target), scratch))
    keys = differences(translation)
    if keys:
        return Verdict("differs", " ".join(keys))
    return Verdict("same", NOT_BUILT if translation.ours.get("env.train.env_type") == "rlinf" else "")


def _machine(translation: Translation, scratch: Path) -> list[str]:
    """Returns the overrides that stand for the machine of the run."""
    overrides = list(_MACHINE)
    if translation.ours.get("env.train.env_type") in _PYTHON_OF_ITS_OWN:
        overrides.append(f"env.train.simulator_python={sys.executable}")
    ours = translation.ours
    if ours.get("actor.model.model_type") == "lerobot":
        folder = scratch / "lerobot_pi0"
        folder.mkdir(exist_ok=True)
        config = {"type": "pi0", "chunk_size": 50, "input_features": {}, "output_features": {"action": {"shape": [7]}}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").touch()
        overrides.append(f"actor.model.model_path={folder}")
    elif ours.get("actor.model.model_type") == "openvla":
        paths = (key for key in ours if key.endswith(".model.model_path"))
        overrides += [f"{key}=builtin:tiny" for key in paths]
        if "actor.lora.path" in ours:
            overrides.append(f"actor.lora.path={write_adapter(scratch, ours['actor.lora.rank'])}")
    if ours["runner.task_type"] in ("reasoning", "sft"):
        overrides += _language_machine(translation, scratch)
    for key in ("demos.path", "algorithm.demo_buffer.load_path"):
        if ours.get(key) is not None and "workflow.demos_expert" not in ours:
            overrides.append(f"{key}={_write_demonstrations(scratch)}")
    if ours["runner.task_type"] == "bc" and "env.train.env_id" not in ours:
        overrides += _open_environment(ours["actor.model.model_type"])
    return overrides


def _open_environment(model_type: str) -> list[str]:
    """Returns the overrides that name an environment where a file of demonstrations leaves it open."""
    if model_type == "lerobot":  # sees through cameras
        python = f"env.train.simulator_python={sys.executable}"
        return ["env.train.env_type=libero", "env.train.env_id=libero_spatial", python]
    return ["env.train.env_type=gymnasium", "env.train.env_id=HalfCheetah-v5"]


def _language_machine(translation: Translation, scratch: Path) -> list[str]:
    """Returns the overrides that name a model and data of the kind that a language model's file asks for."""
    ours = translation.ours
    images_key = ours.get("data.train.images_key")
    model = write_model(scratch, _family(translation))
    overrides = [f"{key}={model}" for key in ours if key.endswith(".model.model_path")]
    if not overrides:  # a file that others include names none
        overrides.append(f"actor.model.model_path={model}")
    if "data.train.path" not in ours and translation.training:
        overrides.append(f"data.train.path={write_problems(scratch, images_key)}")
        columns = {"source": "jsonl", "prompt_key": "prompt", "answer_key": "answer"}
        overrides += [f"data.train.{name}={value}" for name, value in columns.items()]
    if ours.get("runner.max_steps") == MISSING:  # the data are elsewhere
        overrides.append("runner.max_steps=1")
    if ours.get("judge.rollout_backend"):
        overrides.append(f"judge.model.model_path={model}")
    if ours.get("agent.target") == OWN_AGENT:  # RLinf's is a program, which its file does not name
        (scratch / "my_agent.py").write_text("async def solve(task, client):\n    return 0.0\n")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(scratch), os.environ.get("PYTHONPATH", "")])
    file = write_problems(scratch, images_key)
    for key in [key for key in ours if key.startswith("data.") and key.endswith(".path")]:
        columns = {"source": "jsonl", "prompt_key": "prompt", "answer_key": "answer", "response_key": "answer"}
        overrides += [f"{key[:-4]}{name}={value}" for name, value in columns.items() if f"{key[:-4]}{name}" in ours]
        overrides.append(f"{key}={write_problems(scratch, images_key, 'held_out') if 'holdout' in key else file}")
    if not translation.training:
        overrides.append(f"data.train={{source: jsonl, path: {file}, prompt_key: prompt, answer_key: answer}}")
    if suites := ours.get("data.eval"):
        stand_ins = [
            {**suite, "source": "jsonl", "path": str(file), "prompt_key": "prompt", "answer_key": "answer"}
            for suite in suites
        ]
        overrides.append(f"data.eval={json.dumps(stand_ins)}")
    return overrides


def _family(translation: Translation) -> str:
    """Returns the architecture of the model that a language model's file names."""
    name = str(translation.foreign.get("actor.model.model_type") or "qwen2").lower().replace(".", "_")
    path = str(translation.foreign.get("rollout.model.model_path", "")).lower()
    if name == "qwen2" and translation.ours.get("actor.parallel.expert", 1) > 1:
        return "qwen3_moe"
    if name.startswith(("deepseek", "qwen2_5_vl", "qwen3_vl")):
        return name
    return "qwen3" if "qwen3" in path else "qwen2"


#: Sizes of the stand-ins, which the tensor parallel sizes of the files divide.
_SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def write_model(scratch: Path, family: str) -> Path:
    """Writes a small model of an architecture: its configuration, and a tokenizer with one token per character."""
    from rlhpc.language.models.tiny import character_tokenizer
    from rlhpc.language.models.tiny_vision import FAMILIES, make_tiny_vision_model

    folder = scratch / family
    if (folder / "config.json").exists():
        return folder
    base = family.removesuffix("_moe") if "vl" in family else family
    if base in FAMILIES:
        make_tiny_vision_model(folder, family=base, context=131072)
        config = json.loads((folder / "config.json").read_text())
        if base != family:
            config["model_type"] = family
            config["text_config"] |= {**_EXPERTS, "model_type": f"{family}_text"}
    else:
        character_tokenizer(context=131072).save_pretrained(folder)
        config = {**_SIZES, "model_type": family, **(_EXPERTS if family.endswith("_moe") else {})}
        if family == "deepseek_v3":
            config |= {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(scratch: Path, rank: int) -> Path:
    """Writes a folder of adapters in peft's format, without weights: `plan` builds models without weights, too."""
    folder = scratch / f"adapter_{rank}"
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").touch()
    return folder


def write_problems(scratch: Path, images_key: str | None, name: str = "problems") -> Path:
    """Writes a file of problems, with a column of pictures under `images_key`."""
    from PIL import Image

    file = scratch / f"{name}_{images_key}.jsonl"
    row: dict[str, Any] = {"prompt": "1 + 1", "answer": "2", "choices": "1, 2"}
    if images_key is not None:
        Image.new("RGB", (56, 56)).save(scratch / "picture.png")
        row[images_key] = [str(scratch / "picture.png")]
    file.write_text(f"{json.dumps(row)}\n" * 512)
    return file


def _write_demonstrations(scratch: Path) -> Path:
    """Writes trajectories of HalfCheetah in ManiSkill's format."""
    import h5py
    import numpy as np

    file = scratch / "demos.h5"
    with h5py.File(file, "w") as h5:
        episode = h5.create_group("traj_0")
        episode["obs"], episode["actions"] = np.zeros((6, 17), np.float32), np.zeros((5, 6), np.float32)
        for name, dtype in (("rewards", np.float32), ("terminated", bool), ("truncated", bool), ("success", bool)):
            episode[name] = np.zeros(5, dtype)
    return file


def _brief(message: str, path: str, scratch: Path) -> str:
    message = message.replace(path, "").replace(f"{scratch}/", "").replace(sys.executable, "python")
    return cut(re.sub(r"\s+", " ", message.removeprefix("rlhpc: error: ").lstrip(": ")), 150)


def verdicts(folder: Path, pattern: str = "*") -> dict[str, Verdict]:
    """Returns file → verdict for the files whose names match a pattern."""
    table = {}
    os.environ["REPO_PATH"] = str(folder)  # as RLinf's scripts set it
    os.environ["POLARIS_DATA_PATH"] = str(folder)  # the user sets it
    with tempfile.TemporaryDirectory() as scratch:
        for file in files_of(folder):
            name = str(file.relative_to(folder / "examples"))
            if fnmatch.fnmatchcase(name, pattern):
                table[name] = verdict_on(file, Path(scratch))
    return table


def format_table(table: dict[str, Verdict]) -> str:
    """Formats verdicts as tab-separated lines, after a line that counts them."""
    lines = [f"{name}\t{verdict.word}\t{verdict.names}".rstrip("\t") for name, verdict in table.items()]
    return "\n".join([f"# {summary(table)}", *lines]) + "\n"


def read_table() -> dict[str, Verdict]:
    """Returns the committed table."""
    rows = [line.split("\t") for line in (DATA / "verdicts.tsv").read_text().splitlines() if not line.startswith("#")]
    return {name: Verdict(word, *rest) for name, word, *rest in rows}


def summary(table: dict[str, Verdict]) -> str:
    """Formats the number of files by verdict."""
    counts = Counter(verdict.word for verdict in table.values())
    planned, total = counts["same"] + counts["differs"], max(1, len(table))
    not_built = sum(verdict.names == NOT_BUILT for verdict in table.values())
    return (
        f"{len(table)} files: {counts['same']} translate ({counts['same'] / total:.0%}), {not_built} of them with a simulator "
        f"class of RLinf, which plan did not build; {planned} pass plan "
        f"({planned / total:.0%}), {counts['differs']} of them with named differences; "
        f"{counts['plan refuses']} are written and refused by plan; {counts['import refuses']} are refused"
    )


#: Files of the comparison in the documentation.
COMPARED = (
    "embodiment/config/maniskill_ppo_mlp.yaml",
    "embodiment/config/maniskill_async_ppo_mlp.yaml",
    "embodiment/config/maniskill_sac_mlp.yaml",
    "embodiment/config/maniskill_crossq_mlp.yaml",
    "embodiment/config/maniskill_dagger_mlp.yaml",
    "embodiment/config/d4rl_iql_mujoco.yaml",
    "embodiment/config/libero_spatial_grpo_openpi.yaml",
    "embodiment/config/libero_10_ppo_openpi_pi05.yaml",
    "embodiment/config/libero_10_grpo_openvlaoft.yaml",
    "embodiment/config/metaworld_50_ppo_openpi_pi05.yaml",
    "embodiment/config/maniskill_ppo_openvlaoft.yaml",
    "embodiment/config/robotwin_place_empty_cup_grpo_openvlaoft.yaml",
    "embodiment/config/libero_spatial_0_grpo_mlp.yaml",
    "reasoning/config/math/qwen2.5-1.5b-grpo-fsdp.yaml",
    "reasoning/config/math/qwen2.5-1.5b-grpo-megatron.yaml",
    "reasoning/config/math/qwen2.5-1.5b-ppo-megatron.yaml",
    "agent/searchr1/config/train_qwen2.5.yaml",
    "sft/config/libero_sft_openpi.yaml",
    "sft/config/robotwin_sft_openpi.yaml",
    "sft/config/qwen3_vl_sft_vlm.yaml",
)
#: Sections whose keys are hyperparameters.
_HYPERPARAMETERS = (
    "algorithm.", "actor.", "env.train.", "rollout.", "data.", "runner.max_steps", "demos.", "critic.", "agent.", "reward.",
)  # fmt: skip


def compare(translation: Translation) -> list[tuple[str, str, str, str]]:
    """Returns rows (RLinf's keys, RLinf's values, rlhpc's key, rlhpc's value) of the hyperparameters that rlhpc writes."""
    rows = []
    for key, value in translation.ours.items():
        if not key.startswith(_HYPERPARAMETERS):
            continue
        sources, defaults = translation.origin.get(key, []), translation.defaults.get(key, [])
        if sources:
            values = ", ".join(_format(translation.foreign[source], 20) for source in sources[:_MAX_SOURCES])
            names = ", ".join(f"`{source}`" for source in sources[:_MAX_SOURCES])
            more = len(sources) - _MAX_SOURCES
            rows.append((f"{names} and {more} more" if more > 0 else names, values, f"`{key}`", _format(value)))
        elif defaults:
            rows.append((", ".join(f"`{name}`" for name in defaults), "RLinf's default", f"`{key}`", _format(value)))
        else:
            rows.append(("", "in RLinf's code", f"`{key}`", _format(value)))
    return rows


#: Largest number of RLinf's keys in a row.
_MAX_SOURCES = 3


def _format(value: Any, width: int = 60) -> str:
    return cut(str(value).replace("|", "/"), width)


def resolve(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns file → dotted key → value of the compared files, with references resolved."""
    return {name: compose(folder / "examples" / name).leaves for name in COMPARED}


def read_resolved() -> dict[str, dict[str, Any]]:
    """Returns the committed values of the compared files (`resolve`)."""
    resolved: dict[str, dict[str, Any]] = json.loads(RESOLVED.read_text())
    return resolved


def translated(name: str, leaves: dict[str, Any]) -> Translation:
    """Translates resolved values; values with references to the environment of a machine are left out."""
    return translate(ComposedConfig({key: value for key, value in leaves.items() if "${" not in str(value)}), name)


def unnamed(translation: Translation) -> list[str]:
    """Returns the foreign keys that neither give a value nor are omitted with a reason."""
    used = set(translation.used)
    return [key for key in translation.foreign if key not in used and key not in translation.omitted]


def format_docs() -> str:
    """Formats the page of the comparison, from the committed values."""
    lines = [
        "# Hyperparameters of imported RLinf files",
        "",
        "Made by `python -m tests.rlinf_corpus FOLDER --docs` from RLinf's files, with references resolved. The left columns",
        "are RLinf's keys and values, the right columns what [`rlhpc config import`](../how-to/from-rlinf.md) writes. Below",
        "each table are all keys without a counterpart that change training, with the reason.",
        "",
        *_counts(),
    ]
    for name, leaves in read_resolved().items():
        translation = translated(name, leaves)
        lines += ["", f"## {name.rpartition('/')[2]}", "", "| RLinf | | rlhpc | |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in compare(translation)]
        changed = [key for key, (_, changes) in translation.omitted.items() if changes]
        lines += ["", "Left out:" if changed else "Nothing that changes training is left out.", ""]
        lines += [f"- `{key}: {_format(translation.foreign[key])}`: {translation.omitted[key][0]}" for key in changed]
    return "\n".join(lines).rstrip() + "\n"


def _counts() -> list[str]:
    """Returns the paragraphs that count the committed verdicts."""
    table = read_table()
    same = [verdict for verdict in table.values() if verdict.word == "same"]
    not_built = sum(verdict.names == NOT_BUILT for verdict in same)
    lines = [
        f"Of RLinf's {len(table)} example files {len(same)} translate ({len(same) / len(table):.0%}): `rlhpc plan` accepts "
        "what is written, and each difference is accepted for a reason.",
        f"{not_built} of them run a simulator class of RLinf (`env_type: rlinf`) that `plan` did not build, because its "
        f"simulator is not installed where the table was made: they rest on the interface of RLinf's classes. The other "
        f"{len(same) - not_built} ({(len(same) - not_built) / len(table):.0%}) do not.",
        "",
        "Accepted differences, by RLinf's key and value and the reason in the report:",
        "",
    ]
    return lines + [f"- `{pattern}`: {why}" for pattern, why in accepted_differences().items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the verdicts that differ from the committed table; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="checkout of RLinf")
    parser.add_argument("--only", default="*", help="pattern of the files' names below examples/")
    parser.add_argument("--write", action="store_true", help="replace the committed table")
    parser.add_argument(
        "--docs", action="store_true", help="write tests/data/rlinf/resolved.json and its page in docs/"
    )
    options = parser.parse_args(arguments)
    if options.docs:
        rows = [f"{json.dumps(name)}: {json.dumps(leaves)}" for name, leaves in resolve(options.folder).items()]
        RESOLVED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        PAGE.write_text(format_docs())
        return 0
    try:
        table = verdicts(options.folder, options.only)
    except ConfigError as error:
        sys.exit(str(error))
    if options.write:
        (DATA / "verdicts.tsv").write_text(format_table({**read_table(), **table}))
    committed = {name: verdict for name, verdict in read_table().items() if fnmatch.fnmatchcase(name, options.only)}
    changed = [name for name in sorted({*table, *committed}) if table.get(name) != committed.get(name)]
    for name in changed:
        print(f"{name}: {committed.get(name)} → {table.get(name)}")
    print(summary(table))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
