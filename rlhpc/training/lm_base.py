"""What the training backends of language models share; each subclass knows one way to hold and update the weights.

A subclass builds `self.module` (and its optimizer) in its constructor and defines `_backward`, `_full`,
`_make_reference`, `optimizer_step`, `save`, `load`, `offload` and `reload`. One whose weights cannot be read where `offload`
leaves them says so in `away`, and does what reads or writes them inside `awake`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from torch import nn

from rlhpc.language.tokens import lora
from rlhpc.language.tokens.files import FOLDER, model_files, plain
from rlhpc.language.tokens.model import compute_dtype, export_model, load_causal_lm
from rlhpc.language.tokens.scores import token_scores
from rlhpc.runtime.device import torch_device
from rlhpc.runtime.durable import fsync_folder, write_durably
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.training.lm import LossFunction, TokenBatch, TokenScores

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker

IDENTITY = "backend.json"


class LanguageModelBackend:
    """Owns model and optimizer of one actor rank; the contract is `TrainingBackend`.

    Attributes:
        module: What is called with `input_ids`: the model, with adapters where `actor.lora.rank` is not 0.
        device: Where it computes.
        dtype: Of the computation (`actor.model.dtype`); trainable weights are kept in float32.
    """

    name = ""
    """As `actor.training_backend` has it; checkpoints carry it."""

    module: nn.Module

    def __init__(self, cfg: Any, worker: Worker) -> None:
        self.cfg, self.worker = cfg, worker
        self.rank, self.ranks = worker.rank, worker.world_size
        self.device = torch.device(torch_device(worker.accelerators))
        self.dtype = compute_dtype(cfg.actor.model)
        self.lora_rank = int(cfg.actor.lora.rank)
        self.clip_grad = float(cfg.actor.optim.clip_grad) if cfg.actor.optim.clip_grad is not None else 0.0
        self._reference: nn.Module | None = None
        self._model_files: dict[str, bytes] | None = None

    # -- for subclasses -------------------------------------------------------------------------------------------

    def load_module(self, *, empty: bool = False) -> Any:
        """The model of `actor.model` on the host, the same on every rank, with adapters where `actor.lora` asks for
        them. Trainable weights are in float32; frozen ones in the dtype of the computation."""
        actor = self.cfg.actor
        model = load_causal_lm(
            actor.model,
            dtype=self.dtype if self.lora_rank else torch.float32,
            checkpointing=bool(actor.model.gradient_checkpointing),
            empty=empty,
        )
        return lora.attach_lora(model, actor.lora, seed=int(self.cfg.runner.seed)) if self.lora_rank else model

    def load_reference(self, *, empty: bool = False) -> Any:
        """The frozen model of before training, on the host, in the dtype of the computation."""
        module = load_causal_lm(self.cfg.actor.model, dtype=self.dtype, empty=empty)
        return module.eval().requires_grad_(False)

    def prepare_reference(self) -> None:
        """Loads the reference policy now if the run will want it; constructors end with this."""
        if (
            float(OmegaConf.select(self.cfg, "algorithm.kl_coef") or 0.0) != 0.0
            and not self.lora_rank
            and self._reference is None
        ):
            self._reference = self._make_reference()

    def _make_reference(self) -> nn.Module:
        """The frozen second model, ready to be called."""
        raise NotImplementedError

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulates the gradient of one micro-batch; `last` of this call's."""
        raise NotImplementedError

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a weight of which this rank may hold a part; all ranks call it for the same ones."""
        return tensor

    def offload(self) -> None:
        """Moves everything to the host, to give the accelerator to another role."""
        raise NotImplementedError

    def reload(self) -> None:
        """Inverse of `offload`."""
        raise NotImplementedError

    @property
    def away(self) -> bool:
        """Whether the weights are where nothing can be done with them but `reload`."""
        return False

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Takes back what `offload` gave away, and gives it away again at the end. Checkpoints and weights are asked for
        while another role is about to take the accelerator."""
        if not self.away:
            yield
            return
        self.reload()
        try:
            yield
        finally:
            self.offload()

    @property
    def called(self) -> nn.Module:
        """What a batch is given to: the module, or what a subclass puts in front of it."""
        return self.module

    # -- the contract ---------------------------------------------------------------------------------------------

    @property
    def parameters_trained(self) -> int:
        """Trainable parameters, over all ranks."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def forward(self, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool = False) -> TokenScores:
        """Scores without gradients, in evaluation mode."""
        self.module.eval()
        with torch.no_grad(), explained_out_of_memory():
            return token_scores(self.called, self._on_device(batch), temperature, entropy)

    def reference(self, batch: TokenBatch, *, temperature: float = 1.0) -> TokenScores:
        """Scores of the reference policy; with LoRA the model without its adapters."""
        if self.lora_rank:
            with lora.adapters_off(self.module):
                return self.forward(batch, temperature=temperature)
        if self._reference is None:
            self._reference = self._make_reference()
        with torch.no_grad(), explained_out_of_memory():
            return token_scores(self._reference, self._on_device(batch), temperature)

    def forward_backward(
        self,
        micro_batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> list[dict[str, torch.Tensor]]:
        """Accumulates gradients over the rank's micro-batches; their metrics, detached."""
        self.module.train()
        metrics = []
        with explained_out_of_memory():
            for number, given in enumerate(micro_batches):
                batch = self._on_device(given)
                scores = token_scores(self.called, batch, temperature, entropy)
                value, measured = loss(scores, batch)
                if not value.requires_grad:  # an empty batch: its backward pass still has to meet the other ranks'
                    value = value + 0.0 * scores.logprobs.sum()
                self._backward(value, last=number == len(micro_batches) - 1)
                metrics.append({key: each.detach() for key, each in measured.items()})
        return metrics

    def named_weights(self, without: Container[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights in full, in the dtype of the computation, by their Hugging Face names, LoRA merged; tied ones
        once, under the name that comes first; those in `without` not at all."""
        with self.awake():
            for name, tensor in lora.full_weights(self.module, self._full, without):
                yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def frozen_names(self) -> frozenset[str]:
        """Names of those that never change: not trained, and nothing merged into them."""
        return lora.frozen_names(self.module)

    def export(self, folder: Path, *, adapter_only: bool = False) -> None:
        """Writes a Hugging Face folder; rank 0 writes, all ranks call.

        Raises:
            ConfigError: `adapter_only` without LoRA.
        """
        folder = Path(folder)
        if adapter_only and not self.lora_rank:
            raise ConfigError("only an adapter was asked for, but actor.lora.rank is 0: there is none")
        with self.awake():
            if adapter_only:
                weights = lora.adapter_weights(self.module, self._full)
                if self.rank == 0:
                    lora.export_adapter(folder, weights, self.module, self.cfg.actor.model)
            elif self.rank == 0:
                named = ((name, tensor.cpu()) for name, tensor in self.named_weights())
                export_model(folder, named, self.cfg.actor.model, self.dtype)
            else:
                for _ in self.named_weights():  # takes part in the gathering
                    pass
        self.worker.barrier()

    def held_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank holds of the weights, in whatever dtype: its shards, where they are sharded."""
        with self.awake():
            for name, parameter in self.module.named_parameters():
                held = getattr(parameter, "ds_tensor", parameter.detach())  # DeepSpeed's ZeRO-3, and then DTensor
                yield name, getattr(held, "_local_tensor", held)

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _on_device(self, batch: TokenBatch) -> TokenBatch:
        if self.device.type == "cpu":
            return batch

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, non_blocking=True)

        fields = {name: move(tensor) for name, tensor in batch.fields.items()}
        return TokenBatch(move(batch.input_ids), move(batch.attention_mask), fields)

    def write_identity(self, folder: Path) -> None:
        """Notes, on rank 0, what made the checkpoint, and what conversion needs besides the weights."""
        if self.rank != 0:
            return
        actor = self.cfg.actor
        about = {
            "model_path": str(actor.model.model_path),
            "trust_remote_code": bool(actor.model.trust_remote_code),
            "dtype": str(actor.model.dtype),
            "lora": plain(actor.lora),
        }
        text = json.dumps({**self._identity(), "about": about}, indent=2, sort_keys=True)
        write_durably(folder / IDENTITY, text.encode() + b"\n")
        if self._model_files is None:
            self._model_files = model_files(self.module, actor.model)
        (folder / FOLDER).mkdir(exist_ok=True)
        for name, data in self._model_files.items():
            write_durably(folder / FOLDER / name, data)
        fsync_folder(folder / FOLDER)

    def check_identity(self, folder: Path) -> None:
        """Refuses a checkpoint of another backend or model.

        Raises:
            CheckpointError: Names what differs.
        """
        path = Path(folder) / IDENTITY
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a language model's checkpoint ({error})") from error
        for key, expected in self._identity().items():
            if found.get(key) != expected:
                raise CheckpointError(
                    f"{folder}: the checkpoint has {key} {found.get(key)!r}, this configuration {expected!r}"
                )

    def _identity(self) -> dict[str, Any]:
        return {
            "actor.training_backend": self.name,
            "actor.lora.rank": self.lora_rank,
            "trainable parameters": self.parameters_trained,
        }


@contextlib.contextmanager
def explained_out_of_memory() -> Iterator[None]:
    """Turns an allocation that failed into a message that names the knobs.

    Raises:
        ConfigError: Memory was exhausted.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        exhausted = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
        if not exhausted:
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            "out of memory in a forward or backward pass: lower actor.max_tokens_per_micro_batch, set "
            "actor.model.gradient_checkpointing=true, or with actor.training_backend=fsdp set "
            f"actor.fsdp.cpu_offload=true, with deepspeed actor.deepspeed.cpu_offload=true ({reason})"
        ) from error
