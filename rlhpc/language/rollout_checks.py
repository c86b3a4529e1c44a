"""Rules of a GRPO run's engine: keys that the engine or the trainer does not support together."""

from __future__ import annotations

from rlhpc.config.constraints import Fail, check_rules
from rlhpc.language.config.run import GrpoConfig


def check_rollout(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks the keys of section `rollout` against each other and against the trainer's.

    Raises:
        ConfigError: The first rule that is broken.
    """
    rollout, engine = cfg.rollout, cfg.rollout.rollout_backend
    has_several_ranks = (rollout.parallel.tensor or 1) > 1
    rules = (
        (
            engine == "hf" and (has_several_ranks or rollout.parallel.expert),
            f"rollout.parallel.{'tensor' if has_several_ranks else 'expert'}",
            "the engine hf has one rank: set rollout.rollout_backend=vllm",
        ),
        (
            engine == "hf" and rollout.batch_invariant,
            "rollout.batch_invariant",
            "it is a mode of vllm, and hf is batch-invariant on CPUs as it is: leave it false",
        ),
        (
            rollout.weight_sync == "shards" and cfg.actor.training_backend == "deepspeed",
            "rollout.weight_sync",
            "DeepSpeed's shards are no boxes of tensors: take auto, or another backend",
        ),
        (
            rollout.routing_replay and engine == "vllm",
            "rollout.routing_replay",
            "vllm does not say which experts it chose: take hf, or leave it false",
        ),
        (
            not rollout.merge_adapters and not cfg.actor.lora.rank,
            "rollout.merge_adapters",
            "there are no adapters (actor.lora.rank is 0): leave it true",
        ),
        (
            not rollout.merge_adapters and engine == "hf",
            "rollout.merge_adapters",
            "the engine hf takes merged weights: leave it true, or take vllm",
        ),
    )
    check_rules(rules, fail)
    _check_quantization(cfg, fail)


def _check_quantization(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks the keys that `rollout.quantization` needs.

    A quantized engine samples from another policy than the trained one. This is no fault of the engine, so the loss must
    correct it.
    """
    rollout, algorithm, key = cfg.rollout, cfg.algorithm, "rollout.quantization"
    if rollout.quantization is None:
        return
    dtype = cfg.actor.model.dtype if rollout.dtype == "auto" else rollout.dtype
    rules = (
        (rollout.rollout_backend != "vllm", key, "it is for rollout.rollout_backend=vllm: leave it null"),
        (
            dtype == "float32",
            key,
            "vllm quantizes weights in half precision: set rollout.dtype=bfloat16 or float16, or leave it null",
        ),
        (
            algorithm.tis_cap is None and not algorithm.corrections,
            key,
            "the engine then samples from a coarser policy than the trained one, which the loss must correct: set "
            "algorithm.tis_cap=2, or name one of algorithm.corrections; or leave it null",
        ),
        (
            rollout.weight_sync == "shards",
            key,
            "the engine quantizes whole layers: take rollout.weight_sync=auto, or leave it null",
        ),
        (
            not rollout.merge_adapters or cfg.agent.policies,
            key,
            "the engine would compute adapters in another precision than their layers: set rollout.merge_adapters=true and "
            "train a single policy, or leave it null",
        ),
    )
    check_rules(rules, fail)
