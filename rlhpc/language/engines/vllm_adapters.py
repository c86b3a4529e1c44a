"""LoRA adapters that vLLM computes with as they are: an update is the adapters alone, handed over as tensors.

vLLM reads the model's own weights, which never change, from its files, and keeps an adapter for each policy: most often one,
which every request asks for. Its own way to a new one is a folder on disk; here what it would have read there is put into its
manager, on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rlhpc.language.engines.engine import UpdateFailed
from rlhpc.runtime.errors import ConfigError

#: Ranks that vLLM's kernels are made for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_PREFIX = "base_model.model."


class Adapters:
    """The adapters of one engine.

    Args:
        rank, alpha: `actor.lora`.
        shapes: Of the model's own weights, by their names.
        policies: Names of several policies, each with adapters of its own.

    Raises:
        ConfigError: vLLM has no kernels for such adapters.
    """

    def __init__(
        self, rank: int, alpha: int, shapes: Mapping[str, tuple[int, ...]], policies: Sequence[str] = ()
    ) -> None:
        if rank > _RANKS[-1]:
            raise ConfigError(
                f"actor.lora.rank is {rank}, and vLLM takes adapters of at most {_RANKS[-1]}; lower it, or set "
                "rollout.merge_adapters=true"
            )
        self._rank, self._alpha, self._shapes = rank, alpha, shapes
        self._policies, self._names = tuple(policies), frozenset[str]()

    def arguments(self) -> dict[str, Any]:
        """Arguments of the engine."""
        return {
            "enable_lora": True,
            "max_loras": max(1, len(self._policies)),
            "max_lora_rank": next(r for r in _RANKS if r >= self._rank),
        }

    def request(self, policy: int) -> Any:
        """What a request says that is to be computed with those of a policy; nothing before any have come."""
        if not self._names:
            return None
        from vllm.lora.request import LoRARequest

        name = self._policies[policy] if self._policies else "actor"
        return LoRARequest(name, policy + 1, "nowhere: the weights come from the actor")

    def fitting(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """An update's tensors, copied.

        Raises:
            UpdateFailed: One is not of this model, or missing; names it.
        """
        found = dict[str, torch.Tensor]()
        for name, tensor in named:
            policy, _, own = name.rpartition("/")
            layer, _, part = own.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            of = self._shapes.get(f"{layer}.weight", (0, 0))
            expected = {"lora_A": (self._rank, of[1]), "lora_B": (of[0], self._rank)}.get(part)
            if tuple(tensor.shape) != expected or policy not in (self._policies or ("",)):
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
        if absent := [policy for policy in self._policies if not any(name.startswith(f"{policy}/") for name in found)]:
            raise UpdateFailed(f"a weight update left out the adapters of policy {absent[0]}")
        self._names = frozenset(found)
        return found

    def by_policy(self, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """An update's tensors for each policy, by the names of peft's files."""
        return [
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            for prefix in [f"{policy}/" for policy in self._policies] or [""]
        ]

    def config(self, names: Iterable[str]) -> dict[str, Any]:
        """What peft would write down beside them."""
        targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})
        return {"r": self._rank, "lora_alpha": self._alpha, "target_modules": targets}


def _pair(name: str) -> str:
    return name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")


def _unchanged(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns logits as they are, in the place of vLLM's addition of an adapter to the output layer.

    vLLM adds one whether or not there is any, and takes the rows for those of the tokens that are drawn in this step: the
    log-probs of a prompt have other rows. Beside other requests that is an error on CPUs, and elsewhere another request's
    adapter.
    """
    del args, kwargs
    return logits


def take_adapters(worker: Any, tensors: dict[str, torch.Tensor], config: dict[str, Any], policy: int) -> int:
    """Puts adapters in the place of the last ones, on vLLM's worker.

    Args:
        worker: The worker.
        tensors: By the names of peft's files.
        config: From `Adapters.config`.
        policy: Whose they are.

    Returns:
        How many layers have one.
    """
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager
    inner, helper = manager._adapter_manager, PEFTHelper.from_dict(config)
    number = policy + 1
    helper.validate_legal(manager.lora_config)
    mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
    adapter = manager._lora_model_cls.from_lora_tensors(
        number, tensors, helper, device="cpu", dtype=manager.lora_config.lora_dtype, model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )  # fmt: skip
    layers = len(adapter.loras)
    if "lm_head" not in config["target_modules"]:
        for wrapper in inner.punica_wrapper_mapping.values():
            wrapper.add_lora_logits = _unchanged
    inner.remove_adapter(number)
    inner.add_adapter(adapter)
    inner.activate_adapter(number)
    return layers
