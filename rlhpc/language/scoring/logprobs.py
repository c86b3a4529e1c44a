"""Log-probs of a reference or teacher: of sampled tokens, and of the most likely tokens at their positions."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.vllm_logprobs import VLLMScores
from rlhpc.language.hugging_face import transformers
from rlhpc.language.models.builtin import resolve_model
from rlhpc.language.models.divergence import top_logprobs
from rlhpc.language.models.loading import compute_dtype, load_causal_lm
from rlhpc.language.models.logprobs import LogitRows, logit_rows, token_scores
from rlhpc.language.models.packing import pack, packs, reads_prefixes, reads_rows, unpack
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.scoring.groups import TEACHER_INDEX, engine_config, explain_engine_errors, teachers_of
from rlhpc.language.scoring.registry import Scorer, ScoringGroup


class LogProbs(Scorer):
    """Scorer by a frozen causal language model: the log-probs of the policy's tokens at `rollout.temperature`."""

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup) -> None:
        super().__init__(cfg, device, group)
        section = group.model_section
        dtype = compute_dtype(group.model, device, section)
        model = load_causal_lm(group.model, dtype=dtype, key=f"{section}.model_path")
        packed_model = pack(model)
        self.model = model.eval().requires_grad_(False).to(device)
        if packed_model and not reads_rows(self.model, device, dtype):
            unpack(self.model)
        self.packed = packs(self.model)
        self.shares_prefixes = cfg.actor.share_prefixes and self.packed and reads_prefixes(self.model, device, dtype)
        self.temperature = cfg.rollout.temperature

    def score(self, batch: TokenBatch) -> torch.Tensor:
        """Implements `Scorer.score`."""
        return token_scores(self.model, batch, self.temperature).logprobs

    def rows(self, batch: TokenBatch) -> LogitRows:
        """Returns the logits that predict the trained tokens (`logit_rows`)."""
        return logit_rows(self.model, batch)

    def offload(self) -> None:
        """Implements `Scorer.offload`."""
        self.model.to("cpu")

    def reload(self) -> None:
        """Implements `Scorer.reload`."""
        self.model.to(self.device)


class TopLogProbs(LogProbs):
    """Scorer by a frozen causal language model: the log-probs of the `k` most likely tokens at the position of each trained
    token, and of all other tokens together, at `rollout.temperature` (`top_logprobs`).

    Args:
        k: Number of tokens.
    """

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup, k: int = 64) -> None:
        super().__init__(cfg, device, group)
        self.k, self.vocabulary = k, vocabulary_of(cfg)

    def score(self, batch: TokenBatch) -> torch.Tensor:
        """Returns log-probs and token ids as in `top_logprobs`, `[T, k + 1, 2]`."""
        return top_logprobs(self.rows(batch), batch, self.k, self.temperature, self.vocabulary)


class RoutedLogProbs(Scorer):
    """Scorer by several teachers (`teacher.by_task`): each sample is scored by the teacher that its column names.

    Args:
        k: Number of most likely tokens (`TopLogProbs`); 0 for the policy's tokens (`LogProbs`).
    """

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup, k: int = 0) -> None:
        super().__init__(cfg, device, group)
        self.teachers: list[LogProbs] = []
        for index, model in enumerate(teachers_of(cfg).values()):
            section = f"teacher.by_task[{index - 1}]" if index else "teacher"
            teacher_group = replace(group, model=model, section=section)
            self.teachers.append(
                TopLogProbs(cfg, device, teacher_group, k) if k else LogProbs(cfg, device, teacher_group)
            )
        self.packed = all(teacher.packed for teacher in self.teachers)
        self.shares_prefixes = all(teacher.shares_prefixes for teacher in self.teachers)

    def score(self, batch: TokenBatch) -> torch.Tensor:
        """Implements `Scorer.score`."""
        samples_by_teacher = self._route(_teacher_indices(batch))
        columns = {index: self.teachers[index].score(batch.select(s)) for index, s in samples_by_teacher.items()}
        first_column = next(iter(columns.values()))
        values = first_column.new_zeros(batch.tokens, *first_column.shape[1:])
        for index, column in columns.items():
            values[batch.tokens_of(samples_by_teacher[index]).to(values.device)] = column
        return values

    def rows(self, batch: TokenBatch) -> LogitRows:
        """Returns the logits that predict the trained tokens, each by its sample's teacher (`logit_rows`).

        Rows of narrower teachers end with −∞.
        """
        indices = _teacher_indices(batch)
        rows_by_teacher = {
            index: self.teachers[index].rows(batch.select(samples)) for index, samples in self._route(indices).items()
        }
        # A teacher's rows are those of its samples in the same order, so a slice of all rows has a slice of each teacher's.
        owners = indices.repeat_interleave(batch.lengths)[batch.predictors()[0].cpu()]
        width = max(rows.width for rows in rows_by_teacher.values())

        def make(part: slice) -> torch.Tensor:
            part_owners, outputs = owners[part], list[tuple[torch.Tensor, torch.Tensor]]()
            for index in part_owners.unique().tolist():
                is_owner = part_owners == index
                first_row = int((owners[: part.start] == index).sum())
                logits = rows_by_teacher[index].make(slice(first_row, first_row + int(is_owner.sum())))
                outputs.append((is_owner, logits))
            all_logits = outputs[0][1].new_full((len(part_owners), width), -torch.inf)
            for is_owner, logits in outputs:
                all_logits[torch.nonzero(is_owner).flatten().to(logits.device), : logits.shape[1]] = logits
            return all_logits

        return LogitRows(len(owners), width, next(iter(rows_by_teacher.values())).device, make)

    def _route(self, indices: torch.Tensor) -> dict[int, torch.Tensor]:
        """Returns the samples of each teacher that has any, ascending; of a batch without samples, none of the first."""
        samples = {index: torch.nonzero(indices == index).flatten() for index in range(len(self.teachers))}
        return {index: part for index, part in samples.items() if len(part)} or {0: samples[0]}

    def offload(self) -> None:
        """Implements `Scorer.offload`."""
        for teacher in self.teachers:
            teacher.offload()

    def reload(self) -> None:
        """Implements `Scorer.reload`."""
        for teacher in self.teachers:
            teacher.reload()


def _teacher_indices(batch: TokenBatch) -> torch.Tensor:
    """Returns the index of each sample's teacher, on the host; 0 for a sample without tokens.

    A prompt's tokens have 0 in columns of rollout ranks, so the last token tells.
    """
    indices, has_tokens = torch.zeros(len(batch), dtype=torch.int64), batch.lengths > 0
    indices[has_tokens] = batch.columns[TEACHER_INDEX].cpu()[batch.cu_seqlens[1:][has_tokens] - 1].long()
    return indices


def vocabulary_of(cfg: GrpoConfig) -> int | None:
    """Returns the number of logits of the trained model. Padding may give a model with the same tokenizer more logits."""
    model = cfg.actor.model
    model_config = transformers().AutoConfig.from_pretrained(
        str(model.model_path), trust_remote_code=model.trust_remote_code
    )
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    return None if vocab_size is None else int(vocab_size)


class EngineLogProbs(Scorer):
    """Scorer by a teacher in a vLLM engine: log-probs at `rollout.temperature` of the policy's tokens or, with `k`, of the
    most likely tokens at their positions and of all other tokens together.

    Args:
        k: Number of most likely tokens; 0 for the policy's tokens.
    """

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup, k: int = 0) -> None:
        super().__init__(cfg, device, group)
        self.group_section, config = group, engine_config(cfg.teacher, takes_turns=cfg.actor.offload_in_rollout)
        with explain_engine_errors(group):
            self.engine = VLLMScores(
                config,
                model_path=resolve_model(cfg.teacher.model),
                device=device,
                seed=cfg.runner.seed,
                temperature=cfg.rollout.temperature,
                top=k,
                vocabulary=vocabulary_of(cfg) if k else None,
                max_tokens=group.max_tokens,
            )

    def score(self, batch: TokenBatch) -> torch.Tensor:
        """Returns log-probs of all tokens, `[T]`; with `k`, log-probs and token ids as in `top_logprobs`, `[T, k + 1, 2]`."""
        top_k = self.engine.top
        ids, is_required = batch.ids.cpu(), torch.ones(batch.tokens, dtype=torch.bool)
        if top_k:
            is_required = torch.zeros_like(is_required).index_fill_(0, batch.predictors()[0].cpu(), True)
        prompts, position_groups = list[list[int]](), list[torch.Tensor]()
        for sequence_start, sequence_end in itertools.pairwise(batch.cu_seqlens.tolist()):
            required_positions = 1 + torch.nonzero(is_required[sequence_start + 1 : sequence_end]).flatten()
            if len(required_positions):
                prompts.append(ids[sequence_start : sequence_start + int(required_positions[-1]) + 1].tolist())
                position_groups.append(sequence_start + required_positions)
        with explain_engine_errors(self.group_section):
            scores = self.engine.score(prompts)
        logprobs = torch.zeros(batch.tokens, *((top_k + 1, 2) if top_k else ()))
        for prompt_logprobs, prompt_positions, prompt_ids in zip(scores, position_groups, prompts, strict=True):
            logprobs[prompt_positions] = prompt_logprobs[
                prompt_positions - (int(prompt_positions[-1]) + 1 - len(prompt_ids)) - 1
            ]
        return logprobs

    def offload(self) -> None:
        """Implements `Scorer.offload`."""
        self.engine.offload()

    def reload(self) -> None:
        """Implements `Scorer.reload`."""
        self.engine.reload()

    def close(self) -> None:
        """Implements `Scorer.close`."""
        self.engine.close()
