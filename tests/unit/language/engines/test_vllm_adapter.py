"""What `vllm_adapter` assumes of vLLM: the names it replaces exist, and their callers look them up where it replaces them."""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.extras import need_extra

need_extra("llm", "vllm")
from rlhpc.language.engines import vllm_adapter
from rlhpc.runtime.errors import ConfigError


def source(path: str) -> str:
    """Returns the source of a module, class or function `module:Qualified.name`."""
    module, _, name = path.partition(":")
    value: Any = __import__(module, fromlist=["_"])
    for part in name.split(".") if name else ():
        value = getattr(value, part)
    return inspect.getsource(value)


@pytest.mark.parametrize(
    ("caller", "call"),
    [
        # The tuple of three that `external_launcher` returns in place of vLLM's.
        ("vllm.v1.executor.uniproc_executor:UniProcExecutor._init_executor", "self._distributed_args()"),
        ("vllm.distributed.parallel_state", "MessageQueue.create_from_process_group("),
        # Modules that had imported these functions by name would not see the replacements.
        ("vllm.model_executor.model_loader.reload.layerwise", "= get_numel_loaded("),
        ("vllm.model_executor.model_loader.reload.layerwise", "_place_kernel_tensors(layer"),
        ("vllm.model_executor.layers.vocab_parallel_embedding", "= get_masked_input_and_mask("),
        ("vllm.v1.sample.sampler:Sampler.forward", "self.gather_logprobs("),
        ("vllm.v1.worker.gpu.sample.sampler", "self._sample_random("),
        ("vllm.lora.worker_manager", "self._lora_model_cls.from_lora_tensors"),
    ],
)
def test_replaced_names_are_looked_up_where_they_are_replaced(caller: str, call: str) -> None:
    text = source(caller)
    if "from_lora_tensors" in call:
        assert "_lora_model_cls" in text and "_adapter_manager" in text
        return
    assert call in text, f"{caller} no longer has {call!r}: read it, and change rlhpc/language/engines/vllm_adapter.py"


def test_the_distributed_arguments_are_three() -> None:
    """vLLM unpacks method, rank and local rank."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    before = ExecutorWithExternalLauncher._distributed_args
    with vllm_adapter.external_launcher("group", 3):
        executor: Any = SimpleNamespace()
        assert ExecutorWithExternalLauncher._distributed_args(executor) == ("rlhpc:group", 3, 0)
    with vllm_adapter.external_launcher("group", 3, 1):
        assert ExecutorWithExternalLauncher._distributed_args(executor) == ("rlhpc:group", 3, 1)
    assert ExecutorWithExternalLauncher._distributed_args is before
    assert str(inspect.signature(before).return_annotation).count("int") == 2


def test_no_message_queue_opens_a_port() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    with vllm_adapter.external_launcher("group", 0):
        queue: Any = MessageQueue.create_from_process_group
        assert queue(None, 1, 1) is None
    assert inspect.signature(MessageQueue.create_from_process_group).parameters


def test_the_process_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an engine that could not be built."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    package = ModuleType("trimesh.fake")
    monkeypatch.setitem(sys.modules, "trimesh.fake", package)
    set_num_threads = torch.set_num_threads
    with pytest.raises(ValueError, match="no memory"), vllm_adapter.restored_process():
        assert "trimesh.fake" not in sys.modules
        os.environ["LD_PRELOAD"], os.environ["LOCAL_WORLD_SIZE"] = "libiomp5.so", "1"
        torch.set_num_threads = print
        raise ValueError("no memory")
    assert torch.set_num_threads is set_num_threads
    assert "LD_PRELOAD" not in os.environ and os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert sys.modules["trimesh.fake"] is package


def test_layers_register_in_tables_of_their_own() -> None:
    compilation = SimpleNamespace(static_forward_context={"layer": 1}, static_all_moe_layers=["layer"])
    with vllm_adapter.unregistered_layers(compilation):
        assert compilation.static_forward_context == {} and compilation.static_all_moe_layers == []
        compilation.static_forward_context["layer"] = 2
    assert compilation.static_forward_context == {"layer": 1} and compilation.static_all_moe_layers == ["layer"]
    fields = source("vllm.config.compilation:CompilationConfig")
    assert all(name in fields for name in ("static_forward_context", "static_all_moe_layers"))


def test_the_decoder_layers_are_the_longest_list_of_layers() -> None:
    """Beside a vision tower's layers and the experts of a layer."""
    model = nn.ModuleDict({"tower": nn.ModuleDict({"layers": nn.ModuleList([nn.Identity()])})})
    layers = [nn.ModuleDict({"experts": nn.ModuleList(nn.Identity() for _ in range(4))}) for _ in range(2)]
    model["model"] = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    assert vllm_adapter.decoder_layers(worker) == layers
    worker.model_runner.get_model = nn.Identity
    assert vllm_adapter.decoder_layers(worker) == []


def test_hidden_states_have_their_residual() -> None:
    output, residual = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert torch.equal(vllm_adapter.sum_with_residual((output, residual)), torch.full((2, 3), 3.0))
    assert vllm_adapter.sum_with_residual((output, None)) is output and vllm_adapter.sum_with_residual(output) is output
    assert "return hidden_states, residual" in source("vllm.model_executor.models.qwen3:Qwen3DecoderLayer")


def test_a_reload_is_observed() -> None:
    """vLLM reports copied elements by one function, and places the layers that got none by the other."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    copied: list[int] = []
    idle: list[Any] = []
    before = layerwise.get_numel_loaded, layerwise._place_kernel_tensors
    with vllm_adapter.observed_reload(copied.append, idle.append):
        target = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        bound = inspect.signature(lambda param, loaded_weight: None).bind(target, torch.ones(2, 3))
        loader: Any = lambda param, loaded_weight: param.copy_(loaded_weight)  # noqa: E731
        layerwise.get_numel_loaded(loader, bound)
        layers = [nn.Linear(1, 1) for _ in range(3)]
        for layer, num_loaded in zip(layers, (0, 2, 0), strict=True):
            info = LayerReloadingInfo(({}, {}), torch.device("cpu"), load_numel=num_loaded)
            info.kernel_tensors = ({} if layer is layers[2] else dict(layer.named_parameters()), {})
            layerwise._place_kernel_tensors(layer, info)
    assert copied == [6]
    assert idle == [layers[0]], "neither a layer that got weights nor one without parameters"
    assert (layerwise.get_numel_loaded, layerwise._place_kernel_tensors) == before


def test_the_lookup_of_a_sharded_embedding_has_a_plain_form() -> None:
    from vllm.model_executor.layers import vocab_parallel_embedding

    vllm_adapter.use_plain_lookup()
    plain = vocab_parallel_embedding.get_masked_input_and_mask
    assert not hasattr(plain, "_torchdynamo_orig_callable"), (
        "still compiled: vLLM keeps the plain function elsewhere now"
    )
    ids, mask = plain(torch.tensor([0, 3, 9]), 2, 6, 0, 6, 6)
    assert mask.tolist() == [True, False, True] and int(ids[1]) == 1


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores vLLM's variable of the batch-invariant mode."""
    monkeypatch.setenv(vllm_adapter.BATCH_INVARIANT, "0")


def test_the_batch_invariant_mode_is_refused_on_a_cpu(variable: None) -> None:
    """Which declares no invariant attention, and whose worker never turns the mode on."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    with pytest.raises(
        ConfigError, match=r"rollout\.batch_invariant: vLLM's CPU build has no such mode.*leave it false"
    ):
        vllm_adapter.use_batch_invariant_mode()
    assert os.environ[vllm_adapter.BATCH_INVARIANT] == "0"
    assert not CPUAttentionBackend.supports_batch_invariance()
    assert "init_batch_invariance" not in source("vllm.v1.worker.cpu_worker")
    assert "init_batch_invariance()" in source("vllm.v1.worker.gpu_worker")


def test_the_batch_invariant_mode_is_read_from_the_variable(variable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By functions when they are called, and by modules when they are imported: these take the constant that is set here."""
    from vllm import envs

    monkeypatch.setenv(vllm_adapter.BATCH_INVARIANT, "1")
    assert envs.VLLM_BATCH_INVARIANT is True
    monkeypatch.setenv(vllm_adapter.BATCH_INVARIANT, "0")
    assert envs.VLLM_BATCH_INVARIANT is False
    root = Path(envs.__file__).parent
    constants = {
        (str(path.relative_to(root)), match[1])
        for path in root.rglob("*.py")
        for match in re.finditer(r"^(\w+) *= *envs\.VLLM_BATCH_INVARIANT", path.read_text(errors="ignore"), re.M)
    }
    assert {name for _, name in constants} == {"is_batch_invariant"} and len(constants) >= 3
    text = source("vllm.model_executor.determinism.batch_invariant:init_batch_invariance")
    assert "if envs.VLLM_BATCH_INVARIANT:" in text and "override_envs_for_invariance()" in text
    # A hybrid model's layers refuse the mode themselves, which `_explain_errors` turns into a message.
    refusal = source("vllm.v1.attention.selector:_cached_get_mamba_attn_backend")
    assert "raise RuntimeError" in refusal and "mode is not supported for" in refusal


def test_a_buffer_that_vllm_renames_keeps_the_name_of_the_files() -> None:
    """By vLLM's own mapper of a family: the bias of its router is a buffer of another name there."""
    from vllm.model_executor.models.lfm2_moe import Lfm2MoeModel

    model = nn.Module()
    model.model = nn.Module()
    model.model.hf_to_vllm_mapper = Lfm2MoeModel.hf_to_vllm_mapper
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    name = "model.layers.1.feed_forward.expert_bias"
    renamed = vllm_adapter.renamed_tensors(worker, [name, "model.rotary_emb.inv_freq"])
    assert renamed == {"model.layers.1.feed_forward.gate.e_score_correction_bias": name}
