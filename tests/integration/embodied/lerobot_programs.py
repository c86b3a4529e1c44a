"""What the tests of LeRobot's policies run in its Python: `make FOLDER`, `hold RELEASED CHECKPOINT`, `read DATASET …`,
`film FOLDER`, `frames DATASET OUTPUT`, `openpi RELEASED`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.runtime.torch_adapter import import_torchvision

import_torchvision()

import av
import square
import torchvision
import torchvision.io
from diffusers import DDPMScheduler
from gymnasium.spaces import Box, Dict
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature, RTCAttentionSchedule
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.pi0 import processor_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05 import processor_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.rtc.modeling_rtc import RTCProcessor
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.processor import TokenizerProcessorStep
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.envs.observations import encode_text
from rlhpc.embodied.export import load_exported
from rlhpc.embodied.models import build_model
from rlhpc.embodied.models.base import Guide, overlap_weights
from rlhpc.embodied.models.lerobot import openpi
from rlhpc.embodied.models.normalization import AlohaJoints
from rlhpc.runtime.errors import ConfigError

#: What stands in a folder as its vision-language model, or tokenizer, and the folder that is taken for it.
HUB = {
    "smolvla": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    **dict.fromkeys(("pi0", "pi05"), "google/paligemma-3b-pt-224"),
}
VLM = "vlm"
STATE, PICTURE = "observation.state", "observation.image"
INPUTS = {
    "input_features": {
        STATE: PolicyFeature(FeatureType.STATE, (2,)),
        PICTURE: PolicyFeature(FeatureType.VISUAL, (3, 16, 16)),
    },
    "output_features": {"action": PolicyFeature(FeatureType.ACTION, (2,))},
    "device": "cpu",
}
PI: dict[str, Any] = {
    **INPUTS, "chunk_size": 4, "n_action_steps": 2, "max_state_dim": 4, "max_action_dim": 4, "image_resolution": (32, 32),
    "tokenizer_max_length": 64, "num_inference_steps": 3,
}  # fmt: skip
TINY: dict[str, Any] = {
    "act": lambda: ACTConfig(
        **INPUTS, chunk_size=4, n_action_steps=2, pretrained_backbone_weights=None, dim_model=32, n_heads=2,
        dim_feedforward=64, n_encoder_layers=1, n_vae_encoder_layers=1, latent_dim=8,
    ),
    "diffusion": lambda: DiffusionConfig(
        **INPUTS, n_obs_steps=2, horizon=4, n_action_steps=2, down_dims=(32, 64), n_groups=4, crop_shape=None,
        spatial_softmax_num_keypoints=4, diffusion_step_embed_dim=16, num_train_timesteps=10,
        noise_scheduler_type="DDIM", num_inference_steps=5,
    ),
    "smolvla": lambda: SmolVLAConfig(
        **INPUTS, chunk_size=4, n_action_steps=2, max_state_dim=4, max_action_dim=4, resize_imgs_with_padding=(32, 32),
        tokenizer_max_length=24, num_steps=3, vlm_model_name=VLM, num_vlm_layers=2, expert_width_multiplier=0.5,
    ),
    "pi0": lambda: PI0Config(**PI),
    "pi05": lambda: PI05Config(**PI),
}  # fmt: skip
#: The sum of a chunk, a loss, and the norm of its gradient, by openpi's own files over transformers 4.53.2 (`hold_openpi`).
OPENPI = {"pi0": (18.823841, 1.7717788, 38.069221), "pi05": (17.550941, 2.6783085, 16.031805)}


def make_vlm(folder: Path) -> None:
    """Configuration, tokenizer and processor of a tiny SmolVLM, whose words are bytes."""
    special = {"image_token": "<image>", "fake_image_token": "<fake>", "global_image_token": "<global>"}
    words = [*(f"<0x{i:02X}>" for i in range(256)), "<pad>", "<end>", *special.values()]
    bpe = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(bpe), pad_token="<pad>", eos_token="<end>", extra_special_tokens=special
    )
    body = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {"model_type": "llama", **body, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16}
    eye = {**body, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
    token = words.index("<image>")
    text |= {"vocab_size": 320, "pad_token_id": 256}
    SmolVLMConfig(
        text_config=text, vision_config=eye, image_token_id=token, scale_factor=2, pad_token_id=256
    ).save_pretrained(folder)
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(folder)


def make(folder: Path) -> None:
    """A dataset of an expert's episodes, and a tiny, random policy of each family, written by LeRobot."""
    shapes = {STATE: ("float32", (2,)), PICTURE: ("image", (16, 16, 3)), "action": ("float32", (2,))}
    features = {
        name: {"dtype": dtype, "shape": shape, "names": [str(i) for i in range(len(shape) if dtype == "image" else 2)]}
        for name, (dtype, shape) in shapes.items()
    }
    data = LeRobotDataset.create("tiny/square", 10, features, root=folder / "data", use_videos=False)
    world = square.Square()
    for episode in range(6):
        seen, over, steps = world.reset(seed=episode)[0], False, 0
        while not over and steps < 12:
            action = square.expert({key: np.asarray(seen[key])[None] for key in ("rgb", "state")})[0]
            data.add_frame({STATE: seen["state"], PICTURE: seen["rgb"], "action": action, "task": seen["instruction"]})
            seen, _, over, _, _ = world.step(action)
            steps += 1
        data.save_episode()
    data.finalize()
    make_vlm(folder / VLM)
    openpi.patch_lerobot()
    for module in (processor_pi0, processor_pi05):  # whose tokenizer is the hub's, whatever the configuration
        module.TokenizerProcessorStep = lambda **said: TokenizerProcessorStep(**said | {"tokenizer_name": VLM})
    for family, config in TINY.items():
        torch.manual_seed(0)
        get_policy_class(family)(config()).save_pretrained(folder / family)
        for processor in make_pre_post_processors(config(), dataset_stats=data.meta.stats):
            processor.save_pretrained(folder / family)
    for family, hub in HUB.items():
        for name in ("config.json", "policy_preprocessor.json"):
            file = folder / family / name
            file.write_text(file.read_text().replace(f'"{VLM}"', f'"{hub}"'))


TASKS = [f"go to the {colour} square" for colour in ("red", "blue", "red", "blue")]


def observations() -> dict[str, torch.Tensor]:
    """Four of them, as the environment shows them."""
    random = np.random.default_rng(0)
    pictures = torch.from_numpy(random.integers(0, 256, (4, 16, 16, 3), np.uint8))
    said = torch.from_numpy(np.stack([encode_text(task, 40) for task in TASKS]))
    state = torch.from_numpy(random.uniform(-1, 1, (4, 2)).astype(np.float32))
    return {"rgb": pictures, "state": state, "instruction": said}


def hold_steps(policy: Any) -> None:
    """Mean and deviation of each denoising step are those of diffusers' DDPM, before the least deviation."""
    ddpm = DDPMScheduler.from_config(policy.inner.diffusion.noise_scheduler.config)
    ddpm.set_timesteps(policy.steps)
    seen, x = torch.randn(2, policy.value_input_size()), torch.randn(2, 4, 2)
    with torch.no_grad():
        for t in policy._times:
            predicted, noise = (
                policy._run_unet(seen, x, t),
                torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(t)),
            )
            theirs = ddpm.step(predicted, t, x, generator=torch.Generator().manual_seed(t)).prev_sample
            mine = policy._compute_posterior_mean(seen, x, t) + policy._compute_coefficients(t)[2] ** 0.5 * noise
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def hold_history(mine: Any, theirs: Any, before: Any, after: Any) -> None:
    """What LeRobot keeps of observations in its queue, step by step, is shown here at once: actions and loss."""
    obs, looks = observations(), mine.description.num_obs_steps
    noise = mine.sample_start((4,), torch.Generator().manual_seed(7))
    steps = [{key: obs[key].roll(i, 0) for key in ("rgb", "state")} for i in range(3)]
    theirs.reset()
    played = []
    for each in steps:
        picture = (each["rgb"].permute(0, 3, 1, 2).float() / 255).contiguous()
        played.append(after(theirs.select_action(before({STATE: each["state"], PICTURE: picture}), noise=noise)))
    for last, theirs_now in ((0, played[:2]), (2, played[2:])):  # before an episode is its first
        seen = [steps[max(0, last - i)] for i in reversed(range(looks))]
        stacked = {key: torch.stack([each[key] for each in seen], 1) for key in seen[0]}
        shown = stacked if looks > 1 else seen[0]
        with torch.no_grad():
            actions, _ = mine.eval().predict_action_batch(shown, "eval", noise)
        torch.testing.assert_close(actions[:, : len(theirs_now)], torch.stack(theirs_now, 1), rtol=0, atol=0)
    assert actions.std() > 0
    chunk = torch.rand(4, 4, 2, generator=torch.Generator().manual_seed(1))
    outside = torch.tensor([[True, False, False, True]] * 4)
    torch.manual_seed(2)
    loss = mine.bc_loss({"obs": shown, "actions": chunk, "is_pad": outside}).mean()
    torch.manual_seed(2)
    pictures = stacked["rgb"].permute(0, 1, 4, 2, 3).float() / 255
    batch = {STATE: stacked["state"], PICTURE: pictures, "action": chunk, "action_is_pad": outside}
    assert loss > 0
    torch.testing.assert_close(loss, theirs.train()(before(batch))[0], rtol=0, atol=0)


def hold_one(mine: Any, released: Path) -> None:
    """The same where the network sees one observation."""
    config, folder = PreTrainedConfig.from_pretrained(released), Path("diffusion_one")
    shutil.copytree(released, folder)
    config.n_obs_steps = 1
    theirs = get_policy_class("diffusion")(config)
    theirs.save_pretrained(folder)
    parts = {key: Box(box.low[0], box.high[0], dtype=box.dtype) for key, box in mine.observation_space.spaces.items()}
    section = ModelConfig(model_type="lerobot", model_path=str(folder), num_action_chunks=2)
    one = build_model(section, Dict(parts), mine.action_space)
    hold_history(one, theirs.eval(), *make_pre_post_processors(config, pretrained_path=str(folder)))


def assert_loaded(policy: Any, folder: Path) -> None:
    """LeRobot goes on with random weights where it cannot load them."""
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(policy.state_dict()[name], value), name


def hold_openpi(family: str) -> None:
    """Acts and learns as LeRobot does over openpi's own files, whose answers are kept here."""
    policy = get_policy_class(family)(TINY[family]())
    with torch.no_grad():
        for i, (_, value) in enumerate(sorted(policy.named_parameters())):
            value.copy_((torch.arange(value.numel()) * (0.37 + 0.01 * i)).sin().view_as(value) * 0.3)
    wave = (torch.arange(48) * 0.7).sin()
    batch = {
        STATE: wave[:4].view(2, 2), PICTURE: (torch.arange(1536) * 0.3).sin().view(2, 3, 16, 16) ** 2,
        "observation.language.tokens": torch.arange(12).view(2, 6) * 7, "action": wave[:16].view(2, 4, 2),
        "observation.language.attention_mask": torch.tensor([[True] * 6, [True] * 4 + [False] * 2]),
    }  # fmt: skip
    played = policy.predict_action_chunk(batch, noise=wave[:32].view(2, 4, 4))
    noise, time = wave[:32].view(2, 4, 4), torch.tensor([0.2, 0.7])
    policy.model.sample_noise, policy.model.sample_time = lambda *_: noise, lambda *_: time
    loss = policy.train()(batch)[0]
    loss.backward()
    slopes = [value.grad.norm() for value in policy.parameters() if value.grad is not None]
    found = (float(played.abs().sum()), loss.item(), float(torch.stack(slopes).norm()))
    np.testing.assert_allclose(found, OPENPI[family], rtol=1e-4)


#: What openpi's own code made of statistics, prompts and names (tests/data/openpi/record.py).
RECORDED = Path(__file__).parents[2] / "data/openpi/openpi.json"


def make_openpi(source: Path, target: Path) -> None:
    """A folder in openpi's layout with the weights of a tiny policy of LeRobot, some of them in bfloat16, as in openpi."""
    recorded, family = json.loads(RECORDED.read_text()), source.name
    (target / "assets/robot").mkdir(parents=True)
    openpi.patch_lerobot()
    config = PreTrainedConfig.from_pretrained(source)
    config.image_resolution = (224, 224)  # openpi's, which the eye is built for
    policy = get_policy_class(family)(config)
    tied = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    weights = {name.removeprefix("model."): value for name, value in policy.state_dict().items()}
    del weights[tied]  # openpi's file has it as lm_head
    layers = {name for name in recorded[family]["weights"] if not any(f".{i}." in name for i in range(2, 27))}
    vision = {name for name in layers if ".encoder.layers.1." in name}  # this eye has one layer
    pooled = {name for name in weights if ".vision_model.head." in name}  # which PaliGemma's eye does not have
    assert weights.keys() - pooled == layers - vision, weights.keys() ^ (layers - vision)
    low = {name for name in weights if "mlp" in name and "time" not in name}
    save_file({name: value.bfloat16() if name in low else value.clone() for name, value in weights.items()},
              target / "model.safetensors")  # fmt: skip
    config = {"action_dim": 4, "action_horizon": 4, "paligemma_variant": "gemma_2b",
              "action_expert_variant": "gemma_300m", "precision": "bfloat16"}  # fmt: skip
    (target / "config.json").write_text(json.dumps(config, indent=2))
    statistics = {name: {key: row[:2] if name == "state" else row[5:] for key, row in column.items()}
                  for name, column in recorded["statistics"].items()}  # fmt: skip
    (target / "assets/robot/norm_stats.json").write_text(json.dumps({"norm_stats": statistics}))


def hold_openpi_folder(source: Path) -> None:
    """Reads openpi's folder, normalises and words the state as openpi's code did, and writes the same folder again."""
    recorded, family = json.loads(RECORDED.read_text()), source.name
    folder, again = Path(f"openpi_{family}"), Path(f"openpi_{family}_again")
    make_openpi(source, folder)
    parts = {key: Box(0, 255, rows.shape[1:], np.uint8) for key, rows in observations().items()}
    parts["state"] = Box(-1, 1, (2,), np.float32)
    section = ModelConfig(model_type="lerobot", model_path=str(folder), num_action_chunks=2, kwargs={"vlm": VLM})
    policy = build_model(section, Dict(parts), Box(-1, 1, (2,), np.float32))
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(policy.inner.state_dict()[f"model.{name}"], value.float()), name
    texts = recorded[family]["texts"]
    state = torch.tensor(recorded["values"]["state"])[:2, :2].float()
    obs = {"rgb": torch.zeros(2, 16, 16, 3, dtype=torch.uint8), "state": state,
           "instruction": torch.from_numpy(np.stack([encode_text(text, 40) for text in texts]))}  # fmt: skip
    actions = torch.tensor(recorded["values"]["actions"])[:, 5:].float()
    batch = policy.batch(obs, actions[:2, None].expand(-1, 4, -1))
    expected = torch.tensor(recorded[family]["normalised"]["actions"])[:2, None, 5:].float().expand(-1, 4, -1)
    torch.testing.assert_close(batch["action"], expected, rtol=1e-5, atol=1e-5)
    expected = torch.tensor(recorded[family]["normalised"]["state"])[:2, :2].float()
    torch.testing.assert_close(batch[STATE], expected, rtol=1e-5, atol=1e-5)
    expected = torch.tensor(recorded[family]["unnormalised"]["actions"])[:, 5:].float()
    torch.testing.assert_close(policy.processors.postprocess(actions), expected, rtol=1e-5, atol=1e-5)
    assert policy.inner.config.image_features.keys() == {"observation.images.base_0_rgb"}
    tokens, mask = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    for i, prompt in enumerate(recorded[family]["prompts"]):  # the tokens of this tokenizer are bytes
        words = bytes(tokens[i][mask[i].bool()].tolist()).decode()
        prompt = prompt.removeprefix("<bos>")
        if family == "pi05":  # recorded with eight numbers, of which this policy sees two
            task, numbers = prompt.split(", State: ")
            numbers, rest = numbers.split(";")
            prompt = f"{task}, State: {' '.join(numbers.split()[:2])};{rest}"
        assert words == prompt, (words, prompt)
    hold_options(section, parts, batch_of=(obs, actions[:2, None].expand(-1, 4, -1)), texts=texts)
    torch.manual_seed(0)
    times = policy.inner.model.sample_time(200_000, torch.device("cpu")).sort().values
    np.testing.assert_allclose(times[:: len(times) // 20], recorded["time_quantiles"], atol=0.01)
    again.mkdir()
    policy.release(again, 0)
    for file in ("config.json", "assets/robot/norm_stats.json"):
        assert (again / file).read_bytes() == (folder / file).read_bytes(), file
    kept, written = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert kept.keys() == written.keys()
    for name, value in kept.items():
        assert value.dtype == written[name].dtype and torch.equal(value, written[name]), name
    print("equal")


def hold_options(section: Any, parts: dict[str, Any], batch_of: Any, texts: list[str]) -> None:
    """A frozen PaliGemma, shorter chunks, and prompts of another length or without the state, as RLinf sets them by openpi's
    configuration; what is released has them, too."""
    family = Path(section.model_path).name.removeprefix("openpi_")
    kwargs = {
        **section.kwargs, "train_expert_only": True, "action_horizon": 2, "discrete_state_input": False, "prompt_tokens": 99,
    }  # fmt: skip
    policy = build_model(replace(section, kwargs=kwargs), Dict(parts), Box(-1, 1, (2,), np.float32))
    inner = policy.inner.model.paligemma_with_expert
    assert not any(each.requires_grad for each in inner.paligemma.parameters())
    assert all(each.requires_grad for each in inner.gemma_expert.parameters())
    assert policy.state_shape[0] == policy.horizon == 2
    obs, actions = batch_of
    batch = policy.batch(obs, actions[:, :2])
    tokens, mask = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    assert tokens.shape[1] == 99
    for row, shown, text in zip(tokens, mask, texts, strict=True):
        words = bytes(row[shown.bool()].tolist()).decode()
        assert words == f"{text.strip().replace('_', ' ').replace(chr(10), ' ')}\n", words
    loss = policy.bc_loss({"obs": obs, "actions": actions[:, :2]}).mean()
    loss.backward()
    assert all(each.grad is None for each in inner.paligemma.parameters()) and loss > 0
    released = Path(f"{section.model_path}_options")
    released.mkdir()
    policy.release(released, 0)
    assert json.loads((released / "config.json").read_text())["action_horizon"] == 2
    if family == "pi0":
        with refused("π0 takes the state as numbers"):
            build_model(
                replace(section, kwargs={**kwargs, "discrete_state_input": True}),
                Dict(parts),
                Box(-1, 1, (2,), np.float32),
            )


@contextmanager
def refused(words: str) -> Iterator[None]:
    """Holds a message of the configuration, without pytest, which this Python does not have."""
    try:
        yield
    except ConfigError as error:
        assert words in str(error), error
        return
    raise AssertionError(f"nothing said {words!r}")


def hold_real_time(mine: Any, obs: dict[str, torch.Tensor]) -> None:
    """Weights and correction are those of LeRobot's real-time chunking, which takes the velocity for constant in the state;
    here its derivative counts, too."""
    theirs = RTCProcessor(RTCConfig(prefix_attention_schedule=RTCAttentionSchedule.EXP, max_guidance_weight=5.0))
    x, left, v = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(3))
    guide = Guide(left, overlap_weights(4, 1, 1)[:, None], 5.0)
    for time in (1.0, 0.6, 0.1):
        expected = theirs.denoise_step(x, left, 1, time, lambda _: v, execution_horizon=3)
        torch.testing.assert_close(guide(lambda *_: v)(x, torch.full((4,), time)), expected)
    with torch.no_grad():
        noise = torch.zeros(4, 4, 4)
        free, guided = mine.plan(obs, noise=noise), mine.plan(obs, guide, noise)
        seen, _ = mine.encode(obs)
        constant = mine.denoise(guide(lambda x, t: seen(x, t).detach()), torch.zeros(4, 4, 4))
    assert not torch.equal(guided, free) and not torch.equal(guided, constant)
    assert (guided - left)[:, 0].abs().mean() < (free - left)[:, 0].abs().mean()


def hold(released: Path, checkpoint: Path) -> None:
    """Holds what was released, as LeRobot loads and plays it, against the checkpoint: actions and loss."""
    mine, obs = load_exported(checkpoint), observations()
    if not released.exists():
        released.mkdir()
        mine.release(released, 2)
    config = PreTrainedConfig.from_pretrained(released)
    changes: dict[str, Any] = {}
    if config.type in HUB:
        before = json.loads((released / "policy_preprocessor.json").read_text())["steps"]
        names = [step["config"]["tokenizer_name"] for step in before if "tokenizer_name" in step["config"]]
        assert names == [HUB[config.type]] == [getattr(config, "vlm_model_name", *names)]
        changes = {"tokenizer_processor": {"tokenizer_name": VLM}}
    if config.type == "smolvla":
        config.vlm_model_name = VLM
    theirs = get_policy_class(config.type).from_pretrained(released, config=config, strict=True)
    before, after = make_pre_post_processors(config, pretrained_path=str(released), preprocessor_overrides=changes)
    seen = {STATE: obs["state"], PICTURE: (obs["rgb"].permute(0, 3, 1, 2).float() / 255).contiguous(), "task": TASKS}
    noise = None
    if config.type == "act":
        played = after(theirs.predict_action_chunk(before(seen)))[:, :2]
    elif config.type in HUB:
        noise = mine.sample_start((4,), torch.Generator().manual_seed(7))
        played = after(theirs.predict_action_chunk(before(seen), noise=noise))[:, :2]
    else:
        hold_history(mine, theirs, before, after)
        hold_steps(mine.eval())
        hold_one(mine, released)
        print("equal")
        return
    with torch.no_grad():
        actions, _ = mine.predict_action_batch(obs, "eval", noise)
    if config.type in HUB:
        hold_real_time(mine, obs)
    if config.type in OPENPI:
        assert_loaded(theirs, released)
        hold_openpi(config.type)
    assert played.shape == (4, 2, 2) and played.std() > 0
    torch.testing.assert_close(actions, played, rtol=0, atol=0)

    shown = torch.rand(4, 4, 2, generator=torch.Generator().manual_seed(1))
    beyond = torch.tensor([[False] * 3 + [True]] * 4)
    losses = []
    for compute in ("mine", "theirs"):
        torch.manual_seed(2)
        if compute == "mine":
            losses.append(mine.bc_loss({"obs": obs, "actions": shown, "is_pad": beyond}).mean())
            continue
        losses.append(theirs.train()(before({**seen, "action": shown, "action_is_pad": beyond}))[0])
    assert losses[0] > 0
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    print("equal")


def build_pi(folder: Path, **kwargs: Any) -> Any:
    """A policy of a folder with a value head, and options."""
    section = ModelConfig(
        model_type="lerobot", model_path=str(folder), num_action_chunks=2, add_value_head=True,
        kwargs={"vlm": VLM, **kwargs},
    )  # fmt: skip
    parts = {key: Box(0, 255, rows.shape[1:], np.uint8) for key, rows in observations().items()}
    parts["state"] = Box(-1, 1, (2,), np.float32)
    torch.manual_seed(0)
    policy = build_model(section, Dict(parts), Box(-1, 1, (2,), np.float32))
    for parameter in policy.value_head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return policy


def hold_heads(folder: Path) -> None:
    """Value heads and noise of π_RL, as RLinf's openpi_action_model.py computes them, and openpi's DeltaActions."""
    obs, drawn = observations(), torch.Generator()
    plain = build_pi(folder)
    with torch.no_grad():
        batch = plain.batch(obs)
        tokens, shown = (batch[f"observation.language.{name}"] for name in ("tokens", "attention_mask"))
        assert folder.name == "pi05" or not shown.all(), "the prompts are padded"
        seen: list[torch.Tensor] = []
        inner = plain.inner.model.paligemma_with_expert
        forward = inner.forward
        inner.forward = lambda **given: [seen.append(out := forward(**given)), out][1]
        plain.encode(obs)
        prefix = seen[0][0][0]
    assert prefix.shape[1] > tokens.shape[1]
    for kind, expected in (("mean_token", prefix.mean(1)), ("first_token", prefix[:, 0])):
        policy = build_pi(folder, value_input=kind, value_hidden=[16, 8])
        with torch.no_grad():
            torch.testing.assert_close(policy.value(obs), policy.value_head(expected))
    for noise_method in ("flow_sde", "flow_noise"):
        for step_logprobs in ("sum", "mean"):
            policy = build_pi(
                folder, value_input="action_expert", value_hidden=[16, 8], noise_method=noise_method,
                step_logprobs=step_logprobs, detach_value_input=True,
            )  # fmt: skip
            with torch.no_grad():
                noise = policy.sample_noise((4,), drawn.manual_seed(1))
                actions, extras = policy.predict_action_batch(obs, "train", noise)
            outputs = policy.default_forward({"obs": obs, "actions": actions, **extras["inputs"]}, True, True, True)
            torch.testing.assert_close(outputs["logprobs"], extras["prev_logprobs"])
            torch.testing.assert_close(outputs["values"], extras["prev_values"])
            chain, hidden, means, stds = extras["inputs"]["chain"], [], [], []
            policy.inner.model.action_out_proj.register_forward_pre_hook(
                lambda _, args, into=hidden: into.append(args[0])
            )
            velocity = policy.encode(obs)[0]
            for k in range(policy.steps):
                t = 1 - k / policy.steps
                v = velocity(chain[:, k], torch.full((4,), t))
                if noise_method == "flow_noise":
                    low, high = (2 * np.log(std) for std in (0.08, 0.16))
                    raw = torch.tanh(policy.noise_head.layers(hidden[-1]))
                    means.append(chain[:, k] - v / policy.steps)
                    stds.append((0.5 * (low + (high - low) * (raw + 1) / 2)).exp())
                else:
                    mean, std = policy.flow.moments(chain[:, k], v, t)
                    means.append(mean)
                    stds.append(torch.full_like(mean, std))
            steps = [torch.distributions.Normal(*each) for each in zip(means, stds, strict=True)]
            logprobs = [each.log_prob(chain[:, k + 1]) for k, each in enumerate(steps)]
            start = torch.distributions.Normal(torch.zeros_like(chain[:, 0]), torch.ones_like(chain[:, 0]))
            logprobs, entropy = (
                [start.log_prob(chain[:, 0]), *logprobs],
                [start.entropy(), *(s.entropy() for s in steps)],
            )
            for name, terms in (("logprobs", logprobs), ("entropy", entropy)):
                total = torch.stack(terms).mean(0) if step_logprobs == "mean" else torch.stack(terms[1:]).sum(0)
                torch.testing.assert_close(outputs[name], total[:, :2, :2].sum((1, 2)))
            values = torch.stack([policy.value_head(each.mean(1)) for each in hidden]).mean(0)
            torch.testing.assert_close(outputs["values"], values)
            assert policy.value(obs).shape == (4,)
            torch.testing.assert_close(
                policy.value({key: rows[2:] for key, rows in obs.items()}), policy.value(obs)[2:]
            )
            policy.zero_grad()
            outputs["values"].sum().backward()
            inner_slopes = [each.grad for each in policy.inner.parameters() if each.grad is not None]
            assert not any(slope.any() for slope in inner_slopes), "the critic's input is detached"
    noise = plain.sample_noise((4,), drawn.manual_seed(1))
    relative = build_pi(folder, delta_actions=[1])
    with torch.no_grad():
        absolute, shifted = (policy.predict_action_batch(obs, "train", noise)[0] for policy in (plain, relative))
    torch.testing.assert_close(
        shifted - absolute, torch.stack([torch.zeros(4), obs["state"][:, 1]], 1)[:, None].expand(4, 2, 2)
    )
    actions, losses = torch.rand(4, 4, 2), []
    for policy, target in (
        (relative, actions),
        (plain, actions - torch.stack([torch.zeros(4), obs["state"][:, 1]], 1)[:, None]),
    ):
        torch.manual_seed(2)
        losses.append(policy.bc_loss({"obs": obs, "actions": target}).mean())
    torch.testing.assert_close(*losses)
    # ALOHA's joints, here of a robot with one joint and one gripper.
    AlohaJoints.width, AlohaJoints._grippers, AlohaJoints._flipped_joints = 2, (1,), (0,)
    adapted = build_pi(folder, adapt_to_pi=True)
    in_pi = {**obs, "state": AlohaJoints.state_to_pi(obs["state"])}
    with torch.no_grad():
        expected = AlohaJoints.actions_from_pi(plain.predict_action_batch(in_pi, "train", noise)[0])
        torch.testing.assert_close(adapted.predict_action_batch(obs, "train", noise)[0], expected)
    losses = []
    for policy, seen_obs, target in ((adapted, obs, actions), (plain, in_pi, AlohaJoints.actions_to_pi(actions))):
        torch.manual_seed(2)
        losses.append(policy.bc_loss({"obs": seen_obs, "actions": target}).mean())
    torch.testing.assert_close(*losses)
    print("equal")


def film(folder: Path) -> None:
    """A dataset of two cameras as videos, recorded by LeRobot, whose images tell camera, episode and time."""
    features: dict[str, Any] = {
        name: {"dtype": "float32", "shape": (2,), "names": ["x", "y"]} for name in (STATE, "action")
    }
    names = ["height", "width", "channels"]
    features |= {
        f"observation.images.{camera}": {"dtype": "video", "shape": (64, 64, 3), "names": names}
        for camera in ("front", "wrist")
    }
    data = LeRobotDataset.create("tiny/filmed", 10, features, root=folder, use_videos=True)
    for episode, length in enumerate((7, 12, 5)):
        for t in range(length):
            values = np.array([episode, t], np.float32)
            levels = {"front": 30 + 60 * episode + 4 * t, "wrist": 225 - 60 * episode - 4 * t}
            frames = {
                f"observation.images.{camera}": np.full((64, 64, 3), level, np.uint8)
                for camera, level in levels.items()
            }
            data.add_frame({STATE: values, "action": values, **frames, "task": "look"})
        data.save_episode()
    data.finalize()


class VideoReader:
    """What torchvision's reader of videos was until it was taken out (0.25, `io/video_reader.py`, backend pyav), on which
    LeRobot's loader is built.
    """

    def __init__(self, path: str, stream: str) -> None:
        self.container = av.open(path)
        self._streams = {stream: 0}
        self._frames = self.container.decode(**self._streams)

    def seek(self, time_s: float, keyframes_only: bool = False) -> None:
        self.container.seek(round(time_s * 1e6), backward=True, any_frame=not keyframes_only)
        self._frames = self.container.decode(**self._streams)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for frame in self._frames:
            pixels = torch.from_numpy(frame.to_rgb().to_ndarray()).permute(2, 0, 1)
            yield {"data": pixels, "pts": float(frame.pts * frame.time_base)}


def frames(folder: Path, output: Path) -> None:
    """Writes the images that LeRobot's loader gives, `[n, H, W, 3 × cameras]`, without its transforms. Which frame of a video
    belongs to a row is found by LeRobot's own code.
    """
    torchvision.set_video_backend = lambda backend: None
    torchvision.io.VideoReader = VideoReader
    found = LeRobotDataset("local/set", root=folder, video_backend="pyav")
    images = [
        torch.cat([row[camera].mul(255).round().to(torch.uint8) for camera in sorted(found.meta.camera_keys)])
        for row in (found[index] for index in range(len(found)))
    ]
    np.save(output, torch.stack(images).permute(0, 2, 3, 1).numpy())


def read(*folders: Path) -> None:
    """Says what LeRobot finds in datasets: a line each, with all frames."""
    for folder in folders:
        found = LeRobotDataset("local/set", root=folder)
        rows = [{**row, "picture": row["observation.images.rgb"].mul(255).round().int()} for row in found]
        names = ("observation.state", "picture", "action", "complementary_info.is_intervention")
        print(json.dumps({
            "facts": [found.num_episodes, found.num_frames, found.fps], "tasks": [row["task"] for row in rows],
            "frames": {name: [row[name].tolist() for row in rows] for name in names if name in rows[0]},
            "stats": {name: {key: v.tolist() for key, v in each.items()} for name, each in found.meta.stats.items()},
        }))  # fmt: skip


if __name__ == "__main__":
    programs = {
        "make": make, "hold": hold, "heads": hold_heads, "read": read, "film": film, "frames": frames,
        "openpi": hold_openpi_folder,
    }  # fmt: skip
    programs[sys.argv[1]](*map(Path, sys.argv[2:]))
