"""An engine of several policies: one engine for each, with its weights; a request says whose it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlhpc.language.engines.base import Completion, Request, ScoresTexts
from rlhpc.language.engines.common import UpdateFailed

if TYPE_CHECKING:
    import torch

    from rlhpc.weights.delta import Elements


class SeveralPolicies:
    """Engines that take turns, each with the weights of a policy, adapters merged. They are such as take parts of an update
    (`TakesParts`), end single requests, score, and say which weights they need: `hf`.

    Args:
        names: Of the policies.
        make: Makes one's engine, of its name.
    """

    updates_in_part = True

    def __init__(self, names: Sequence[str], make: Callable[[str], Any]) -> None:
        self._names = tuple(names)
        self._engines: list[Any] = []
        try:
            for name in names:
                self._engines.append(make(name))
        except BaseException:
            self.close()
            raise
        self._torn = ""
        self.capacity = min(int(engine.capacity) for engine in self._engines)
        self.context = min(int(engine.context) for engine in self._engines)
        self.vocabulary = int(self._engines[0].vocabulary)
        self.choices = 0

    @property
    def version(self) -> int:
        """See `RolloutBackend.version`."""
        return int(self._engines[0].version)

    def add(self, requests: Iterable[Request]) -> None:
        """See `RolloutBackend.add`; each goes to its policy's engine."""
        for policy, mine in groupby(sorted(requests, key=_policy), _policy):
            self._engines[policy].add(list(mine))

    def step(self) -> list[Completion]:
        """See `RolloutBackend.step`."""
        if self._torn:
            raise UpdateFailed(self._torn)
        return [done for engine in self._engines if engine.unfinished() for done in engine.step()]

    def unfinished(self) -> int:
        """See `RolloutBackend.unfinished`."""
        return sum(engine.unfinished() for engine in self._engines)

    def abort(self) -> list[Completion]:
        """See `RolloutBackend.abort`."""
        return [completion for engine in self._engines for completion in engine.abort()]

    def drop(self, ids: Collection[int]) -> None:
        """See `DropsRequests.drop`."""
        for engine in self._engines:
            engine.drop(ids)

    def so_far(self, ids: Collection[int]) -> dict[int, list[int]]:
        """See `DropsRequests.so_far`."""
        return {number: said for engine in self._engines for number, said in engine.so_far(ids).items()}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `RolloutBackend.generate`."""
        found = dict[int, Completion]()
        for policy, mine in groupby(sorted(requests, key=_policy), _policy):
            found |= {completion.id: completion for completion in self._engines[policy].generate(list(mine))}
        return [found[request.id] for request in requests]

    def update_weights(
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor | Elements]], *, complete: bool = True
    ) -> None:
        """See `TakesParts.update_weights`. What all policies have comes once, by its name; the rest is named `policy/name`
        (`of_policy`). They come in any order."""
        self._torn = (
            f"the update to version {version} of the policies' weights did not arrive whole; send it again, or restart the "
            "rollout group"
        )
        came: dict[str, set[str]] = {name: set() for name in self._names}
        engines = dict(zip(self._names, self._engines, strict=True))
        for policy, run in groupby(named_tensors, lambda named: named[0].rpartition("/")[0]):
            if policy and policy not in engines:
                raise UpdateFailed(f"a weight update is of policy {policy!r}; there are: {', '.join(self._names)}")
            if policy:
                engines[policy].update_weights(version, _noted(run, came[policy]), complete=False)
                continue
            for named in run:
                for name, engine in engines.items():
                    engine.update_weights(version, _noted([named], came[name]), complete=False)
        for name, engine in engines.items():
            if complete and (missing := sorted(engine.needs() - came[name])):
                raise UpdateFailed(f"a weight update left out {', '.join(missing[:3])} of policy {name}")
            engine.update_weights(version, (), complete=False)
        self._torn = ""

    def held(self, name: str) -> torch.Tensor | None:
        """See `TellsWeights.held`; of what all policies have, the first one's."""
        policy, _, own = name.rpartition("/")
        found: torch.Tensor | None = self._engines[self._names.index(policy) if policy else 0].held(own)
        return found

    def score(self, token_ids: Sequence[int], policy: int = 0) -> list[float]:
        """See `ScoresTexts.score`; by the weights of a policy."""
        engine: ScoresTexts = self._engines[policy]
        return engine.score(token_ids)

    def offload(self) -> None:
        """See `RolloutBackend.offload`."""
        for engine in self._engines:
            engine.offload()

    def reload(self) -> None:
        """See `RolloutBackend.reload`."""
        for engine in self._engines:
            engine.reload()

    def close(self) -> None:
        """See `RolloutBackend.close`."""
        for engine in self._engines:
            engine.close()


def _policy(request: Request) -> int:
    return request.sampling.policy


def _noted(named: Iterable[Any], came: set[str]) -> Iterator[Any]:
    """Tensors by their own names, which are written down."""
    for whole, tensor in named:
        name = whole.rpartition("/")[2]
        if name in came:
            raise UpdateFailed(f"a weight update brought {whole!r} twice")
        came.add(name)
        yield name, tensor
