"""A frozen model in vLLM that writes nothing: it says how likely it finds the tokens that another one wrote."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.language.engines.ends import load_model_config
from rlhpc.language.engines.engine import EngineOptions
from rlhpc.language.engines.vllm_logprobs import say_outcomes
from rlhpc.language.engines.vllm_process import VLLMProcess
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config import LanguageConfig

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
            likely ones, `[n - 1, k + 1, 2]` (see `rlhpc.language.tokens.divergence.top_logprobs`).

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
