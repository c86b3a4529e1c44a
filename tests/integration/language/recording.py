"""An engine and an algorithm that write down what they are given and what they give back, named as `recording:…`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlhpc.language.algorithms.policy_gradient import PolicyGradient
from rlhpc.language.engines import Completion, Request
from rlhpc.language.engines.hf import HFRollout


def write(kind: str, **what: Any) -> None:
    """A line in the file of this process."""
    with (Path(os.environ["RLHPC_TEST_RECORDS"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, **what}) + "\n")


class Slow(HFRollout):
    """The engine hf, which takes its time for a token for as long as a test wants it to."""

    _probed = False

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """What the engine is proven by is none of the run's."""
        self._probed = True
        try:
            return super().generate(requests)
        finally:
            self._probed = False

    def add(self, requests: Iterable[Request]) -> None:
        made = list(requests)
        super().add(made)
        for request in () if self._probed else made:
            write("asked", prompt=request.prompt_ids, most=request.sampling.max_new_tokens, seed=request.seed)

    def step(self) -> list[Completion]:
        if self._probed:
            return super().step()
        pause = Path(os.environ["RLHPC_TEST_STEP"])
        with contextlib.suppress(FileNotFoundError, ValueError):
            time.sleep(float(pause.read_text()))
            write(
                "step",
                tokens=max([len(self._sequences.response(row)) for row in range(len(self._sequences))], default=0),
            )
        return super().step()

    def abort(self) -> list[Completion]:
        prompts = {request.id: request.prompt_ids for request in self._sequences.requests}
        stopped = super().abort()
        for one in stopped:
            if one.token_ids:
                write(
                    "stopped",
                    prompt=prompts[one.id],
                    tokens=one.token_ids,
                    logprobs=one.logprobs,
                    versions=one.versions,
                )
        return stopped


class Recorded(PolicyGradient):
    """GRPO that writes down which samples come from whom, and which are trained on."""

    def rollout_columns(self, episode, scored):
        write(
            "handed over", prompt=episode.prompt_ids, tokens=episode.token_ids, logprobs=episode.logprobs,
            versions=episode.versions, reason=episode.finish_reason,
        )  # fmt: skip
        return super().rollout_columns(episode, scored)

    def advantages(self, batch, all_reduce):
        for begin, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            write("trained", ids=batch.ids[begin:end].tolist())
        return super().advantages(batch, all_reduce)
