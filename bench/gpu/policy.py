"""π0 with random weights, of the size of released ones: acting and minibatches of PPO, as rollout and actor ranks run them.

The large size has PaliGemma's vision tower and language model and π0's action expert (3 billion parameters with a small
vocabulary) in bfloat16, trained with adapters and, on cards with more than 60 GB, as a whole.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.part import Report, dtype_for, peak_bytes, timed

#: Joints of the arm, actions of a chunk, denoising steps, and the width and number of its pictures.
STATE, CHUNK, STEPS, CAMERAS = 7, 10, 4, 2
REPEAT = 3


@dataclass(frozen=True)
class PolicySize:
    """Sizes of the vision tower, the language model and the action expert, of acting and of minibatches.

    Attributes:
        vision, text, expert: Width, width of the feed-forward part, layers and heads.
        picture, patch: Width of a picture and of a patch, in pixels.
        slots: Environment slots that act at once.
        minibatch, micro: Chunks of a minibatch, and of a forward and backward pass.
    """

    vision: tuple[int, int, int, int]
    text: tuple[int, int, int, int]
    expert: tuple[int, int, int, int]
    picture: int
    patch: int
    slots: int
    minibatch: int
    micro: int


TINY = PolicySize((32, 64, 1, 2), (64, 128, 1, 2), (64, 128, 1, 2), 32, 8, 4, 4, 2)
LARGE = PolicySize((1152, 4304, 27, 16), (2048, 16384, 18, 8), (1024, 4096, 18, 8), 224, 14, 32, 64, 16)


def write_policy(folder: Path, size: PolicySize, device: str) -> int:
    """Writes a π0 folder with random weights and a tokenizer; returns the number of parameters."""
    import torch
    import transformers

    from rlhpc.embodied.models.vlm import ByteTokenizer
    from rlhpc.runtime.devices import empty_cache

    def section(model_type: str, sizes: tuple[int, int, int, int], **options: Any) -> dict[str, Any]:
        width, inner_size, layers, heads = sizes
        return {
            "model_type": model_type, "hidden_size": width, "intermediate_size": inner_size, "num_hidden_layers": layers,
            "num_attention_heads": heads, **options,
        }  # fmt: skip

    gemma = {"num_key_value_heads": 1, "head_dim": 256 if size is LARGE else 32, "vocab_size": 320}
    vision = section(
        "siglip_vision_model", size.vision, image_size=size.picture, patch_size=size.patch, vision_use_head=False
    )
    text, expert = section("gemma", size.text, **gemma), section("gemma", size.expert, **gemma)
    vlm = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=319, projection_dim=size.text[0]
    )
    config = transformers.PI0Config(
        vlm_config=vlm.to_dict(), dit_config=expert, chunk_size=CHUNK, max_state_dim=STATE, max_action_dim=STATE
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.PI0ForConditionalGeneration._from_config(config)
    model.to(getattr(torch, dtype_for(device))).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    moments = {"mean": [0.0] * STATE, "std": [1.0] * STATE}
    (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": moments, "actions": moments}}))
    count = sum(parameter.numel() for parameter in model.parameters())
    del model
    empty_cache()
    return count


def make_backend(report: Report, folder: Path, size: PolicySize, lora_rank: int) -> tuple[Any, Any]:
    """Returns a training backend with the policy, and the configuration."""
    import numpy as np
    import torch
    from gymnasium import spaces
    from omegaconf import OmegaConf

    from rlhpc import Worker
    from rlhpc.config.typed import typed
    from rlhpc.embodied.config import PpoConfig
    from rlhpc.embodied.training import PolicyBlueprint
    from rlhpc.training import registry

    cfg = OmegaConf.structured(PpoConfig)
    model = {
        "model_type": "pi0", "model_path": str(folder), "num_action_chunks": CHUNK, "add_value_head": True,
        "dtype": dtype_for(report.device), "kwargs": {"num_steps": STEPS, "noise_steps": "one"},
    }  # fmt: skip
    cfg.actor = OmegaConf.merge(cfg.actor, {"model": model, "lora": {"rank": lora_rank}})
    cfg.algorithm.update_epochs = 1
    cfg = typed(PpoConfig, cfg)
    space = spaces.Dict(
        {
            "rgb": spaces.Box(0, 255, (size.picture, size.picture, 3 * CAMERAS), np.uint8),
            "instruction": spaces.Box(0, 255, (40,), np.uint8),
            "state": spaces.Box(-1, 1, (STATE,), np.float32),
        }
    )
    worker = Worker()
    worker.accelerators = () if report.small else (0,)
    action = spaces.Box(-1, 1, (STATE,), np.float32)
    blueprint = PolicyBlueprint(cfg.actor, (space, action), torch.device(report.device), seed=0, reads_norm=False)
    return registry.make_backend(blueprint, cfg.actor, worker), cfg


def observations(count: int, size: PolicySize, device: str) -> dict[str, Any]:
    """Returns random observations with the instruction that robots are given most often."""
    import numpy as np
    import torch

    from rlhpc.embodied.envs.observations import encode_text

    text = torch.from_numpy(np.stack([encode_text("pick up the cube and put it into the bin", 40)] * count))
    return {
        "rgb": torch.randint(
            0, 256, (count, size.picture, size.picture, 3 * CAMERAS), dtype=torch.uint8, device=device
        ),
        "instruction": text.to(device),
        "state": torch.rand(count, STATE, device=device) * 2 - 1,
    }


def measure_policy(report: Report, folder: Path, size: PolicySize, lora_rank: int, title: str) -> None:
    """Reports the seconds of a chunk's decision, with all slots at once, and of a minibatch of PPO with its optimizer step."""
    import torch

    from rlhpc.embodied.algorithms.ppo import PolicyUpdate
    from rlhpc.embodied.data.batches import TrainBatch
    from rlhpc.embodied.envs.observations import columns_of

    backend, cfg = make_backend(report, folder, size, lora_rank)
    policy, count = backend.module, size.minibatch
    obs = observations(max(count, size.slots), size, report.device)
    generator = torch.Generator(report.device).manual_seed(0)

    def act(num_rows: int) -> Any:
        noise = policy.sample_noise((num_rows,), torch.Generator().manual_seed(0)).to(report.device)
        with torch.no_grad():
            return policy.predict_action_batch({key: part[:num_rows] for key, part in obs.items()}, "train", noise)

    actions, extras = act(count)
    if not lora_rank:  # the decision is that of the same network
        act(size.slots)
        seconds = [timed(lambda: act(size.slots)) for _ in range(REPEAT)]
        report.figure(f"π0, {STEPS} denoising steps, decisions", [size.slots / s for s in seconds], "chunks/s")
    advantages = torch.randn(count, device=report.device, generator=generator)
    batch = TrainBatch(
        obs={key: part[:count] for key, part in obs.items()}, actions=actions, inputs=columns_of("inputs", extras["inputs"]),
        logprobs=extras["prev_logprobs"], values=extras["prev_values"], advantages=advantages, returns=advantages,
        mask=torch.ones_like(advantages),
    )  # fmt: skip
    update = PolicyUpdate(cfg.algorithm, backend, batch_size=count, micro_batch=size.micro, seed=0)

    def run() -> None:
        update.run(batch, range(count), count, 1, 1e-5)

    run()
    report.figure(f"π0, PPO, {title}", [count / timed(run) for _ in range(REPEAT)], "chunks/s")
    report.figure(f"π0, PPO, {title}, peak memory", peak_bytes(report.device) / 1e9, "GB")


def measure(report: Report) -> None:
    """Measures acting and PPO with adapters and, where memory suffices, of all weights."""
    import torch

    from rlhpc.runtime.devices import empty_cache

    size = TINY if report.small else LARGE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_policy(folder, size, report.device)
        report.figure("π0, parameters", count / 1e9, "billion")
        with report.piece("all weights"):
            if report.small or torch.accelerator.get_memory_info()[1] > 60e9:
                measure_policy(report, folder, size, 0, "all weights")
            else:
                report.skip("π0, PPO, all weights", "weights, gradients, moments and activations need some 60 GB")
        empty_cache()
        with report.piece("adapters"):
            measure_policy(report, folder, size, 16, "adapters of rank 16")
