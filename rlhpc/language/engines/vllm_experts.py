"""Mixtures of experts in vLLM: updates by the names of the model's files, and kernels that pack experts anew.

transformers keeps the experts of a layer in one tensor; vLLM loads them one by one, by the names that files have. And some
kernels keep a packed form of the experts, which vLLM makes when it first loads a model and does not make again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from rlhpc.language.memory.model import EXPERT_COUNTS
from rlhpc.runtime.errors import ConfigError

#: Mixtures whose log-probs after updates were compared with those of transformers (vLLM 0.32, transformers 5.19). Of the
#: others some break off, and some go on with wrong weights (Ernie 4.5).
PROVEN = ("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


def is_mixture(config: Any) -> bool:
    """Whether a Hugging Face configuration is that of a mixture of experts."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in EXPERT_COUNTS)


def require_proven(config: Any, architecture: str = "") -> None:
    """Refuses mixtures whose updates in vLLM are not known to be right.

    Args:
        config: Of Hugging Face.
        architecture: Name of the module's class, where it is known; otherwise the first that the configuration names.

    Raises:
        ConfigError: Names the architecture and those that may be.
    """
    name = architecture or next(iter(getattr(config, "architectures", None) or ()), "")
    if name and is_mixture(config) and name not in PROVEN:
        raise ConfigError(
            f"rollout.rollout_backend is 'vllm', and actor.model is a mixture of experts, {name}, whose weight updates in "
            f"vLLM are not known to be right; those of {', '.join(PROVEN)} are. Take rollout.rollout_backend=hf"
        )


class FileNames:
    """Turns tensors of a mixture, as the module has them, into those of its files.

    Args:
        model: The module of transformers, on the meta device.

    Raises:
        ConfigError: Updates of this architecture are not known to be right.
    """

    def __init__(self, model: Any) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._model, self._revert = model, revert_weight_conversion
        architecture = type(model).__name__
        require_proven(model.config, architecture)
        tensors = model.state_dict()
        one_by_one = {name: tuple(tensor.shape) for name, tensor in self(tensors.items())}
        whole = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, tensors).items()}
        if one_by_one != whole:
            raise ConfigError(
                f"rollout.rollout_backend is 'vllm', and the installed transformers splits the experts of {architecture} in a "
                "way that takes the whole model at once; take rollout.rollout_backend=hf"
            )

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights; each tensor of experts becomes two or three per expert."""
        for name, tensor in weights:
            yield from self._revert(self._model, {name: tensor}).items()


def _packing(worker: Any) -> Iterator[tuple[Any, str]]:
    """Layers of experts whose kernel has work to do after loading, with the kernel's name."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

    for layer in worker.model_runner.get_model().modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is None:
            continue
        cls = type(kernel.fused_experts)
        if cls.process_weights_after_loading is not FusedMoEExperts.process_weights_after_loading:
            yield layer, cls.__name__


def packing_kernels(worker: Any) -> list[str]:
    """Names of the kernels that keep their own packed form of the experts."""
    return sorted({name for _, name in _packing(worker)})


def reload_packed(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """vLLM's reload, for kernels that pack: it packs only when it makes a kernel, so they are made anew.

    Not where CUDA graphs may have recorded the kernel's tensors.
    """
    for layer, _ in list(_packing(worker)):
        layer.quant_method.moe_kernel = None
    worker.reload_weights(weights_iterator=weights)
