"""vLLM's log-probs as the losses need them: after temperature, and before top-p and top-k; of what it draws, and of what it is
given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.language.engines.common import EngineOptions
from rlhpc.language.engines.vllm_launch import VLLMProcess
from rlhpc.language.hugging_face import load_model_config
from rlhpc.language.models.divergence import FLOOR
from rlhpc.language.models.logprobs import chunks, scaled
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageConfig


class _BeforeFilters(nn.Module):
    """vLLM's last sampling stage, with log-probs of the distribution before top-p and top-k."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        inner.logprobs_mode = "raw_logprobs"  # so that it computes none itself
        self.inner = inner

    def forward(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        tokens, _ = self.inner(logits, *args, **kwargs)
        return tokens, logprobs


def _own_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
    """What vLLM takes from log-probs: those of the tokens drawn or given, and of the most likely ones where it is asked to.

    Its own function also ranks them, which nobody asks for here, and compiles itself for that: on a CPU many seconds at the
    first step of every process.
    """
    from vllm.v1.outputs import LogprobsTensors

    tokens = token_ids.unsqueeze(-1)
    found = logprobs.gather(-1, tokens)
    if num_logprobs:
        most, theirs = logprobs.topk(num_logprobs, dim=-1)
        tokens, found = torch.cat([tokens, theirs], -1), torch.cat([found, most], -1)
    return LogprobsTensors(tokens.to(torch.int32), found, torch.zeros_like(token_ids))


def log_before_filters(worker: Any) -> bool:
    """Makes vLLM's log-probs those after temperature and before top-p and top-k; whether that could be done.

    None of its modes does: `raw_logprobs` are before temperature, `processed_logprobs` after the filters.
    """
    sampler = worker.model_runner.sampler
    stage = getattr(sampler, "topk_topp_sampler", None)
    if isinstance(stage, nn.Module):
        sampler.topk_topp_sampler = _BeforeFilters(stage)
        sampler.gather_logprobs = _own_logprobs
        return True
    inner = getattr(sampler, "_sample_random", None)  # the second model runner
    if inner is None:
        return False

    def sample(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        tokens, _ = inner(logits.clone(), *args, **kwargs)
        return tokens, logits

    sampler._sample_random = sample
    return True


def merged(logits: Tensor, top: int, width: int, temperature: float) -> Tensor:
    """The most likely tokens' log-probs, and that of all others together as of one token more, in the form of logits.

    Their exponentials sum up to 1, so a softmax leaves them as they are. The others' comes from a sum over these, and not from
    what the most likely ones leave of 1, which float32 does not know where it is little.

    Args:
        logits: `[M, V]`.
        top: k: how many tokens, at most `width`.
        width: Ids from here on are left out.
        temperature: Divides the logits.

    Returns:
        `[M, width + 1]` float32: finite for k tokens and in the last column, the others'; -inf for these themselves.
    """
    found = torch.full((len(logits), width + 1), -math.inf, device=logits.device)
    for part in chunks(len(logits), width, logits.device):
        logprobs = torch.log_softmax(scaled(logits[part, :width], 1.0 / temperature), dim=-1)
        most, ids = logprobs.topk(top, dim=-1)
        rest = logprobs.scatter(1, ids, -math.inf).logsumexp(-1)
        found[part] = found[part].scatter(1, ids, most.clamp_min(FLOOR))
        found[part, width] = rest.clamp_min(FLOOR)
    return found


def say_outcomes(worker: Any, top: int, width: int, temperature: float) -> None:
    """Has vLLM's model say what a teacher does, wherever logits are asked of it: at a temperature, which vLLM gives to what it
    draws alone, and with all but the most likely tokens as one, where there is a number of these.

    Args:
        worker: vLLM's; whichever model runner it has takes a prompt's log-probs from its model's `compute_logits`.
        top: k, or 0 for logits as they are.
        width: See `merged`.
        temperature: Divides the logits.
    """
    model, sampler = worker.model_runner.get_model(), worker.model_runner.sampler
    inner = model.compute_logits

    def outcomes(*args: Any, **kwargs: Any) -> Tensor:
        logits = inner(*args, **kwargs)
        return merged(logits, top, width, temperature) if top else scaled(logits, 1.0 / temperature)

    model.compute_logits = outcomes
    if isinstance(getattr(sampler, "topk_topp_sampler", None), nn.Module):  # the first model runner's
        sampler.gather_logprobs = _own_logprobs


#: Most tokens of one forward pass. All of them have logits at the same time, which vLLM does not reckon with when it shares
#: out memory; longer texts are read in pieces.
_PASS = 2048


class VLLMScores(VLLMProcess):
    """vLLM's `LLMEngine`, which reads.

    What it is asked for are a prompt's log-probs, of a text that is all prompt. It draws one token after each, without which
    vLLM does not run, and which is thrown away: a text must leave room for it in the context.

    Args:
        cfg: Sections `rollout` and `actor.model` are read, as by `VLLMRollout`.
        model_path: Hugging Face folder or hub name.
        device: `cpu` for the CPU build; a GPU build takes the rank's first visible accelerator.
        seed: Of the engine.
        temperature: Divides the logits.
        top: How many of the most likely tokens to tell of, 0 for the tokens themselves alone.
        vocabulary: Of the most likely ones: ids from here on are left out; None takes all.
        max_tokens: Most tokens of one forward pass, if that is less than it takes by itself.

    Raises:
        ConfigError: vLLM is not installed or of the wrong build, there is no such model, or memory does not suffice.

    Attributes:
        top: How many of the most likely tokens it tells of, with a smaller vocabulary all of that.
        longest: Tokens of the longest text.
    """

    instead = "set rollout.rollout_backend=null, which computes with transformers"

    def __init__(
        self,
        cfg: LanguageConfig,
        *,
        model_path: str,
        device: str | torch.device,
        seed: int = 0,
        temperature: float = 1.0,
        top: int = 0,
        vocabulary: int | None = None,
        max_tokens: int = _PASS,
    ) -> None:
        options = EngineOptions.from_config(cfg, model_path, device)
        config = load_model_config(options.model_path, options.trust_remote_code)
        size = int(config.get_text_config().vocab_size)
        self._width = min(size, vocabulary or size)
        self.top, self._pass = min(top, self._width), min(max_tokens, _PASS)
        if options.max_model_len is not None:
            context = getattr(config.get_text_config(), "max_position_embeddings", None) or options.max_model_len + 1
            options = replace(options, max_model_len=min(options.max_model_len + 1, int(context)))
        super().__init__(options, config, seed)
        self._engine.collective_rpc(say_outcomes, args=(self.top, self._width, temperature))
        self._names = map(str, itertools.count())
        self.longest = int(self._engine.model_config.max_model_len) - 1

    def _arguments(self) -> dict[str, Any]:
        return {
            "logprobs_mode": "raw_logprobs",
            "max_logprobs": self.top + 1,
            "max_num_batched_tokens": self._pass,
            "max_num_seqs": None if self._batch is None else min(self._batch, self._pass),
            "enable_prefix_caching": False,  # a prompt's log-probs are never taken from there
        }

    def score(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """What it says of the tokens of some texts.

        Args:
            texts: Of two tokens or more each.

        Returns:
            For each text of n tokens, about all but the first: `[n - 1]` float32 log-probs; or, where it tells of the k most
            likely ones, `[n - 1, k + 1, 2]` (see `rlhpc.language.models.divergence.top_logprobs`).

        Raises:
            ConfigError: A text is too long.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        most = max(map(len, texts), default=0)
        if most > self.longest:
            raise ConfigError(
                f"a sequence has {most} tokens, and this engine reads at most {self.longest} (rollout.max_model_len, and one "
                "less than the model's context); raise it, take a model with a longer context, or have shorter responses"
            )
        names = list(itertools.islice(self._names, len(texts)))
        for name, text in zip(names, texts, strict=True):
            parameters = SamplingParams(
                temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, flat_logprobs=True,
                prompt_logprobs=self.top + 1 if self.top else 0, output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            self._engine.add_request(name, {"prompt_token_ids": list(text)}, parameters)
        found: dict[str, Tensor] = {}
        with self._explained():
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        found[output.request_id] = self._read(output.prompt_logprobs, len(output.prompt_token_ids) - 1)
        return [found[name] for name in names]

    def _read(self, said: Any, rows: int) -> Tensor:
        """vLLM's flat lists, a row after the other: the token itself, then the most likely outcomes."""
        logprobs = np.asarray(said.logprobs, np.float32).reshape(rows, -1)
        if not self.top:
            return torch.from_numpy(logprobs[:, 0].copy())
        ids = np.asarray(said.token_ids, np.int64).reshape(rows, -1)[:, 1:]
        of_one = ids != self._width  # of one token, rather than of all others
        likely = np.stack([logprobs[:, 1:][of_one], ids[of_one]], -1).reshape(rows, self.top, 2)
        rest = np.stack([logprobs[:, 1:][~of_one], np.full(rows, -1.0)], -1)[:, None]
        return torch.from_numpy(np.concatenate([likely, rest], 1).astype(np.float32))

    def offload(self) -> None:
        """Gives the accelerator to another role: the weights wait on the host. See `VLLMProcess._sleep`."""
        self._sleep(level=1)
