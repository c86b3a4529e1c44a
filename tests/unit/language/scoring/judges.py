"""A judge whose replies are given."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from transformers import AutoTokenizer

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.base import Completion, Request
from rlhpc.language.models.tiny import character_tokenizer
from rlhpc.language.scoring.groups import scoring_groups
from rlhpc.language.scoring.llm_judge import Judge

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n[TURN]{{ m['content'] }}[/TURN]<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


class Scripted:
    """An engine that replies what `reply` makes of a question; None is cut off at the length limit."""

    reply: Callable[[str], str | None]
    asked: list[str]
    forkable = False

    def __init__(self, cfg: Any, *, model_path: str, device: Any, seed: int) -> None:
        self.cfg, self.tokenizer, self.context = cfg, AutoTokenizer.from_pretrained(model_path), 4096

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        found = []
        for request in requests:
            text = self.tokenizer.decode(list(request.prompt_ids))
            assert request.sampling.temperature == 0.0
            Scripted.asked.append(text)
            said = Scripted.reply(text)
            ids = self.tokenizer("cut" if said is None else said, add_special_tokens=False)["input_ids"]
            found.append(Completion(request.id, ids, finish_reason="length" if said is None else "stop"))
        return found

    def close(self) -> None:
        pass


def second(model: Path, /, **kwargs: Any) -> Any:
    own = {"name": "second", "scorer": "judge", "model": {"model_path": str(model)}, "kwargs": kwargs}
    terms = [{"name": "second"}]
    return OmegaConf.merge(default_section(GrpoConfig), {"groups": [own], "reward": {"terms": terms}})


@pytest.fixture(scope="module", name="model")
def judge_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = character_tokenizer(string.printable, 4096)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(name="judge")
def build_judge(model: Path) -> Iterator[Callable[..., Judge]]:
    Scripted.asked = []

    def made(reply: Callable[[str], str | None] = lambda text: "Score: 5", **keys: Any) -> Judge:
        Scripted.reply = staticmethod(reply)
        section = {"model": {"model_path": str(model)}, "rollout_backend": f"{Scripted.__module__}:Scripted", **keys}
        cfg: Any = OmegaConf.merge(default_section(GrpoConfig), {"judge": section})
        return Judge(cfg, torch.device("cpu"), scoring_groups(cfg)["judge"])

    yield made
