"""LoRA adapters that vLLM computes with as they are: an update is the adapters alone, handed over as tensors.

vLLM reads the model's own weights, which never change, from its files, and keeps one adapter, which every request asks for.
Its own way to a new one is a folder on disk; here what it would have read there is put into its manager, on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rlhpc.language.engines.engine import UpdateFailed
from rlhpc.runtime.errors import ConfigError

#: Ranks that vLLM's kernels are made for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_ID = 1
_PREFIX = "base_model.model."


class Adapters:
    """The adapters of one engine.

    Args:
        rank, alpha: `actor.lora`.
        shapes: Of the model's own weights, by their names.

    Raises:
        ConfigError: vLLM has no kernels for such adapters.
    """

    def __init__(self, rank: int, alpha: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if rank > _RANKS[-1]:
            raise ConfigError(
                f"actor.lora.rank is {rank}, and vLLM takes adapters of at most {_RANKS[-1]}; lower it, or set "
                "rollout.merge_adapters=true"
            )
        self._rank, self._alpha, self._shapes = rank, alpha, shapes
        self._names: frozenset[str] = frozenset()

    def arguments(self) -> dict[str, Any]:
        """Arguments of the engine."""
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(r for r in _RANKS if r >= self._rank)}

    def request(self) -> Any:
        """What a request says that is to be computed with them; nothing before any have come."""
        if not self._names:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest("actor", _ID, "nowhere: the weights come from the actor")

    def fitting(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """An update's tensors, copied.

        Raises:
            UpdateFailed: One is not of this model, or missing; names it.
        """
        found = dict[str, torch.Tensor]()
        for name, tensor in named:
            layer, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            of = self._shapes.get(f"{layer}.weight", (0, 0))
            expected = {"lora_A": (self._rank, of[1]), "lora_B": (of[0], self._rank)}.get(part)
            if tuple(tensor.shape) != expected:
                raise UpdateFailed(
                    f"a weight update brought {name!r} of shape {tuple(tensor.shape)}; "
                    + (f"{expected} is wanted" if expected and of != (0, 0) else "the model has no such adapter")
                )
            if name in found:
                raise UpdateFailed(f"a weight update brought {name!r} twice")
            found[name] = tensor.detach().to("cpu", copy=True)
        lacking = sorted((self._names - found.keys()) | {_pair(name) for name in found if _pair(name) not in found})
        if lacking or not found:
            raise UpdateFailed(f"a weight update left out {', '.join(lacking[:3]) or 'all adapters'}")
        self._names = frozenset(found)
        return found

    def config(self, names: Iterable[str]) -> dict[str, Any]:
        """What peft would write down beside them."""
        targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})
        return {"r": self._rank, "lora_alpha": self._alpha, "target_modules": targets}


def _pair(name: str) -> str:
    return name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")


def take_adapters(worker: Any, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> int:
    """Puts adapters in the place of the last ones, on vLLM's worker.

    Args:
        worker: The worker.
        tensors: By the names of peft's files.
        config: From `Adapters.config`.

    Returns:
        How many layers have one.
    """
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager
    inner, helper = manager._adapter_manager, PEFTHelper.from_dict(config)
    helper.validate_legal(manager.lora_config)
    mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
    adapter = manager._lora_model_cls.from_lora_tensors(
        _ID, tensors, helper, device="cpu", dtype=manager.lora_config.lora_dtype, model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )  # fmt: skip
    layers = len(adapter.loras)
    inner.remove_adapter(_ID)
    inner.add_adapter(adapter)
    inner.activate_adapter(_ID)
    return layers
