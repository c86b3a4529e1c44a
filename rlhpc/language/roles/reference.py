"""ReferenceWorker: one rank of a reference policy that follows the actor every so many steps."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhpc.checkpoint.async_writer import SavingWorker
from rlhpc.checkpoint.state import load_tensors, save_tensors
from rlhpc.jobs.paths import MODEL
from rlhpc.language.roles.prompts import PromptMap
from rlhpc.language.roles.scoring import ScoringWorker
from rlhpc.language.roles.sending import reference_sync_of
from rlhpc.language.scoring.groups import REFERENCE
from rlhpc.language.scoring.logprobs import LogProbs
from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights import make_sync
from rlhpc.weights.delta import Elements
from rlhpc.weights.verification import Proof


class ReferenceWorker(ScoringWorker, SavingWorker):
    """Scores like any other rank; and takes in the actor's weights when it is told to, which it then keeps in checkpoints."""

    scorer: LogProbs

    def init_worker(self, prompts: PromptMap) -> None:
        """Loads the policy from before training."""
        super().init_worker(prompts)
        receivers = [(self.group_name, list(range(self.world_size)))]
        self._sync = make_sync(reference_sync_of(self.cfg), self, (prompts.actor_name, 0), receivers, "off", whole=True)

    def take_weights(self) -> None:
        """Becomes the policy that the actor sends."""
        update = self._sync.receive()
        there = self.scorer.model.state_dict()
        with torch.no_grad():
            proof = Proof(update, f"{self.prompts.actor_name}-0")
            for name, tensor in proof.tensors():
                if isinstance(tensor, Elements) or name not in there:
                    raise RlhpcError(f"the actor's weight {name} does not fit the reference's model")
                there[name].copy_(tensor)
            proof.check()

    def save(self, folder: str) -> None:
        """Rank 0 writes the weights: they are neither the actor's nor those from before training."""
        if self.rank == 0:
            path = Path(folder) / REFERENCE
            path.mkdir(exist_ok=True)
            weights = {name: parameter.detach().cpu() for name, parameter in self.scorer.model.named_parameters()}
            save_tensors(path / MODEL, weights)

    def load(self, folder: str) -> None:
        """Restores a checkpoint, of this or another world size."""
        self._sync.forget()
        there = dict(self.scorer.model.named_parameters())
        with torch.no_grad():
            for name, tensor in load_tensors(Path(folder) / REFERENCE / MODEL).items():
                there[name].copy_(tensor)
