"""Blueprints and trainers of language models: forward and backward passes over token batches on any training backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.config.parallel import splits_sums
from rlhpc.config.typed import plain
from rlhpc.language.engines.exact import use_exactness
from rlhpc.language.models.context_parallel import RowShare
from rlhpc.language.models.loading import (
    FOLDER,
    compute_dtype,
    embedding_and_head,
    export_adapter,
    export_model,
    hidden_size,
    load_causal_lm,
    model_file,
    model_files,
    pretrained_in,
    use_liger_kernels,
)
from rlhpc.language.models.logprobs import LogitReading, TokenScores, token_scores
from rlhpc.language.models.moe_routing import load_balance_loss, replayed_experts, routing_of
from rlhpc.language.models.packing import mask_windows, pack, packs, reads_prefixes, reads_rows, unpack
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.models.value_head import (
    HEAD,
    VALUE_HEAD,
    add_value_head,
    is_classifier,
    load_scalar_model,
    new_head,
    token_values,
)
from rlhpc.language.models.vision import always_run_vision, freeze_vision, tower_of
from rlhpc.language.multi_policy import ONE, Policies, policy_tensor_name
from rlhpc.runtime.devices import torch_device
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import fsync_folder, write_durably
from rlhpc.training import lora
from rlhpc.training.backend import Full, Metrics, Named, TrainingRanks
from rlhpc.training.blueprint import Blueprint, compile_layers, disable_dropout
from rlhpc.training.registry import make_backend
from rlhpc.training.safetensors_reader import Slices
from rlhpc.training.safetensors_writer import Layout
from rlhpc.training.shard_layout import names_and_shapes, pieces
from rlhpc.training.tensor_parallel import divide, expert_modules
from rlhpc.weights.reshard import Shard

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageActorConfig, TrainedLanguageConfig
    from rlhpc.training.mesh import Mesh

log = logging.getLogger(__name__)


class LanguageBlueprint(Blueprint):
    """Causal model of `actor.model`, with the adapters of `actor.lora`.

    Args:
        cfg: The configuration.
        device: Device of the computation.
        has_reference: Whether to also build the reference, which has the weights from before training.
        has_values: Whether the model gets a value head. Engines and exported policies do not get the value head.
        policies: Names of several policies, each an adapter of this model.
        has_dropout: Whether to train with the dropout rates of the model's configuration and of `actor.lora`. RL trains
            without dropout, because dropout in the update would change the importance ratio of an unchanged policy from 1.

    Attributes:
        head: Name of a layer that is trained in addition to adapters, if the model has one.
        packed: Whether the models read packed rows of several samples; `build` sets False if the model cannot.
        exact: Whether the trained model computes with the bits of engine hf (`runner.deterministic`).
    """

    head: str | None = None
    dropout = exact = False

    identity_file = "backend.json"
    knobs = "lower actor.max_tokens_per_micro_batch"

    def __init__(
        self,
        cfg: TrainedLanguageConfig,
        device: str,
        *,
        has_reference: bool = False,
        has_values: bool = False,
        policies: tuple[str, ...] = (),
        has_dropout: bool = False,
    ) -> None:
        self.policies = policies
        self._set_section(cfg.actor, cfg.runner.seed, device)
        # Ranks that divide a model add up parts of sums, so that only a bound remains (`GrpoActor`).
        self.exact = bool(getattr(cfg.runner, "deterministic", False)) and not splits_sums(cfg.actor.parallel)
        self.dropout = has_dropout
        self._reference = has_reference
        if has_values:
            self.head = VALUE_HEAD
            self._value_head_prefix = f"{VALUE_HEAD}."

    def _set_section(self, section: LanguageActorConfig, seed: int, device: str, key: str = "actor") -> None:
        self.actor = section
        self.seed = seed
        self.key = key
        self.device = device
        self.dtype = compute_dtype(section.model, device, f"{key}.model")
        self.lora_rank = section.lora.rank
        self.gather_dtype = None if self.lora_rank else self.dtype  # adapters are merged in float32
        self.packed = section.use_remove_padding
        self._reference = False
        self._value_head_prefix = ""
        self._files: dict[str, bytes] | None = None

    def load(self, model: Any, **options: Any) -> Any:
        """Loads the causal language model (`load_causal_lm`)."""
        return load_causal_lm(model, **options)

    def _load_with_kernels(self, **options: Any) -> Any:
        """Loads the model of the section with the section's kernels."""
        module = self.load(self.actor.model, **options)
        if self.actor.kernels == "liger":
            use_liger_kernels(module, self.device, f"{self.key}.kernels")
        return module

    def build(self, *, empty: bool = False) -> nn.Module:
        """Builds the model in float32 or, with adapters, in the dtype of the computation (`Blueprint.build`)."""
        actor = self.actor
        model = self._load_with_kernels(
            dtype=self.dtype if self.lora_rank else torch.float32,
            recompute_activations=actor.model.gradient_checkpointing,
            empty=empty,
        )
        if self.packed and not pack(model):
            log.info("%s reads rectangles, with padding", type(model).__name__)
            self.packed = False
        if self.exact:
            use_exactness(model, torch.device(self.device), is_packed=self.packed)
        if actor.model.freeze_vision:
            freeze_vision(model, self.key)
        if self._value_head_prefix:
            add_value_head(model, self.seed)
        if self.lora_rank:
            names, has_lm_head = self.policies, bool(self._value_head_prefix)
            model = lora.attach_lora(
                model, actor.lora, seed=self.seed, head=self.head, has_lm_head=has_lm_head, names=names
            )
        if not self.dropout and disable_dropout(model):
            log.info("%s: dropout is off, so that log-probs of rollout and update are those of one model", self.key)
        return model

    def divide(self, module: nn.Module, mesh: Mesh) -> None:
        """Divides the model by transformers' tensor-parallel plans, and rows by context parallelism (`Blueprint.divide`)."""
        model = pretrained_in(module)
        if tower_of(model) is not None:
            always_run_vision(model)  # on all ranks, even if their batch has no images
        if mesh.sizes.context > 1 and not self.packed:
            raise ConfigError(
                f"{self.key}.parallel.context({mesh.sizes.context}) shares out rows without padding, which "
                f"{type(model).__name__} does not read here: it needs {self.key}.use_remove_padding=true, "
                f"{self.key}.model.attn_implementation=sdpa, and a model whose tokens meet in causal attention alone"
            )
        if not mesh.sizes.plain:
            divide(model, mesh, f"{self.key}.parallel")

    def layers(self, module: nn.Module) -> list[nn.Module]:
        """Returns the layers, then embeddings and LM head unless these are tied (`Blueprint.layers`)."""
        return [*super().layers(module), *embedding_and_head(module)]

    def decoder_layers(self, module: nn.Module) -> list[nn.Module]:
        """Returns the transformer layers of the language model, without those of a vision tower."""
        vision_layers = {id(layer) for layer in self.modules_without_cast(module)}
        return [layer for layer in super().layers(module) if id(layer) not in vision_layers]

    def last_layer(self, module: nn.Module) -> nn.Module | None:
        """Returns the LM head, or None if it is tied to the embeddings (`Blueprint.last_layer`)."""
        edge_modules = embedding_and_head(module)
        return edge_modules[-1] if edge_modules else None

    def modules_without_cast(self, module: nn.Module) -> list[nn.Module]:
        """Returns the vision layers, whose rotary position angles stay in float32 (`Blueprint.modules_without_cast`)."""
        tower = tower_of(pretrained_in(module))
        return [] if tower is None else [*tower.blocks]

    def expert_modules(self, module: nn.Module) -> list[nn.Module]:
        """Returns the expert modules (`Blueprint.expert_modules`)."""
        return expert_modules(pretrained_in(module))

    def slices(self) -> Slices | None:
        """Returns a reader of slices of the safetensors files of `model_path` (`Blueprint.slices`)."""
        return Slices.from_model(partial(model_file, str(self.actor.model.model_path)))

    def is_exported(self, name: str) -> bool:
        """Returns whether a weight is exported, which is false for the value head (`Blueprint.is_exported`)."""
        return not (self._value_head_prefix and name.startswith(self._value_head_prefix))

    def created_tensors(self, module: nn.Module) -> Named:
        """Yields the initial weights of the adapters and of the value head (`Blueprint.created_tensors`)."""
        if self.lora_rank:
            yield from lora.initial_adapters(module, self.seed)
        if self._value_head_prefix:
            yield from new_head(module, VALUE_HEAD, self.seed)

    @property
    def has_reference(self) -> bool:
        """True if a separate model is built; with adapters, the reference is the model without (`Blueprint.has_reference`)."""
        return self._reference and not self.lora_rank

    def build_reference(self, *, empty: bool = False) -> nn.Module:
        """Builds the frozen reference (`Blueprint.build_reference`)."""
        module: nn.Module = self._load_with_kernels(dtype=self.dtype, empty=empty)
        if self.packed:
            pack(module)
        return module.eval().requires_grad_(False)

    def identity(self) -> dict[str, Any]:
        """Returns the settings that a checkpoint and the run must share (`Blueprint.identity`)."""
        has_head = bool(self._value_head_prefix)
        settings: dict[str, Any] = {"actor.lora.rank": self.lora_rank, "actor.model.value_head": has_head}
        if self.lora_rank:  # alpha scales the adapters' product
            settings["actor.lora.alpha"] = self.actor.lora.alpha
        if self.policies:
            settings["agent.policies"] = list(self.policies)
        return settings

    def recorded_facts(self, module: nn.Module) -> dict[str, Any]:
        """Returns the facts that an export of the checkpoint needs (`Blueprint.recorded_facts`).

        `frozen` lists the untrained parameters, which a checkpoint does not contain. With adapters the list is empty, because
        all other parameters are frozen.
        """
        model = self.actor.model
        return {
            "model_path": str(model.model_path),
            "trust_remote_code": model.trust_remote_code,
            "dtype": str(self.dtype).removeprefix("torch."),
            "lora": plain(self.actor.lora),
            "frozen": [] if self.lora_rank else sorted(lora.frozen_names(module)),
        }

    def write_extra_files(self, folder: Path, module: nn.Module) -> None:
        """Writes the model's config, tokenizer and code into the checkpoint (`Blueprint.write_extra_files`)."""
        if self._files is None:
            self._files = model_files(module, self.actor.model)
        (folder / FOLDER).mkdir(exist_ok=True)
        for name, content in self._files.items():
            write_durably(folder / FOLDER / name, content)
        fsync_folder(folder / FOLDER)

    def named_weights(self, module: nn.Module, gather_full: Full, excluded_names: Container[str] = ()) -> Named:
        """Yields the weights by their Hugging Face names, in the dtype of the computation, with LoRA merged. Tied weights come
        once, under their first name (`Blueprint.named_weights`)."""
        for name, tensor in lora.full_weights(module, gather_full, excluded_names):
            if self.is_exported(name):
                yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        """Returns the names of weights that are neither trained nor merged with adapters (`Blueprint.frozen_names`)."""
        return lora.frozen_names(module)


class ScalarBlueprint(LanguageBlueprint):
    """Blueprint of a model with one output per token (`load_scalar_model`): a reward model or a critic.

    Args:
        section: Section `actor` of the configuration, or another section with the same keys.
        seed: Seed of a new head and of adapters.
        device: Device of the computation.
        key: Name of the section in messages.
        has_dropout: See `LanguageBlueprint`.
    """

    head = HEAD

    def __init__(
        self, section: LanguageActorConfig, seed: int, device: str, *, key: str = "actor", has_dropout: bool = False
    ) -> None:
        self._set_section(section, seed, device, key)
        self.dropout = has_dropout

    def load(self, model: Any, **options: Any) -> Any:
        """Loads the model with one output per token (`load_scalar_model`)."""
        return load_scalar_model(model, seed=self.seed, key=f"{self.key}.model.model_path", **options)

    def created_tensors(self, module: nn.Module) -> Named:
        """Yields the initial weights of adapters, and of the head if the model has none (`Blueprint.created_tensors`)."""
        yield from super().created_tensors(module)
        if not is_classifier(self.actor.model, f"{self.key}.model.model_path"):
            yield from new_head(module, HEAD, self.seed)

    def identity(self) -> dict[str, Any]:
        """Returns the settings that a checkpoint and the run must share, with the name of the head (`Blueprint.identity`)."""
        return {**super().identity(), "head": self.head}


LossFunction = Callable[[TokenScores, TokenBatch], tuple[torch.Tensor, Metrics]]
ValueLoss = Callable[[torch.Tensor, TokenBatch], tuple[torch.Tensor, Metrics]]


class ModelTrainer:
    """Trainer of a language model on a backend of `rlhpc.training`. All ranks call the same methods in the same order.

    Args:
        blueprint: Blueprint of the trained model.
        section: Section `actor` of the configuration, or another section with the same keys.
        worker: Worker of this rank.

    Attributes:
        backend: Training backend that holds the model.
        packed, shares_prefixes: Whether the model reads packed rows of several samples, and a prefix that they share once.
        hidden: Hidden size of the model.
        share: This rank's share of rows in context parallelism; None if there is no context parallelism.
        replays: Whether routers replay the expert choices recorded in a batch.

    Raises:
        ConfigError: The configuration does not fit the model's routers, attention or parallelism.
    """

    replays = False

    def __init__(self, blueprint: LanguageBlueprint, section: LanguageActorConfig, worker: TrainingRanks) -> None:
        self.blueprint = blueprint
        self.backend = make_backend(blueprint, section, worker)
        self.actor = section
        self.worker = worker
        self.routing = routing_of(self.backend.module)
        self._router_loss_coef = section.model.router_aux_loss_coef
        if self._router_loss_coef and self.routing is None:
            raise ConfigError(
                f"{blueprint.key}.model.router_aux_loss_coef is {self._router_loss_coef}, but the model has no "
                "routers that transformers knows: set it to 0"
            )
        self.hidden = hidden_size(self.backend.module)
        self.share = RowShare.from_mesh(self.backend.mesh)
        check_rows = partial(reads_rows, dtype=blueprint.dtype, share=self.share)
        self.packed = packs(self.backend.module) and self.backend.evaluate(check_rows, self.device)
        if self.share is not None and not self.packed:
            raise ConfigError(
                f"{blueprint.key}.parallel.context({self.share.size}): the model says something else of a sample in a row "
                "than of the sample alone; set it to 1"
            )
        if blueprint.packed and not self.packed:
            blueprint.packed = False  # also for a reference that is built later
            for model in self.backend.models:
                unpack(model)
        obstacles = {"parallel.context": self.share, "compile": section.compile != "off", "dropout": blueprint.dropout}
        check_prefixes = partial(reads_prefixes, dtype=blueprint.dtype, obstacles=[*filter(obstacles.get, obstacles)])
        can_share = section.share_prefixes and self.packed and not blueprint.exact
        self.shares_prefixes = can_share and self.backend.evaluate(check_prefixes, self.device)
        if section.compile == "blocks":
            key = f"{blueprint.key}.compile"
            if self.routing is not None:  # what experts compute depends on the values of tensors
                raise ConfigError(f"{key}=blocks is for models without experts: set it to off")
            for model in self.backend.models:
                mask_windows(model)
                layers, is_padded = blueprint.decoder_layers(model), not self.packed
                compile_layers(model, layers, key, has_variable_batch=is_padded, has_dropout=blueprint.dropout)

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self.backend.device

    @property
    def num_trained_parameters(self) -> int:
        """Number of trained parameters over all ranks."""
        return self.backend.num_trained_parameters

    def optimizer_step(self, lr: float) -> float:
        """Clips the gradients, updates the weights if the gradient norm is finite, and returns the norm before clipping."""
        return float(self.backend.optimizer_step(lr))

    # -- weights --------------------------------------------------------------------------------------------------

    def named_weights(self, excluded_names: Container[str] = ()) -> Named:
        """Yields full weights for a rollout engine, by their Hugging Face names, with LoRA merged.

        With several policies, the shared weights come once, and each policy's other weights under names by
        `policy_tensor_name`. All ranks iterate. The caller may drop a tensor before requesting the next one.

        Args:
            excluded_names: Names of weights to omit.
        """
        if not self.blueprint.policies:
            yield from self.backend.named_weights(excluded_names)
            return
        frozen_names = self.frozen_names()
        for policy in self.blueprint.policies:
            lora.choose(self.backend.module, policy)
            for name, tensor in self.backend.named_weights(excluded_names):
                yield name if name in frozen_names else policy_tensor_name(policy, name), tensor
            excluded_names = frozen_names

    def adapters(self) -> dict[str, torch.Tensor]:
        """Returns the weights of the adapters by their names in peft's files; all ranks call this method.

        With several policies, the names are prefixed by `policy_tensor_name`.
        """
        tensors = dict[str, torch.Tensor]()
        for policy in self.blueprint.policies or ("",):
            if policy:
                lora.choose(self.backend.module, policy)
            adapter_weights = lora.adapter_weights(self.backend.module, self.backend.full)
            tensors |= {
                policy_tensor_name(policy, name) if policy else name: tensor
                for name, tensor in adapter_weights.items()
                if ".lora_" in name
            }
        return tensors

    def shards(self, dtype: torch.dtype | None) -> list[Shard]:
        """Returns this rank's shards of the weights, with adapters merged, for engines that receive shards.

        All ranks call this method, because adapters are gathered.

        Args:
            dtype: Dtype of the sent weights; None for the dtype of the computation.
        """
        backend, float_dtype = self.backend, dtype or self.blueprint.dtype
        shards = pieces(backend.module, backend.mesh, backend.full, is_included=self.blueprint.is_exported)
        return [
            Shard(
                piece.name, piece.shape, float_dtype if piece.dtype.is_floating_point else piece.dtype, piece.tensor_slice,
                local_values, piece.frozen,
            )
            for piece, local_values in shards
        ]  # fmt: skip

    def frozen_names(self) -> frozenset[str]:
        """Returns the names of the weights that never change."""
        return self.backend.frozen_names()

    def local_tensors(self) -> Named:
        """Yields the names and values of the weights that this rank holds."""
        return self.backend.local_tensors()

    def keep_on_device(self) -> AbstractContextManager[None]:
        """Reloads offloaded tensors for the duration of the block (`TrainingBackend.keep_on_device`)."""
        return self.backend.keep_on_device()

    def save(self, folder: Path) -> None:
        """Writes model and optimizer durably below `folder`; each rank writes its part."""
        self.backend.save(folder)

    def load(self, folder: Path) -> None:
        """Restores a checkpoint of any world size.

        Raises:
            CheckpointError: The checkpoint is of a different model or backend.
        """
        self.backend.load(folder)

    def export(self, folder: Path, *, adapter_only: bool = False) -> None:
        """Writes a Hugging Face folder (safetensors, config, tokenizer), with LoRA merged unless `adapter_only`.

        All ranks call this method. With a device mesh, each rank writes its part of the weights; otherwise rank 0 writes all.

        Raises:
            ConfigError: `adapter_only` without LoRA.
        """
        folder, backend, model = Path(folder), self.backend, self.actor.model
        if adapter_only and not self.blueprint.lora_rank:
            raise ConfigError("only an adapter was asked for, but actor.lora.rank is 0: there is none")
        with backend.keep_on_device():
            if adapter_only:
                weights = lora.adapter_weights(backend.module, backend.full)
                if self.worker.rank == 0:
                    export_adapter(folder, weights, backend.module, model)
            elif backend.mesh is not None:
                self._export_parts(folder)
            elif self.worker.rank == 0:
                host_weights = ((name, tensor.cpu()) for name, tensor in self.named_weights())
                export_model(folder, host_weights, model, backend.dtype, self.blueprint.load)
            elif backend.lockstep:
                for _ in self.named_weights():  # takes part in the gather
                    pass
        self.worker.barrier()

    def _export_parts(self, folder: Path) -> None:
        backend, blueprint = self.backend, self.blueprint
        tensors = names_and_shapes(backend.module, blueprint.is_exported)
        layout = Layout(
            {
                name: (shape, backend.dtype if dtype.is_floating_point else dtype)
                for name, (shape, dtype) in tensors.items()
            }
        )
        if self.worker.rank == 0:
            layout.begin(folder)
            for name, content in model_files(backend.module, self.actor.model, backend.dtype).items():
                write_durably(folder / name, content)
        self.worker.barrier()
        local_slices = ((s.name, s.tensor_slice, tensor) for s, tensor in backend.pieces(by_rows=True) if s.copy == 0)
        layout.write(folder, local_slices)
        self.worker.barrier()
        if self.worker.rank == 0:
            layout.finish(folder)

    def _forward_backward(
        self,
        micro_batches: Sequence[TokenBatch],
        run_pass: Callable[[nn.Module, TokenBatch], tuple[torch.Tensor, Metrics]],
    ) -> list[Metrics]:
        """Runs the backend's `forward_backward` with the routers' load balancing loss added to the loss.

        The load balancing loss is a mean over the tokens of all micro-batches.
        """
        if self.routing is None:
            return self.backend.forward_backward(micro_batches, run_pass)
        routing, num_tokens = self.routing, torch.tensor(float(sum(batch.tokens for batch in micro_batches)))
        if self.worker.world_size > 1:
            num_tokens = self.worker.all_reduce(num_tokens)
        num_local_tokens = max(1.0, float(num_tokens) / self.backend.sizes.block)

        def run_with_routing(module: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
            self._set_routing_replay(batch)
            with routing.watch() as routings:
                loss, metrics = run_pass(module, batch)
            balance_loss, max_load = (
                mean * (batch.tokens / num_local_tokens)
                for mean in load_balance_loss(routings, batch.read_by(self.packed), self.share)
            )
            if self._router_loss_coef:
                loss = loss + self._router_loss_coef * balance_loss
            return loss, {**metrics, "router_loss": balance_loss.detach(), "router_load_max": max_load}

        try:
            return self.backend.forward_backward(micro_batches, run_with_routing)
        finally:
            routing.replay(None)

    def _set_routing_replay(self, batch: TokenBatch) -> None:
        """Makes the routers use the batch's recorded expert choices until the next call."""
        if self.routing is not None and self.replays:
            routing = replayed_experts(batch.read_by(self.packed), self.share)
            self.routing.replay(None if routing is None else routing.to(self.backend.device))

    def offload(self) -> None:
        """Moves all tensors to the host, which frees the accelerator for another group."""
        self.backend.offload()

    def reload(self) -> None:
        """Moves the tensors back to the accelerator after `offload`."""
        self.backend.reload()


class TokenTrainer(ModelTrainer):
    """Trainer of the causal model of section `actor`; a batch's outputs are token scores.

    Args:
        cfg: The configuration.
        worker: Worker of this rank.
        has_reference: Whether `has_reference` will be called.
        has_values: Whether the model also has a value head.
        policies: Policies by role.
        has_dropout: Whether the model is trained with dropout (`LanguageBlueprint`).
    """

    replays = True

    def __init__(
        self,
        cfg: TrainedLanguageConfig,
        worker: TrainingRanks,
        *,
        has_reference: bool = False,
        has_values: bool = False,
        policies: Policies = ONE,
        has_dropout: bool = False,
    ) -> None:
        device, names = torch_device(worker.accelerators), policies.names
        blueprint = LanguageBlueprint(
            cfg, device, has_reference=has_reference, has_values=has_values, policies=names, has_dropout=has_dropout
        )
        super().__init__(blueprint, cfg.actor, worker)
        self.policies = policies

    def forward(self, batch: TokenBatch, *, temperature: float = 1.0, compute_entropy: bool = False) -> TokenScores:
        """Returns the token scores of a batch, without gradients, in evaluation mode."""
        try:
            self._set_routing_replay(batch)
            self._activate_adapter(batch)
            return self.backend.evaluate(self._scores(temperature, compute_entropy), batch.to(self.backend.device))
        finally:
            if self.routing is not None:
                self.routing.replay(None)

    def reference(self, batch: TokenBatch, *, temperature: float = 1.0) -> TokenScores:
        """Returns the token scores of the reference policy, which has the weights from before training.

        With LoRA, the reference policy is the model without adapters.
        """
        if self.blueprint.lora_rank:
            with lora.adapters_off(self.backend.module):
                return self.backend.evaluate(self._scores(temperature), batch.to(self.backend.device))
        return self.backend.evaluate_reference(self._scores(temperature), batch.to(self.backend.device))

    def forward_backward(
        self,
        micro_batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        compute_entropy: bool = False,
        reading: LogitReading | None = None,
    ) -> list[Metrics]:
        """Accumulates gradients over the rank's micro-batches; returns the detached metrics of each.

        All ranks pass the same number of micro-batches, padded with micro-batches without trained tokens. See
        `TrainingBackend.forward_backward`.
        """
        scores_of = self._scores(temperature, compute_entropy, reading)

        def run(module: nn.Module, host_batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
            self._activate_adapter(host_batch)
            batch = host_batch.to(self.backend.device)
            scores = scores_of(module, batch)
            loss_value, metrics = loss(scores, batch)
            if not loss_value.requires_grad:  # an empty batch still takes part in the backward pass of all ranks
                loss_value = loss_value + 0.0 * scores.logprobs.sum()
            return loss_value, metrics

        return self._forward_backward(micro_batches, run)

    def _activate_adapter(self, batch: TokenBatch) -> None:
        """Activates the adapter of the policy that all samples of a batch share.

        The adapter stays active until the next call. The batch is on the host, so that nothing waits for the device.
        """
        if self.policies.names:
            (policy,) = self.policies.indices_of(batch.role).unique().tolist()
            lora.choose(self.backend.module, self.policies.names[policy])

    def _scores(
        self, temperature: float, compute_entropy: bool = False, reading: LogitReading | None = None
    ) -> Callable[[nn.Module, TokenBatch], TokenScores]:
        def scores(module: nn.Module, batch: TokenBatch) -> TokenScores:
            return token_scores(module, batch, temperature, compute_entropy, reading, self.share)

        return scores


class ScalarTrainer(ModelTrainer):
    """Trainer of a model with one output per token: a reward model or a critic.

    Args:
        section: Section `actor` of the configuration, or another section with the same keys.
        worker: Worker of this rank.
        seed: Seed of a new head and of adapters.
        key: Name of the section in messages.
        per_input: Whether a token gets the value of the state before the token (`token_values`), as a critic needs.
    """

    def __init__(
        self,
        section: LanguageActorConfig,
        worker: TrainingRanks,
        *,
        seed: int,
        key: str = "actor",
        per_input: bool = False,
    ) -> None:
        device = torch_device(worker.accelerators)
        # a critic trains without dropout, because its values are compared
        blueprint = ScalarBlueprint(section, seed, device, key=key, has_dropout=not per_input)
        super().__init__(blueprint, section, worker)
        self.per_input = per_input

    def _values(self, module: nn.Module, batch: TokenBatch) -> torch.Tensor:
        return token_values(module, batch, per_input=self.per_input, share=self.share)

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """Returns the value of each token, `[T]`, without gradients, in evaluation mode."""
        return self.backend.evaluate(self._values, batch.to(self.backend.device))

    def forward_backward(self, micro_batches: Sequence[TokenBatch], loss: ValueLoss) -> list[Metrics]:
        """Accumulates gradients over the rank's micro-batches; returns the detached metrics of each.

        Args:
            micro_batches: Micro-batches, the same number on all ranks, padded with `TokenBatch.empty_sample`.
            loss: Function from `[T]` values and the micro-batch to the rank's part of the loss, and metrics.
        """

        def run(module: nn.Module, host_batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
            batch = host_batch.to(self.backend.device)
            predictions = self._values(module, batch)
            loss_value, metrics = loss(predictions, batch)
            # An empty batch still takes part in the backward pass of all ranks.
            return loss_value if loss_value.requires_grad else loss_value + 0.0 * predictions.sum(), metrics

        return self._forward_backward(micro_batches, run)
