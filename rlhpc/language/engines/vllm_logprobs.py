"""Log-probs of sampled tokens and of texts from vLLM, after temperature and before top-p and top-k, as losses need them."""

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
from rlhpc.language.engines.vllm_adapter import replace_sampling
from rlhpc.language.engines.vllm_launch import VLLMProcess
from rlhpc.language.hugging_face import load_model_config
from rlhpc.language.models.divergence import FLOOR
from rlhpc.language.models.logprobs import chunks, scale_logits
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageConfig


class _UnfilteredLogprobs(nn.Module):
    """Last sampling stage of vLLM, with log-probs of the distribution before top-p and top-k."""

    def __init__(self, inner_processor: Any) -> None:
        super().__init__()
        inner_processor.logprobs_mode = "raw_logprobs"  # the stage then computes no log-probs
        self.processor = inner_processor

    def forward(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        tokens, _ = self.processor(logits, *args, **kwargs)
        return tokens, logprobs


def _select_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
    """Selects the log-probs that vLLM returns: those of the sampled or given tokens and, if requested, those of the most
    likely tokens.

    vLLM's function also computes ranks of tokens, which rlhpc does not need. Compiling that function takes many seconds on a
    CPU, at the first step of each process.
    """
    from vllm.v1.outputs import LogprobsTensors

    tokens = token_ids.unsqueeze(-1)
    token_logprobs = logprobs.gather(-1, tokens)
    if num_logprobs:
        top_logprobs, top_ids = logprobs.topk(num_logprobs, dim=-1)
        tokens, token_logprobs = torch.cat([tokens, top_ids], -1), torch.cat([token_logprobs, top_logprobs], -1)
    return LogprobsTensors(tokens.to(torch.int32), token_logprobs, torch.zeros_like(token_ids))


def log_before_filters(worker: Any) -> bool:
    """Makes vLLM return log-probs after temperature and before top-p and top-k; returns whether it succeeded.

    No mode of vLLM returns these log-probs: `raw_logprobs` are before temperature, `processed_logprobs` after the filters.
    """
    return replace_sampling(worker, _UnfilteredLogprobs, _select_logprobs)


def merge_unlikely_tokens(logits: Tensor, num_top: int, width: int, temperature: float) -> Tensor:
    """Returns logits that keep the most likely tokens and merge all others into one more token.

    The results are log-probs with probabilities that sum to 1, so a softmax leaves them unchanged. The merged log-prob is the
    sum over the other tokens, not the complement of the most likely tokens, which is inexact in float32 if it is small.

    Args:
        logits: `[M, V]`.
        num_top: k, the number of most likely tokens to keep; at most `width`.
        width: Number of token ids; logits of higher ids are dropped.
        temperature: Divisor of the logits.

    Returns:
        `[M, width + 1]` float32: finite for k tokens and, in the last column, for the merged token; -inf elsewhere.
    """
    merged_logprobs = torch.full((len(logits), width + 1), -math.inf, device=logits.device)
    for rows in chunks(len(logits), width, logits.device):
        logprobs = torch.log_softmax(scale_logits(logits[rows, :width], 1.0 / temperature), dim=-1)
        top_logprobs, ids = logprobs.topk(num_top, dim=-1)
        remainder = logprobs.scatter(1, ids, -math.inf).logsumexp(-1)
        merged_logprobs[rows] = merged_logprobs[rows].scatter(1, ids, top_logprobs.clamp_min(FLOOR))
        merged_logprobs[rows, width] = remainder.clamp_min(FLOOR)
    return merged_logprobs


def return_outcomes(worker: Any, num_top: int, width: int, temperature: float) -> None:
    """Makes vLLM's model return a teacher's outcomes wherever its logits are computed.

    The logits are divided by a temperature, which vLLM applies only to tokens that it samples, and with `num_top`, all but the
    most likely tokens are merged into one.

    Args:
        worker: vLLM's worker; each of its model runners computes a prompt's log-probs by the model's `compute_logits`.
        num_top: k, or 0 for logits of all tokens.
        width: See `merge_unlikely_tokens`.
        temperature: Divisor of the logits.
    """
    model, sampler = worker.model_runner.get_model(), worker.model_runner.sampler
    compute_logits = model.compute_logits

    def find_outcomes(*args: Any, **kwargs: Any) -> Tensor:
        logits = compute_logits(*args, **kwargs)
        return (
            merge_unlikely_tokens(logits, num_top, width, temperature)
            if num_top
            else scale_logits(logits, 1.0 / temperature)
        )

    model.compute_logits = find_outcomes
    if isinstance(getattr(sampler, "topk_topp_sampler", None), nn.Module):  # first model runner
        sampler.gather_logprobs = _select_logprobs


#: Maximum number of tokens of one forward pass. All of them have logits at the same time, which vLLM's memory estimate
#: ignores; longer texts are read in chunks.
_MAX_PASS_TOKENS = 2048


class VLLMScores(VLLMProcess):
    """vLLM's `LLMEngine` for scoring.

    A text is submitted as a prompt, and its log-probs are the prompt's. vLLM always samples at least one token after a prompt.
    The engine drops this token, but a text must leave space for it in the context.

    Args:
        cfg: Sections `rollout` and `actor.model` are read, as by `VLLMRollout`.
        model_path: Hugging Face folder or hub name.
        device: `cpu` for the CPU build; a GPU build takes the rank's first visible accelerator.
        seed: Seed of the engine.
        temperature: Divisor of the logits.
        top: Number of the most likely tokens to return, 0 for the text's tokens alone.
        vocabulary: Number of token ids that `top` considers; higher ids are dropped. None keeps all.
        max_tokens: Maximum number of tokens of one forward pass, if below the default.

    Raises:
        ConfigError: vLLM is not installed or of the wrong build, the model does not exist, or memory does not suffice.

    Attributes:
        top: Number of the most likely tokens that `score` returns, at most the size of the vocabulary.
        max_text_tokens: Maximum number of tokens of a text.
    """

    alternative = "set rollout.rollout_backend=null, which computes with transformers"

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
        max_tokens: int = _MAX_PASS_TOKENS,
    ) -> None:
        options = EngineOptions.from_config(cfg, model_path, device)
        config = load_model_config(options.model_path, options.trust_remote_code)
        vocabulary_size = int(config.get_text_config().vocab_size)
        self._width = min(vocabulary_size, vocabulary or vocabulary_size)
        self.top = min(top, self._width)
        self._max_pass_tokens = min(max_tokens, _MAX_PASS_TOKENS)
        if options.max_model_len is not None:
            context_length = (
                getattr(config.get_text_config(), "max_position_embeddings", None) or options.max_model_len + 1
            )
            options = replace(options, max_model_len=min(options.max_model_len + 1, int(context_length)))
        super().__init__(options, config, seed)
        self._engine.collective_rpc(return_outcomes, args=(self.top, self._width, temperature))
        self._request_names = map(str, itertools.count())
        self.max_text_tokens = int(self._engine.model_config.max_model_len) - 1

    def _arguments(self) -> dict[str, Any]:
        return {
            "logprobs_mode": "raw_logprobs",
            "max_logprobs": self.top + 1,
            "max_num_batched_tokens": self._max_pass_tokens,
            "max_num_seqs": None if self._max_num_seqs is None else min(self._max_num_seqs, self._max_pass_tokens),
            "enable_prefix_caching": False,  # a prompt's log-probs are never cached
        }

    def score(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Returns the log-probs of the tokens of some texts.

        Args:
            texts: Texts of two tokens or more each.

        Returns:
            For each text of n tokens, for all but the first: `[n - 1]` float32 log-probs; or, with the k most likely tokens,
            `[n - 1, k + 1, 2]` (see `rlhpc.language.models.divergence.top_logprobs`).

        Raises:
            ConfigError: A text is too long.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        max_length = max(map(len, texts), default=0)
        if max_length > self.max_text_tokens:
            raise ConfigError(
                f"a sequence has {max_length} tokens, and this engine reads at most {self.max_text_tokens} "
                f"(rollout.max_model_len, "
                "and one less than the model's context); raise it, take a model with a longer context, or have shorter "
                "responses"
            )
        request_names = list(itertools.islice(self._request_names, len(texts)))
        for name, token_ids in zip(request_names, texts, strict=True):
            parameters = SamplingParams(
                temperature=0.0,
                max_tokens=1,
                ignore_eos=True,
                detokenize=False,
                flat_logprobs=True,
                prompt_logprobs=self.top + 1 if self.top else 0,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self._engine.add_request(name, {"prompt_token_ids": list(token_ids)}, parameters)
        scores: dict[str, Tensor] = {}
        with self._explain_errors():
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        scores[output.request_id] = self._to_logprob_tensor(
                            output.prompt_logprobs, len(output.prompt_token_ids) - 1
                        )
        return [scores[name] for name in request_names]

    def _to_logprob_tensor(self, outputs: Any, num_rows: int) -> Tensor:
        """Converts vLLM's flat lists of log-probs to a tensor; rows have the text's token, then the most likely outcomes."""
        logprobs = np.asarray(outputs.logprobs, np.float32).reshape(num_rows, -1)
        if not self.top:
            return torch.from_numpy(logprobs[:, 0].copy())
        ids = np.asarray(outputs.token_ids, np.int64).reshape(num_rows, -1)[:, 1:]
        is_token = ids != self._width  # the other entries are the merged token
        top_outcomes = np.stack([logprobs[:, 1:][is_token], ids[is_token]], -1).reshape(num_rows, self.top, 2)
        remainder = np.stack([logprobs[:, 1:][~is_token], np.full(num_rows, -1.0)], -1)[:, None]
        return torch.from_numpy(np.concatenate([top_outcomes, remainder], 1).astype(np.float32))

    def offload(self) -> None:
        """Frees the accelerator for another role: the weights stay on the host. See `VLLMProcess._free_accelerator`."""
        self._free_accelerator(level=1)
