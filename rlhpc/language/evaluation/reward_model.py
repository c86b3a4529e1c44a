"""Evaluation of reward models on preference rows, in training and in `rlhpc eval`.

eval/global_step_<N>/<suite>.json             accuracy with its interval, margin, calibration (or R², Spearman)
eval/global_step_<N>/<suite>.rewards.jsonl    all rows with their rewards, from which the summary is computed
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhpc.algorithms.preference_losses import find_reward_loss
from rlhpc.config.typed import plain, with_value
from rlhpc.language.config.data import suite_named
from rlhpc.language.data.preferences import PreferenceRow, Preferences, encode
from rlhpc.language.data.tokenizer import PromptTokenizer, load_tokenizer
from rlhpc.language.models.micro_batching import Parts, micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.models.value_head import last_values, load_scalar_model, token_values
from rlhpc.language.reporting.eval_metrics import summarize_preferences
from rlhpc.runs.device import evaluation_device
from rlhpc.runs.run_folder import note
from rlhpc.runtime.errors import ConfigError, NonFinite

if TYPE_CHECKING:
    from rlhpc.language.config.data import PreferenceSourceConfig, PreferenceSuiteConfig
    from rlhpc.language.config.run import RewardRunConfig

#: Number of responses of a row, by form of the preferences.
EACH = {"pairs": 2, "labels": 1}


@dataclass(frozen=True)
class Suite:
    """Suite of preference rows.

    Attributes:
        rows: Rows that are not too long.
        num_dropped: Number of rows that are too long.
        encoder: Tokenizer of the rows.
    """

    rows: list[PreferenceRow]
    num_dropped: int
    encoder: PromptTokenizer


def training_rows(cfg: RewardRunConfig) -> Preferences:
    """Returns the rows of `data.train`, in the form that the loss requires.

    Raises:
        ConfigError: The rows cannot be read, or have a different form.
    """
    return Preferences(cfg.data.train, _form(cfg))


def suite_rows(cfg: RewardRunConfig, section: PreferenceSuiteConfig) -> Preferences:
    """Returns the rows of a section of `data.eval`, in the form of `training_rows`."""
    return Preferences(section, _form(cfg), "eval", key=f"data.eval[{section.name}]")


def _form(cfg: RewardRunConfig) -> str:
    return find_reward_loss(cfg.algorithm.loss_type, plain(cfg.algorithm.loss_kwargs))[1]


def most_tokens(max_tokens: int, loss_form: str) -> int:
    """Returns the maximum number of tokens of prompt and response, so that a row fits into one micro-batch."""
    return max_tokens // EACH[loss_form]


def encoder_of(cfg: RewardRunConfig, section: PreferenceSourceConfig, tokenizer: Any, key: str) -> PromptTokenizer:
    """Returns the tokenizer of a section's rows."""
    data_config = cfg.data
    return PromptTokenizer(
        tokenizer, data_config.max_prompt_tokens, data_config.overlong_prompts, section.chat_template, key=key
    )


def suite_of(cfg: RewardRunConfig, section: PreferenceSuiteConfig, tokenizer: Any, loss_form: str) -> Suite:
    """Returns the rows of a section of `data.eval` that are not too long, with their tokenizer.

    Raises:
        ConfigError: The rows cannot be read, or a row is too long and `data.overlong_prompts` is "error".
    """
    key = f"data.eval[{section.name}]"
    encoder = encoder_of(cfg, section, tokenizer, key)
    rows = suite_rows(cfg, section)
    max_tokens = most_tokens(cfg.actor.max_tokens_per_micro_batch, loss_form)
    num_dropped = rows.fit(encoder, max_tokens)
    return Suite([rows[index] for index in range(len(rows))], num_dropped, encoder)


def suites_of(cfg: RewardRunConfig, tokenizer: Any, loss_form: str) -> dict[str, Suite]:
    """Returns the suites of `workflow.eval_suites`, on which training (`runner.val_check_interval`) also evaluates."""
    suite_names = list(cfg.workflow.eval_suites)
    return {name: suite_of(cfg, suite_named(cfg.data.eval, name), tokenizer, loss_form) for name in suite_names}


def batch_of(rows: Sequence[PreferenceRow], encoder: PromptTokenizer, max_length: int, pad: int) -> TokenBatch:
    """Builds a batch of all responses of the rows. Responses of a row are adjacent; `reward` holds the rows' targets.

    Args:
        rows: Rows that are not too long.
        encoder: Tokenizer of the model.
        max_length: Maximum number of tokens of prompt and response.
        pad: Id of the padding token.

    Raises:
        ConfigError: A row is too long.
    """
    samples: list[list[int]] = []
    target_rewards: list[float] = []
    for row in rows:
        response_ids = encode(row, encoder, max_length)
        assert response_ids is not None, "those that do not fit are dropped at the start"
        samples += response_ids
        target_rewards += [row.target] * len(response_ids)
    batch = TokenBatch.from_sequences(samples, [[True] * len(ids) for ids in samples], pad_id=pad)
    return dataclasses.replace(batch, reward=torch.tensor(target_rewards, dtype=torch.float32))


def split_rows(batch: TokenBatch, responses_per_row: int, max_tokens: int) -> Parts:
    """Divides rows into micro-batches; the responses of a row stay together.

    Args:
        batch: All rows.
        responses_per_row: Number of responses per row.
        max_tokens: `actor.max_tokens_per_micro_batch`.
    """
    if not len(batch):
        return []
    offsets = torch.arange(responses_per_row)
    row_groups = micro_batches(batch.lengths.view(-1, responses_per_row).amax(1) * responses_per_row, max_tokens)
    return [
        (row_indices, batch.select((row_indices[:, None] * responses_per_row + offsets).flatten()))
        for row_indices in row_groups
    ]


def rewards_of(
    rows: Sequence[PreferenceRow],
    encoder: PromptTokenizer,
    max_length: int,
    pad: int,
    max_tokens: int,
    forward: Callable[[TokenBatch], Tensor],
    equalize: Callable[[Parts, TokenBatch], Parts] = lambda score_parts, _: score_parts,
) -> list[list[float]]:
    """Computes the rewards of each row's responses.

    Args:
        rows: Rows, all of one form.
        encoder, max_length, pad: See `batch_of`.
        max_tokens: Maximum number of tokens of a micro-batch, including padding.
        forward: Function that returns the values `[T]` of a batch's tokens.
        equalize: Function that gives all ranks the same number of micro-batches.

    Raises:
        NonFinite: A reward is not finite.
    """
    full_batch = batch_of(rows, encoder, max_length, pad)
    responses_per_row = len(rows[0].responses) if rows else 1
    rewards_by_row: list[list[float]] = [[] for _ in rows]
    for row_indices, batch in equalize(split_rows(full_batch, responses_per_row, max_tokens), full_batch):
        predictions = forward(batch).cpu()
        rewards = last_values(predictions, batch).view(-1, responses_per_row).tolist() if len(row_indices) else []
        for index, row_rewards in zip(row_indices.tolist(), rewards, strict=True):
            if not all(map(math.isfinite, row_rewards)):
                raise NonFinite(f"the reward of row {rows[index].prompt.id} is {row_rewards}")
            rewards_by_row[index] = row_rewards
    return rewards_by_row


def preference_validation_metrics(
    suite_parts: Sequence[Mapping[str, Sequence[dict[str, Any]]]], loss_form: str, loss: Callable[..., Tensor]
) -> dict[str, float]:
    """Computes metrics such as `eval/accuracy` from the rows of all ranks; further suites have `eval/<suite>/accuracy`.

    Args:
        suite_parts: Rows by suite, for each rank.
        loss_form, loss: See `find_reward_loss`.
    """
    metrics: dict[str, float] = {}
    for suite_index, suite in enumerate(suite_parts[0]):
        rows = sorted((row for rank_rows in suite_parts for row in rank_rows[suite]), key=lambda row: int(row["place"]))
        rewards = torch.tensor([row["rewards"] for row in rows], dtype=torch.float64).unbind(1)
        target_rewards = torch.tensor([row["target"] for row in rows], dtype=torch.float64)
        summary = {
            **summarize_preferences(rows, loss_form),
            "rows": len(rows),
            "loss": float(loss(*rewards, target_rewards).mean()),
        }
        metric_names = (
            "accuracy",
            "loss",
            "rows",
            "margin",
            "calibration_error",
            "reward_mean",
            "mse",
            "r2",
            "spearman",
        )
        prefix = f"eval/{suite}" if suite_index else "eval"
        metrics |= {f"{prefix}/{name}": float(summary[name]) for name in metric_names if summary.get(name) is not None}
    return metrics


def evaluate_reward_model(
    cfg: RewardRunConfig, model: str | Path, suite: str = "default", output: str | Path | None = None
) -> dict[str, Any]:
    """Evaluates a model on one suite of `data.eval`.

    Args:
        cfg: The run's configuration: sections `algorithm`, `data`, and `actor.model`.
        model: A checkpoint `global_step_<N>` of a reward model's run, or a Hugging Face folder or name.
        suite: Name of a suite; `default` is the first suite if no suite has that name.
        output: JSON file to write, atomically; the rows go to `<stem>.rewards.jsonl` in the same folder.

    Returns:
        See `rlhpc.language.reporting.eval_metrics.summarize_preferences`; also dropped, suite, global_step, model,
        loss_type, dtype and backend.

    Raises:
        ConfigError: The suite is unknown, or model or data are not available.
        CheckpointError: The checkpoint is invalid.
    """
    from rlhpc.language.evaluation.evaluate import evaluated_step, model_folder, write_result
    from rlhpc.language.models.loading import compute_dtype

    section = suite_named(cfg.data.eval, suite)
    loss_form = _form(cfg)
    device = evaluation_device(cfg)
    with model_folder(model, cfg.actor.model.trust_remote_code) as (folder, step):
        tokenizer = load_tokenizer(folder, cfg.actor.model.trust_remote_code)
        suite_data = suite_of(cfg, section, tokenizer, loss_form)
        model_config = with_value(cfg.actor.model, "model_path", folder)
        dtype = compute_dtype(model_config, device)
        module = load_scalar_model(model_config, dtype=dtype, seed=cfg.runner.seed).to(device).eval()
        max_tokens = cfg.actor.max_tokens_per_micro_batch
        with torch.no_grad():
            rewards = rewards_of(
                suite_data.rows,
                suite_data.encoder,
                most_tokens(max_tokens, loss_form),
                int(tokenizer.pad_token_id or 0),
                max_tokens,
                lambda batch: token_values(module, batch.to(device)),
            )
    rows = [
        {
            "id": row.prompt.id,
            "level": row.prompt.level,
            "prompt": row.prompt.question,
            "responses": list(row.responses),
            "target": row.target,
            "rewards": row_rewards,
        }
        for row, row_rewards in zip(suite_data.rows, rewards, strict=True)
    ]
    summary = {
        **summarize_preferences(rows, loss_form),
        "dropped": suite_data.num_dropped,
        "suite": suite,
        "global_step": evaluated_step(model, step, output),
        "model": str(model),
        "loss_type": cfg.algorithm.loss_type,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": "torch",
    }
    if output is not None:
        path = Path(output)
        write_result(path, summary, rows, path.with_name(f"{path.stem}.rewards.jsonl"))
    return summary


def check_reward_model(cfg: RewardRunConfig) -> None:
    """Checks model, tokenizer and data before the start of a run.

    Raises:
        ConfigError: Model, tokenizer or data cannot be used; the message names the key.
    """
    model, loss_form = cfg.actor.model, _form(cfg)
    tokenizer = load_tokenizer(model.model_path, model.trust_remote_code)
    load_scalar_model(model, empty=True)
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"actor.model.model_path={model.model_path}: the tokenizer has neither a padding nor an end token; a reward "
            "model needs one"
        )
    encoder = encoder_of(cfg, cfg.data.train, tokenizer, "data.train")
    rows = training_rows(cfg)
    num_rows = len(rows)
    if num_dropped := rows.fit(encoder, most_tokens(cfg.actor.max_tokens_per_micro_batch, loss_form)):
        note(
            f"data.train: {num_dropped} of {num_rows} rows are dropped, because they are too long (data.overlong_prompts=drop)"
        )
    if cfg.actor.training_backend == "deepspeed":
        from rlhpc.language.models.loading import compute_dtype
        from rlhpc.training.deepspeed_config import deepspeed_config

        deepspeed_config(cfg.actor, compute_dtype(model, "cpu"))
    if cfg.runner.val_check_interval > 0:
        suites_of(cfg, tokenizer, loss_form)
