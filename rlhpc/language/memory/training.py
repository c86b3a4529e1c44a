"""What a rank holds that trains a language model, by training backend: at the loss, in the backward pass, and at the step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from rlhpc.config.parallel import Sizes
from rlhpc.language.memory.head import head_gradient, loss_chunk
from rlhpc.language.memory.layers import Layers
from rlhpc.language.memory.model import ModelSize
from rlhpc.language.memory.process import process
from rlhpc.runs.memory.account import Moment, Term, terms

#: Elements that ZeRO-3 keeps gathered at most, and of its buffer of gradients (DeepSpeed's defaults).
LIVE, BUCKET = 10**9, 5 * 10**8
#: An epoch's tensors of a few bytes a token: ids, positions, log-probs, advantages and the like.
_BATCH = 96.0
LOSS, BACKWARD, REDUCTION, STEP = "loss", "backward pass", "gradients of the embeddings", "optimizer step"


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        size: The model.
        backend: `local`, `fsdp` or `deepspeed`.
        sizes: How ranks divide it.
        tokens: Of a micro-batch.
        itemsize: Bytes of a number in the computation.
        accelerated: Whether on an accelerator.
        lora: Rank of adapters; 0 trains all weights.
        policies: Policies, each with adapters of its own (`agent.policies`).
        targets: `lora.target_modules`.
        checkpointing: Whether activations are recomputed.
        offload: Whether weights, gradients and optimizer are on the host between uses (`fsdp.cpu_offload`), or what DeepSpeed
            offloads.
        reshard: `fsdp.reshard_after_forward`.
        stage: Of ZeRO.
        reference: Whether a frozen copy of the model is there, too.
        beside: Bytes of other frozen models on the rank, such as a teacher.
        logits: Whether the loss is of logits; else of one number a token.
        head: Whether the model has the causal model's head.
        edges_apart: Whether FSDP gathers embeddings and head each by itself, where they are two matrices.
        eager: See `Layers.eager`.
    """

    size: ModelSize
    backend: str
    sizes: Sizes
    tokens: int
    itemsize: int
    accelerated: bool
    lora: int = 0
    targets: object = "all-linear"
    checkpointing: bool = False
    offload: bool = False
    reshard: bool = True
    stage: int = 2
    reference: bool = False
    beside: float = 0.0
    policies: int = 1
    logits: bool = True
    head: bool = True
    edges_apart: bool = False
    eager: int = 0

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self.sizes.ranks

    @property
    def mixed(self) -> bool:
        """Whether it computes in another precision than weights are trained in."""
        return self.itemsize != 4

    def adapters(self) -> int:
        """Elements of all adapters."""
        return (
            self.policies * sum(self.lora * (out + given) for out, given in self.size.adapted(self.targets).values())
            if self.lora
            else 0
        )

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.adapters() if self.lora else self.size.parameters - self._headless

    @property
    def _headless(self) -> int:
        """Parameters that the causal model has and this one has not."""
        return 0 if self.head or self.size.tied else self.size.embedding

    @property
    def frozen(self) -> int:
        """Parameters that are not, without the reference's."""
        return self.size.parameters - self._headless if self.lora else 0

    def part(self) -> float:
        """Which part of the model a rank keeps between uses. Experts are divided in another order, by as many ranks."""
        s = self.sizes
        return {"local": 1.0, "fsdp": 1.0 / (s.shard * s.context * s.tensor), "deepspeed": 1.0 / self.ranks}[
            self.backend
        ]

    def layers(self) -> Layers:
        """The layers, as activations depend on them."""
        adapted = {name.rpartition(".")[2] for name in self.size.adapted(self.targets)} if self.lora else None
        return Layers(self.size, self.itemsize, not self.accelerated, adapted, self.sizes.tensor, self.eager)

    # -- activations ------------------------------------------------------------------------------------------------

    @property
    def own_tokens(self) -> int:
        """Of a micro-batch, those that a rank has."""
        return math.ceil(self.tokens / self.sizes.context)

    def kept(self) -> float:
        """What the forward pass keeps of all layers."""
        layers = self.layers()
        each = layers.edge() if self.checkpointing else layers.layer()
        return self.own_tokens * (self.size.layers * each + layers.once() + _BATCH)

    def recomputed(self) -> float:
        """What the backward pass through one layer adds."""
        layers = self.layers()
        # A layer's input is what is kept of it; in half precision its norm makes another in float32.
        kept = 0.0 if self.mixed else layers.edge()
        again = layers.layer() - kept if self.checkpointing else 0.0
        return self.own_tokens * (again + layers.returning())

    def at_loss(self) -> tuple[Term, ...]:
        """What the loss takes beside what the layers keep."""
        layers, tokens = self.layers(), self.own_tokens
        hidden = tokens * (layers.norm() + 2 * layers.edge())
        if not self.logits:
            return terms(last_hidden_states=hidden)
        gradient = 0.0 if self.lora else head_gradient(layers)
        return terms(last_hidden_states=hidden, loss_chunk=loss_chunk(layers, tokens), gradient_of_the_head=gradient)

    def _model(self, **divided: float) -> tuple[Term, ...]:
        """Weights, optimizer and frozen models, of which the rank holds such parts (in elements)."""
        trained, frozen = divided["trained"], divided["frozen"]
        reference = self.size.parameters * (divided["frozen_part"]) if self.reference and not self.lora else 0.0
        return terms(
            weights=4.0 * trained,
            frozen_weights=self.itemsize * frozen,
            optimizer=8.0 * trained,
            reference=self.itemsize * reference,
            other_models=self.beside,
        )

    # -- by backend -------------------------------------------------------------------------------------------------

    def moments(self) -> tuple[Moment, ...]:
        """What is there at each moment, where the rank computes."""
        found = {"local": self._local, "fsdp": self._fsdp, "deepspeed": self._deepspeed}[self.backend]()
        return tuple(Moment(name, (*held, process(self.accelerated))) for name, held in found.items())

    def _local(self) -> dict[str, tuple[Term, ...]]:
        trained = float(self.trained)
        base = self._model(trained=trained, frozen=float(self.frozen), frozen_part=1.0)
        base = (*base, *terms(gradients=4.0 * trained, weights_to_compute_with=self.itemsize * trained * self.mixed))
        kept = terms(activations=self.kept())
        # One weight's gradient at a time, before it is added to the others.
        one = self.itemsize * self._widest()
        temporary = 0.0 if self.accelerated else 4.0 * trained
        return {
            LOSS: (*base, *kept, *self.at_loss()),
            BACKWARD: (*base, *kept, *terms(backward_pass_of_a_layer=self.recomputed(), gradient_of_a_weight=one)),
            STEP: (*base, *terms(optimizer_temporaries=temporary)),
        }

    def _widest(self) -> float:
        return (
            0.0
            if self.lora
            else float(self.size.largest if self.size.experts else self.size.hidden * self.size.intermediate)
        )

    def _fsdp(self) -> dict[str, tuple[Term, ...]]:
        size, s, b = self.size, self.sizes, self.itemsize
        mine = self.trained * self.part()
        model = self._model(trained=mine, frozen=self.frozen * self.part(), frozen_part=self.part())
        gradients = terms(gradients=4.0 * mine)
        if self.offload and self.accelerated:
            model, gradients = terms(other_models=self.beside), ()
        experts, others = size.layer_parameters
        layer, root = experts / s.expert + others / s.tensor, (size.root_parameters - self._headless) / s.tensor
        own = 0.0 if self.lora else 1.0  # whether what is gathered has gradients
        gathered = layer * (2.0 if self.reshard else size.layers)
        kept = terms(activations=self.kept())
        at_loss = (*model, *gradients, *kept, *self.at_loss())
        found = layer * own
        if self.checkpointing and not self.accelerated and self.recomputed() > (b + 4.0) * found:
            found = (
                0.0  # a layer is recomputed before it has gradients, and on a CPU after those of the next are summed
            )
        in_layers = terms(
            backward_pass_of_a_layer=self.recomputed(), gathered_layers=b * gathered, gradients_of_a_layer=b * found,
            gradients_being_summed=4.0 * found,
        )  # fmt: skip
        of_edges = terms(gradients_of_embeddings=b * root * own, gradients_being_summed=4.0 * root * own)
        one = terms(gathered_layers=b * (layer if self.reshard else gathered))
        if self.edges_apart and not size.tied:  # each is gathered when it is used, and its gradient summed right then
            edge = size.embedding / s.tensor
            of_edges = terms(gradients_of_embeddings=b * edge * own, gradients_being_summed=4.0 * edge * own)
            hidden = terms(last_hidden_states=2.0 * self.own_tokens * self.layers().edge())
            return {
                LOSS: (*at_loss, *one, *terms(gathered_embeddings=b * edge * self.head)),
                REDUCTION: (*model, *gradients, *kept, *hidden, *of_edges),
                BACKWARD: (*model, *gradients, *kept, *in_layers),
                STEP: (*model, *gradients),
            }
        # Embeddings and head are the root, which stays gathered, and whose gradients are summed at the end.
        roots, head = terms(gathered_embeddings=b * root), b * size.embedding / s.tensor * own * self.logits
        return {
            LOSS: (*at_loss, *roots, *one),
            BACKWARD: (*model, *gradients, *kept, *roots, *in_layers, *terms(gradient_of_the_head=head)),
            REDUCTION: (*model, *gradients, *of_edges),
            STEP: (*model, *gradients),
        }

    def _deepspeed(self) -> dict[str, tuple[Term, ...]]:
        size, b, ranks = self.size, self.itemsize, self.ranks
        trained, third = float(self.trained), self.stage == 3
        whole = 1.0 / ranks if third else 1.0
        masters, moments, gradients = 4.0 * trained / ranks, 8.0 * trained / ranks, 4.0 * trained / ranks
        if self.offload and self.accelerated:
            masters = moments = gradients = 0.0
        base = terms(
            weights_to_compute_with=b * trained * whole * (not (third and self.offload and self.accelerated)),
            frozen_weights=b * self.frozen * whole,
            weights=masters,
            optimizer=moments,
            reference=b * size.parameters * whole * (self.reference and not self.lora),
            other_models=self.beside,
        )
        # What a micro-batch has of gradients before they are shared out: with stage 1 all, else a bucket and what fills it.
        bucket = 4.0 * min(trained, BUCKET)
        pending = terms(
            gradients=gradients,
            gradients_being_summed=bucket + b * (trained if self.stage == 1 else min(trained, BUCKET) * self.mixed),
        )
        gathered = terms(gathered_layers=b * min(float(size.parameters), LIVE) * third)
        kept = terms(activations=self.kept())
        return {
            LOSS: (*base, *gathered, *kept, *self.at_loss(), *terms(gradients=gradients)),
            BACKWARD: (*base, *gathered, *kept, *pending, *terms(backward_pass_of_a_layer=self.recomputed())),
            STEP: (*base, *terms(gradients=gradients, optimizer_temporaries=4.0 * trained / ranks)),
        }

    # -- on the host ------------------------------------------------------------------------------------------------

    def host_copy(self) -> float:
        """Bytes of weights and optimizer that a rank would copy to save them, or keep while its accelerator is lent."""
        return 12.0 * self.trained * self.part()

    def offloaded(self) -> float:
        """Bytes that are on the host between uses."""
        if not (self.offload and self.accelerated):
            return 0.0
        return 16.0 * self.trained * self.part()

    def with_tokens(self, tokens: int) -> Training:
        """The same with other micro-batches."""
        return dataclasses.replace(self, tokens=tokens)
