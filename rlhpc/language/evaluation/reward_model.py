"""Rewards of rows: how a reward model is asked, in training and in `rlhpc eval`.

eval/global_step_<N>/<suite>.json             accuracy with its interval, margin, calibration (or R², Spearman)
eval/global_step_<N>/<suite>.rewards.jsonl    every row with its rewards; the numbers follow from it
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
from rlhpc.config.typed import plain
from rlhpc.language.config.data import suite_named
from rlhpc.language.config.models import LanguageModelConfig
from rlhpc.language.data.preferences import PreferenceRow, Preferences, encode
from rlhpc.language.data.tokenizer import PromptTokenizer, load_tokenizer
from rlhpc.language.models.micro_batching import Parts, micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.models.value_head import last_values, load_scalar_model, token_values
from rlhpc.language.reporting.eval_metrics import summarize_preferences
from rlhpc.runs.run_folder import note
from rlhpc.runtime.devices import accelerator
from rlhpc.runtime.errors import ConfigError, NonFinite

if TYPE_CHECKING:
    from rlhpc.language.config.data import PreferenceSourceConfig, PreferenceSuiteConfig
    from rlhpc.language.config.run import RewardRunConfig

#: Responses of a row.
EACH = {"pairs": 2, "labels": 1}


@dataclass(frozen=True)
class Suite:
    """What an evaluation asks.

    Attributes:
        rows: Those that are not too long.
        dropped: How many are.
        encoder: Makes tokens of them.
    """

    rows: list[PreferenceRow]
    dropped: int
    encoder: PromptTokenizer


def training_rows(cfg: RewardRunConfig) -> Preferences:
    """The rows of `data.train`, in the form that the loss compares.

    Raises:
        ConfigError: They cannot be read, or are not of that form.
    """
    return Preferences(cfg.data.train, _form(cfg))


def suite_rows(cfg: RewardRunConfig, section: PreferenceSuiteConfig) -> Preferences:
    """The rows of a section of `data.eval`, as `training_rows`."""
    return Preferences(section, _form(cfg), "eval", key=f"data.eval[{section.name}]")


def _form(cfg: RewardRunConfig) -> str:
    return find_reward_loss(cfg.algorithm.loss_type, plain(cfg.algorithm.loss_kwargs))[1]


def most_tokens(max_tokens: int, form: str) -> int:
    """Most tokens of a response with its prompt: a pair goes into one micro-batch."""
    return max_tokens // EACH[form]


def encoder_of(cfg: RewardRunConfig, section: PreferenceSourceConfig, tokenizer: Any, key: str) -> PromptTokenizer:
    """What makes tokens of a section's rows."""
    data = cfg.data
    return PromptTokenizer(tokenizer, data.max_prompt_tokens, data.overlong_prompts, section.chat_template, key=key)


def suite_of(cfg: RewardRunConfig, section: PreferenceSuiteConfig, tokenizer: Any, form: str) -> Suite:
    """The rows of a section of `data.eval`.

    Raises:
        ConfigError: They cannot be read, or one is too long.
    """
    key = f"data.eval[{section.name}]"
    encoder = encoder_of(cfg, section, tokenizer, key)
    rows = suite_rows(cfg, section)
    most = most_tokens(cfg.actor.max_tokens_per_micro_batch, form)
    dropped = rows.fit(encoder, most)
    return Suite([rows[index] for index in range(len(rows))], dropped, encoder)


def suites_of(cfg: RewardRunConfig, tokenizer: Any, form: str) -> dict[str, Suite]:
    """The suites of `workflow.eval_suites`, which are also those of `runner.val_check_interval`."""
    names = list(cfg.workflow.eval_suites)
    return {name: suite_of(cfg, suite_named(cfg.data.eval, name), tokenizer, form) for name in names}


def batch_of(rows: Sequence[PreferenceRow], encoder: PromptTokenizer, most: int, pad: int) -> TokenBatch:
    """The responses of rows as samples; those of a row stand next to each other, and `reward` has each one's target.

    Args:
        rows: What is asked; too long ones have been dropped.
        encoder: Of the model.
        most: Most tokens of a response with its prompt.
        pad: Token of padding.

    Raises:
        ConfigError: One is too long.
    """
    samples: list[list[int]] = []
    targets: list[float] = []
    for row in rows:
        encoded = encode(row, encoder, most)
        assert encoded is not None, "those that do not fit are dropped at the start"
        samples += encoded
        targets += [row.target] * len(encoded)
    batch = TokenBatch.of(samples, [[True] * len(ids) for ids in samples], pad_id=pad)
    return dataclasses.replace(batch, reward=torch.tensor(targets, dtype=torch.float32))


def cut(whole: TokenBatch, each: int, max_tokens: int) -> Parts:
    """Micro-batches of rows, whose responses stay together.

    Args:
        whole: All rows.
        each: Responses of a row.
        max_tokens: `actor.max_tokens_per_micro_batch`.
    """
    if not len(whole):
        return []
    places = torch.arange(each)
    parts = micro_batches(whole.lengths.view(-1, each).amax(1) * each, max_tokens)
    return [(part, whole.select((part[:, None] * each + places).flatten())) for part in parts]


def rewards_of(
    rows: Sequence[PreferenceRow],
    encoder: PromptTokenizer,
    most: int,
    pad: int,
    max_tokens: int,
    forward: Callable[[TokenBatch], Tensor],
    evenly: Callable[[Parts, TokenBatch], Parts] = lambda parts, _: parts,
) -> list[list[float]]:
    """The rewards of each row's responses.

    Args:
        rows: What is asked, all of one form.
        encoder, most, pad: See `batch_of`.
        max_tokens: Most tokens, including padding, that are valued at a time.
        forward: `[T]` values of a batch's tokens.
        evenly: Gives all ranks equally many micro-batches.

    Raises:
        NonFinite: A reward is not finite.
    """
    whole = batch_of(rows, encoder, most, pad)
    each = len(rows[0].responses) if rows else 1
    found: list[list[float]] = [[] for _ in rows]
    for part, batch in evenly(cut(whole, each, max_tokens), whole):
        values = forward(batch).cpu()
        rewards = last_values(values, batch).view(-1, each).tolist() if len(part) else []
        for place, own in zip(part.tolist(), rewards, strict=True):
            if not all(map(math.isfinite, own)):
                raise NonFinite(f"the reward of row {rows[place].prompt.id} is {own}")
            found[place] = own
    return found


def preference_validation_metrics(
    parts: Sequence[Mapping[str, Sequence[dict[str, Any]]]], form: str, loss: Callable[..., Tensor]
) -> dict[str, float]:
    """Metrics from the ranks' rows: `eval/accuracy` and so on; of each further suite `eval/<suite>/accuracy`.

    Args:
        parts: Of each rank, suite → its rows.
        form, loss: See `find_reward_loss`.
    """
    metrics: dict[str, float] = {}
    for number, suite in enumerate(parts[0]):
        rows = sorted((row for part in parts for row in part[suite]), key=lambda row: int(row["place"]))
        rewards = torch.tensor([row["rewards"] for row in rows], dtype=torch.float64).unbind(1)
        targets = torch.tensor([row["target"] for row in rows], dtype=torch.float64)
        result = {**summarize_preferences(rows, form), "rows": len(rows), "loss": float(loss(*rewards, targets).mean())}
        names = ("accuracy", "loss", "rows", "margin", "calibration_error", "reward_mean", "mse", "r2", "spearman")
        prefix = f"eval/{suite}" if number else "eval"
        metrics |= {f"{prefix}/{name}": float(result[name]) for name in names if result.get(name) is not None}
    return metrics


def evaluate_reward_model(
    cfg: RewardRunConfig, model: str | Path, suite: str = "default", output: str | Path | None = None
) -> dict[str, Any]:
    """Evaluates a model on one suite of `data.eval`.

    Args:
        cfg: The run's configuration: sections `algorithm`, `data`, and `actor.model`.
        model: A checkpoint `global_step_<N>` of a reward model's run, or a Hugging Face folder or name.
        suite: Name of a suite; `default` is the first where none has that name.
        output: JSON file to write, atomically; the rows go to `<stem>.rewards.jsonl` beside it.

    Returns:
        See `rlhpc.language.reporting.eval_metrics.summarize_preferences`; besides dropped, suite, global_step, model,
        loss_type and dtype.

    Raises:
        ConfigError: There is no such suite, or model or data cannot be had.
        CheckpointError: The checkpoint has faults.
    """
    from rlhpc.language.evaluation.evaluate import model_folder, step_evaluated, write_result
    from rlhpc.language.models.loading import compute_dtype

    section = suite_named(cfg.data.eval, suite)
    form = _form(cfg)
    device = torch.device(accelerator() or "cpu")
    with model_folder(model, cfg.actor.model.trust_remote_code) as (folder, step):
        tokenizer = load_tokenizer(folder, cfg.actor.model.trust_remote_code)
        asked = suite_of(cfg, section, tokenizer, form)
        own = _model_of(cfg, folder)
        dtype = compute_dtype(own, device)
        module = load_scalar_model(own, dtype=dtype, seed=cfg.runner.seed).to(device).eval()
        max_tokens = cfg.actor.max_tokens_per_micro_batch
        with torch.no_grad():
            rewards = rewards_of(
                asked.rows,
                asked.encoder,
                most_tokens(max_tokens, form),
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
            "rewards": found,
        }
        for row, found in zip(asked.rows, rewards, strict=True)
    ]
    result = {
        **summarize_preferences(rows, form),
        "dropped": asked.dropped,
        "suite": suite,
        "global_step": step_evaluated(model, step, output),
        "model": str(model),
        "loss_type": cfg.algorithm.loss_type,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": "torch",
    }
    if output is not None:
        path = Path(output)
        write_result(path, result, rows, path.with_name(f"{path.stem}.rewards.jsonl"))
    return result


def _model_of(cfg: RewardRunConfig, path: str | None) -> LanguageModelConfig:
    """`actor.model` with another path."""
    model = cfg.actor.model
    return LanguageModelConfig(
        model_path=path,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    )


def check_reward_model(cfg: RewardRunConfig) -> None:
    """Refuses what would fail after the start: model, tokenizer, dataset.

    Raises:
        ConfigError: Names the key.
    """
    model, form = cfg.actor.model, _form(cfg)
    tokenizer = load_tokenizer(model.model_path, model.trust_remote_code)
    load_scalar_model(_model_of(cfg, model.model_path), empty=True)
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"actor.model.model_path={model.model_path}: the tokenizer has neither a padding nor an end token; a reward "
            "model needs one"
        )
    encoder = encoder_of(cfg, cfg.data.train, tokenizer, "data.train")
    rows = training_rows(cfg)
    count = len(rows)
    if dropped := rows.fit(encoder, most_tokens(cfg.actor.max_tokens_per_micro_batch, form)):
        note(
            f"data.train: {dropped} of {count} rows are dropped, because they are too long (data.overlong_prompts=drop)"
        )
    if cfg.actor.training_backend.lower() == "deepspeed":
        from rlhpc.language.models.loading import compute_dtype
        from rlhpc.training.deepspeed_config import deepspeed_config

        deepspeed_config(cfg.actor, compute_dtype(model, "cpu"))
    if cfg.runner.val_check_interval > 0:
        suites_of(cfg, tokenizer, form)
