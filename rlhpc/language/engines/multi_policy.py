"""Engine for several policies, which combines one engine per policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlhpc.language.engines.base import Completion, Request, RolloutBackend
from rlhpc.language.engines.common import WeightUpdateError
from rlhpc.runtime.text import format_names

if TYPE_CHECKING:
    import torch

    from rlhpc.weights.delta import Elements


class MultiPolicyEngine(RolloutBackend):
    """Combination of one engine per policy, each with merged adapters; the engines run alternately.

    The engines must support partial updates, `drop`, `score` and `needs`, as `hf` does.

    Args:
        names: Names of the policies.
        make: Function that builds the engine of a policy from its name.
    """

    takes_partial_updates = True
    can_drop = True
    can_score = True

    def __init__(self, names: Sequence[str], make: Callable[[str], Any]) -> None:
        self._names = tuple(names)
        self._engines: list[Any] = []
        try:
            for name in names:
                self._engines.append(make(name))
        except BaseException:
            self.close()
            raise
        self._broken_update = ""
        self.capacity = min(int(engine.capacity) for engine in self._engines)
        self.context = min(int(engine.context) for engine in self._engines)
        self.vocabulary = int(self._engines[0].vocabulary)
        self.choices = 0

    @property
    def version(self) -> int:  # type: ignore[override]
        """Version of the weights that the next step uses."""
        return int(self._engines[0].version)

    def add(self, requests: Iterable[Request]) -> None:
        """Adds requests to the engines of their policies; see `RolloutBackend.add`."""
        for policy, policy_requests in groupby(sorted(requests, key=_find_policy_index), _find_policy_index):
            self._engines[policy].add(list(policy_requests))

    def step(self) -> list[Completion]:
        """Advances all engines with requests; see `RolloutBackend.step`.

        Raises:
            WeightUpdateError: The last weight update was incomplete.
        """
        if self._broken_update:
            raise WeightUpdateError(self._broken_update)
        return [completion for engine in self._engines if engine.unfinished() for completion in engine.step()]

    def unfinished(self) -> int:
        """Returns the number of unfinished requests; see `RolloutBackend.unfinished`."""
        return sum(engine.unfinished() for engine in self._engines)

    def abort(self) -> list[Completion]:
        """Ends all running requests; see `RolloutBackend.abort`."""
        return [completion for engine in self._engines for completion in engine.abort()]

    def drop(self, ids: Collection[int]) -> None:
        """Ends some requests; see `RolloutBackend.drop`."""
        for engine in self._engines:
            engine.drop(ids)

    def sampled_tokens(self, ids: Collection[int]) -> dict[int, list[int]]:
        """Returns the tokens of running requests; see `RolloutBackend.sampled_tokens`."""
        return {
            request_id: tokens for engine in self._engines for request_id, tokens in engine.sampled_tokens(ids).items()
        }

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completes requests; see `RolloutBackend.generate`."""
        completions = dict[int, Completion]()
        for policy, policy_requests in groupby(sorted(requests, key=_find_policy_index), _find_policy_index):
            completions |= {
                completion.id: completion for completion in self._engines[policy].generate(list(policy_requests))
            }
        return [completions[request.id] for request in requests]

    def update_weights(
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor | Elements]], *, complete: bool = True
    ) -> None:
        """Loads weights; see `RolloutBackend.update_weights`.

        Tensors shared by all policies are given once, by their names; a policy's own tensors are named `policy/name`
        (`policy_tensor_name`). The order is arbitrary.

        Raises:
            WeightUpdateError: The update names an unknown policy, or lacks tensors of a policy.
        """
        self._broken_update = (
            f"the update to version {version} of the policies' weights did not arrive whole; send it again, or restart the "
            "rollout group"
        )
        received_names: dict[str, set[str]] = {name: set() for name in self._names}
        engines = dict(zip(self._names, self._engines, strict=True))
        for policy, policy_tensors in groupby(
            named_tensors, lambda name_and_tensor: name_and_tensor[0].rpartition("/")[0]
        ):
            if policy and policy not in engines:
                raise WeightUpdateError(f"a weight update is of policy {policy!r}; there are: {', '.join(self._names)}")
            if policy:
                engines[policy].update_weights(
                    version, _record_names(policy_tensors, received_names[policy]), complete=False
                )
                continue
            for named_tensor in policy_tensors:
                for name, engine in engines.items():
                    engine.update_weights(version, _record_names([named_tensor], received_names[name]), complete=False)
        for name, engine in engines.items():
            if complete and (missing_names := sorted(engine.needs() - received_names[name])):
                raise WeightUpdateError(f"a weight update left out {format_names(missing_names)} of policy {name}")
            engine.update_weights(version, (), complete=False)
        self._broken_update = ""

    def parameter_digests(self) -> dict[str, int]:
        """Returns the digests of all policies' parameters; see `RolloutBackend.parameter_digests`."""
        return {
            f"{policy}/{name}": digest
            for policy, engine in zip(self._names, self._engines, strict=True)
            for name, digest in engine.parameter_digests().items()
        }

    def held(self, name: str) -> torch.Tensor | None:
        """Returns the current tensor named `policy/name`, or `name` for the first policy; see `RolloutBackend.held`."""
        policy, _, tensor_name = name.rpartition("/")
        tensor: torch.Tensor | None = self._engines[self._names.index(policy) if policy else 0].held(tensor_name)
        return tensor

    def score(self, token_ids: Sequence[int], policy: int = 0) -> list[float]:
        """Returns the log-probs of a text with the weights of a policy; see `RolloutBackend.score`."""
        logprobs: list[float] = self._engines[policy].score(token_ids)
        return logprobs

    def offload(self) -> None:
        """Frees the accelerator's memory; see `RolloutBackend.offload`."""
        for engine in self._engines:
            engine.offload()

    def reload_weights(self) -> None:
        """Reloads the weights of all engines; see `RolloutBackend.reload_weights`."""
        for engine in self._engines:
            engine.reload_weights()

    @property
    def can_compute(self) -> bool:  # type: ignore[override]
        """True if all engines can compute; see `RolloutBackend.can_compute`."""
        return all(engine.can_compute for engine in self._engines)

    def reload(self) -> None:
        """Reverses `offload`; see `RolloutBackend.reload`."""
        for engine in self._engines:
            engine.reload()

    def close(self) -> None:
        """Shuts the engines down; see `RolloutBackend.close`."""
        for engine in self._engines:
            engine.close()


def _find_policy_index(request: Request) -> int:
    return request.sampling.policy


def _record_names(named_tensors: Iterable[Any], received_names: set[str]) -> Iterator[Any]:
    """Yields tensors with their names without the policy, and adds these names to `received_names`.

    Raises:
        WeightUpdateError: A name occurs twice.
    """
    for full_name, tensor in named_tensors:
        name = full_name.rpartition("/")[2]
        if name in received_names:
            raise WeightUpdateError(f"a weight update brought {full_name!r} twice")
        received_names.add(name)
        yield name, tensor
