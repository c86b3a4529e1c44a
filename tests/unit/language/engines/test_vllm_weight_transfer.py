"""vLLM's own weight transfer (`vllm.distributed.weight_transfer`), as docs/explanation/weights.md compares it with the
project's: held against the installed sources, which are read and not imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.extras import need_extra

need_extra("llm", "vllm")

#: Class of `base.py` → the methods that an engine must have, each with the arguments after `self` or `cls`.
REQUIRED = {
    "WeightTransferEngine": {
        "init_transfer_engine": ("init_info",),
        "start_weight_update": (),
        "receive_weights": ("update_info",),
        "finish_weight_update": (),
        "shutdown": (),
    },
    "TrainerWeightTransferEngine": {
        "trainer_init": ("init_info", "client", "source"),
        "send_weights": (),
    },
    "WeightSource": {"metadata": (), "__iter__": ()},
}
#: Methods of the client by which a trainer drives an engine: vLLM's control plane.
CLIENT = {
    "init_weight_transfer_engine": ("init_info",),
    "start_weight_update": (),
    "update_weights": ("update_info",),
    "finish_weight_update": ("weight_version",),
}
#: Names under which engines and trainers are registered: an engine → whether it has a trainer's side, too.
REGISTERED = {
    "nccl": True, "ipc": True, "sparse_nccl": True, "sharded_rdt": True, "nccl_m2n": True, "modelexpress": False
}  # fmt: skip


def folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "distributed" / "weight_transfer"


@dataclass(frozen=True)
class Sources:
    """Contents of the package's files, by name."""

    text: Mapping[str, str]

    @classmethod
    def installed(cls) -> Sources:
        return cls({path.name: path.read_text() for path in folder().glob("*.py")})

    def changed(self, file: str, before: str, after: str) -> Sources:
        """Another version of vLLM, in which one text of a file is different."""
        assert before in self.text[file], f"{file} has no {before!r}"
        return Sources({**self.text, file: self.text[file].replace(before, after)})

    def methods(self, file: str, name: str) -> dict[str, ast.FunctionDef]:
        [found] = [
            node for node in ast.parse(self.text[file]).body if isinstance(node, ast.ClassDef) and node.name == name
        ]
        return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def arguments(function: ast.FunctionDef) -> tuple[str, ...]:
    names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    return tuple(name for name in names if name not in ("self", "cls"))


def is_abstract(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "abstractmethod" for node in function.decorator_list)


def registered(sources: Sources) -> dict[str, bool]:
    """The names that the factories of `factory.py` know: an engine → whether it has a trainer's side."""
    names: dict[str, set[str]] = {"WeightTransferEngineFactory": set(), "WeightTransferTrainerFactory": set()}
    for node in ast.walk(ast.parse(sources.text["factory.py"])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register_engine":
            assert isinstance(node.func.value, ast.Name) and isinstance(node.args[0], ast.Constant)
            names[node.func.value.id].add(str(node.args[0].value))
    engines, trainers = names.values()
    return {name: name in trainers for name in engines}


def differences(sources: Sources) -> list[str]:
    """What of the interface is another than the page says; each claim with the claim's name."""
    found = []
    for name, required in REQUIRED.items():
        methods = sources.methods("base.py", name)
        abstract = {method: arguments(node) for method, node in methods.items() if is_abstract(node)}
        if abstract != required:
            found.append(f"{name} requires {abstract}")
    client = {method: arguments(node) for method, node in sources.methods("base.py", "VLLMWeightSyncClient").items()}
    if client != CLIENT:
        found.append(f"the client has {client}")
    if registered(sources) != REGISTERED:
        found.append(f"registered are {registered(sources)}")
    sender = sources.methods("base.py", "TrainerInitInfo").get("is_sender")
    if sender is None or ast.unparse(sender.body[-1]) != "return self.rank == 0":
        found.append("a rank other than the trainer's first may send")
    if "src=0" not in ast.unparse(sources.methods("nccl_engine.py", "NCCLTrainerWeightTransferEngine")["_broadcast"]):
        found.append("nccl does not broadcast from the trainer's first rank")
    unpacked = ast.unparse(sources.methods("ipc_engine.py", "IPCTrainerWeightTransferEngine")["_send_unpacked"])
    if "weight_refs.append" not in unpacked or "return weight_refs" not in unpacked:
        found.append("ipc does not hold all gathered tensors until the update is finished")
    if "DEFAULT_PACKED_BUFFER_SIZE_BYTES = 1024 * 1024 * 1024" not in sources.text["packed_tensor.py"]:
        found.append("packed buffers have another size than 1 GiB")
    dense = (sources.text[name] for name in ("base.py", "ipc_engine.py", "nccl_engine.py", "packed_tensor.py"))
    if any(word in text for text in dense for word in ("xxhash", "hashlib", "digest(")):
        found.append("nccl and ipc have digests of the weights")
    return found


def test_its_interface_is_the_one_that_the_page_compares() -> None:
    assert differences(Sources.installed()) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("base.py", "def receive_weights(self, update_info: TUpdateInfo)", "def receive_weights(self, info: TUpdateInfo)",
         "WeightTransferEngine requires"),
        ("base.py", "    @abstractmethod\n    def shutdown", "    def shutdown", "WeightTransferEngine requires"),
        ("base.py", "    @abstractmethod\n    def send_weights", "    def send_weights",
         "TrainerWeightTransferEngine requires"),
        ("base.py", "(self, weight_version: str | None = None)", "(self)", "the client has"),
        ("base.py", "return self.rank == 0", "return True", "other than the trainer's first"),
        ("factory.py", '"nccl_m2n"', '"m2n"', "registered are"),
        ("nccl_engine.py", "src=0", "src=self.rank", "nccl does not broadcast"),
        ("ipc_engine.py", "weight_refs.append(weight)", "del weight", "ipc does not hold"),
        ("packed_tensor.py", "1024 * 1024 * 1024", "256 << 20", "packed buffers"),
        ("base.py", "import torch\n", "import hashlib\n\nimport torch\n", "digests"),
    ],
)  # fmt: skip
def test_another_interface_is_noticed(file: str, before: str, after: str, said: str) -> None:
    assert any(said in difference for difference in differences(Sources.installed().changed(file, before, after)))


def test_the_page_names_every_engine() -> None:
    page = (Path(__file__).parents[4] / "docs" / "explanation" / "weights.md").read_text()
    section = page.split("## Compared with vLLM's weight transfer")[1].split("\n## ")[0]
    assert {name for name in REGISTERED if f"`{name}`" not in section} == set()
