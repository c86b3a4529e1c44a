"""Evaluation of language models (`rlhpc eval`): an engine answers a suite of problems, and reward functions score the
answers.

    eval/global_step_<N>/<suite>.json             accuracy, pass@k, majority, levels, each with an interval
    eval/global_step_<N>/<suite>.samples.jsonl    all prompts, responses and scores, from which the summary is computed
    eval/global_step_<N>/<suite>.images/          small copies of the prompts' images, for pages

All files are the same for the same model, configuration, seed and engine.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

from rlhpc.checkpoint import require_valid
from rlhpc.checkpoint.export_folder import default_output
from rlhpc.checkpoint.manifest import MANIFEST, digest, read_manifest
from rlhpc.config.typed import with_value
from rlhpc.jobs.paths import step_of
from rlhpc.language.agents.episodes import Episode, sample_of
from rlhpc.language.agents.registry import Generation, make_generation, roles_of
from rlhpc.language.config.data import EvalDataConfig, suite_named
from rlhpc.language.config.rewards import RewardConfig, RewardTermConfig
from rlhpc.language.config.run import LanguageConfig
from rlhpc.language.data import PromptTokenizer, load_tokenizer, make_dataset
from rlhpc.language.data.images import digest_of, make_preview
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.data.tokenizer import context_tokens
from rlhpc.language.engines import Request, SamplingParams
from rlhpc.language.engines.registry import make_engine
from rlhpc.language.models.builtin import resolve_model
from rlhpc.language.multi_policy import folders_of
from rlhpc.language.reporting.eval_metrics import summarize
from rlhpc.language.reporting.sample_pages import previews_path, samples_path
from rlhpc.language.rewards import Sample
from rlhpc.language.rewards.math_verifier import extract, normalize_answer
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.rewards.registry import check_problems
from rlhpc.language.scoring.reward_aggregator import RewardScorer, make_local_aggregator
from rlhpc.language.training.prompt_dispatch import seed_of
from rlhpc.metrics.logger import ProgressBar
from rlhpc.metrics.provenance import describe_samples
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded, NonFinite
from rlhpc.runtime.files import expand_home, read_json, replace_durably
from rlhpc.runtime.text import parenthesized_interval

#: Maximum number of tokens of an answer whose log-probs are written.
_MAX_DRAWN_TOKENS = 2048
#: Maximum bytes of all copies of an evaluation's images together, and pixels of a copy's longer side.
_MAX_PREVIEW_BYTES, _PREVIEW_SIDE = 64 << 20, 384


def transcript(episode: Episode, tokenizer: Any, roles: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns `{"episode": […]}` with a sample for each leaf of the turn tree; of an answer of one turn, `{"drawn": […]}` with
    the text and the log-prob of its first tokens.

    A sample has its `role` and its `parts`. A part is input text (`read`) or sampled tokens (`drawn`, a text and a log-prob
    for each token), with the number of the turn, and the turn's `reward`, if it has one. Sampled tokens that are trained in
    another sample or not at all are part of `read`.

    Args:
        episode: Finished episode.
        tokenizer: Tokenizer of the model.
        roles: Names of the roles.
    """
    if episode.outcome is None and episode.turns < 2:
        num_drawn = min(sum(episode.loss_mask), _MAX_DRAWN_TOKENS)  # an agent's last answer may follow
        return {"drawn": _pair_tokens(tokenizer, episode.token_ids[:num_drawn], episode.logprobs[:num_drawn])}
    return {"episode": [_sample(sample, tokenizer, roles) for sample in episode.samples]}


def _sample(sample: Episode, tokenizer: Any, roles: tuple[str, ...]) -> dict[str, Any]:
    """Returns the transcript of a sample; see `transcript`."""
    runs: list[dict[str, Any]] = [{"turn": 0, "read": _text(tokenizer, sample.prompt_ids)}]
    run_start = 0
    for (turn, is_sampled), mask_run in groupby(zip(sample.turn_ids, sample.loss_mask, strict=True)):
        run_end = run_start + len(list(mask_run))
        ids = sample.token_ids[run_start:run_end]
        if is_sampled:
            token_logprobs = _pair_tokens(tokenizer, ids, sample.logprobs[run_start:run_end])
            reward = sum(sample.rewards[run_start:run_end])
            runs.append({"turn": turn, "drawn": token_logprobs, **({"reward": reward} if reward else {})})
        else:
            runs.append({"turn": turn, "read": _text(tokenizer, ids)})
        run_start = run_end
    return {"role": roles[sample.role] if sample.role < len(roles) else "", "parts": runs}


def _pair_tokens(tokenizer: Any, ids: Sequence[int], logprobs: Sequence[float]) -> list[list[Any]]:
    """Returns the text and the log-prob of each token."""
    return [[_text(tokenizer, [token]), round(logprob, 4)] for token, logprob in zip(ids, logprobs, strict=True)]


def _text(tokenizer: Any, ids: Any) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


#: Pause in seconds when neither engine nor reward functions have results.
_IDLE_S = 0.002
#: Rewards for which all right answers to a problem are equal to the reference, in any notation.
_UNIQUE_ANSWER_REWARDS = ("math", "exact")
#: Problems of a suite: prompt, token ids, positions of images in the token ids, and tokenizer.
Problems = Sequence[tuple[Prompt, tuple[int, ...], list[int], PromptTokenizer]]
#: Methods that extract the final answer of a text (`extract`).
_EXTRACTION_METHODS = ("boxed", "####", "tag", "whole")


def evaluate_language_model(
    cfg: LanguageConfig,
    model: str | Path,
    suite: str = "default",
    output: str | Path | None = None,
    *,
    backend: str | None = None,
    global_step: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Evaluates a model on one suite of `data.eval`.

    Args:
        cfg: The run's configuration: sections `data`, `reward`, `rollout`, `actor.model`, and `runner.seed`.
        model: A checkpoint `global_step_<N>` of a language model's run, or a Hugging Face folder or name.
        suite: Name of a suite; `default` is the first suite if no suite has that name.
        output: JSON file to write, atomically; the samples go to `<stem>.samples.jsonl` in the same folder.
        backend: Engine; by default `rollout.rollout_backend`.
        global_step: Step of the evaluation; by default the result of `evaluated_step`.
        progress: Whether to show the number of scored answers on stderr.

    Returns:
        See `rlhpc.language.reporting.eval_metrics.summarize`; also dropped (problems with too long prompts), suite,
        global_step, model, backend, seed, temperature, top_p, top_k and max_new_tokens.

    Raises:
        ConfigError: The suite is unknown, there are no reward terms, or model, engine or data are not available.
        CheckpointError: The checkpoint is invalid.
    """
    section = find_suite(cfg, suite)
    if not cfg.reward.terms:
        raise ConfigError("reward.terms is empty; say how answers are judged, such as [{name: math}]")
    _check_samples(section, suite)
    if backend is not None:
        cfg = with_value(cfg, "rollout.rollout_backend", backend)
    with model_folder(model, cfg.actor.model.trust_remote_code) as (folder, step):
        model_path = next(iter(folders_of(cfg, folder).values()))
        tokenizer = load_tokenizer(model_path, cfg.actor.model.trust_remote_code)
        problems, num_dropped = problems_of(cfg, section, tokenizer)
        rows = answer_problems(problems, cfg, section, suite, folder, tokenizer, progress)
    summary = {
        **summarize(rows),
        "dropped": num_dropped,
        "suite": suite,
        "global_step": evaluated_step(model, step, output) if global_step is None else global_step,
        "model": str(model),
        "backend": cfg.rollout.rollout_backend,
        "seed": cfg.runner.seed,
        "temperature": section.temperature,
        "top_p": cfg.rollout.top_p,
        "top_k": cfg.rollout.top_k,
        "max_new_tokens": cfg.rollout.max_new_tokens,
    }
    if output is not None:
        _write_previews(problems, rows, section.samples, previews_path(Path(output)))
        write_result(Path(output), summary, rows, samples_path(Path(output)))
    return summary


def _write_previews(problems: Problems, rows: Sequence[dict[str, Any]], num_samples: int, folder: Path) -> None:
    """Writes a small copy of each image of the prompts, and adds the files' names to the rows as `images`. Images that do not
    fit into `_MAX_PREVIEW_BYTES` are left out; `num_images` of a row counts those of its prompt.

    Raises:
        ConfigError: A file cannot be written.
    """
    written: dict[str, bool] = {}
    num_bytes = 0
    try:
        for index, (prompt, _, _, _) in enumerate(problems):
            for image in prompt.images:
                name = f"{digest_of(image)}.jpg"
                if name in written or num_bytes >= _MAX_PREVIEW_BYTES:
                    continue
                preview = make_preview(image, _PREVIEW_SIDE)
                num_bytes += len(preview)
                written[name] = num_bytes <= _MAX_PREVIEW_BYTES
                if written[name]:
                    replace_durably(folder / name, preview, sync=False)
            if prompt.images:
                names = [name for image in prompt.images if written.get(name := f"{digest_of(image)}.jpg")]
                for row in rows[index * num_samples : (index + 1) * num_samples]:
                    row |= {"images": names, "num_images": len(prompt.images)}
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error


def evaluated_step(model: str | Path, step: int | None, output: str | Path | None) -> int:
    """Returns the step of an evaluation.

    For checkpoints it is `step`. For other models (`step` is None) it is the number N in the name `global_step_<N>` of the
    folder of `output`, or else of the model; 0 if neither has such a name.
    """
    step_of_output = step_of(Path(output).absolute().parent.name) if output else None
    return next(n for n in (step, step_of_output, step_of(Path(model).absolute().name), 0) if n is not None)


def find_suite(cfg: LanguageConfig, name: str) -> EvalDataConfig:
    """Returns the section of `data.eval` with a suite's name; `default` is the first suite if no suite has that name.

    Raises:
        ConfigError: No suite has that name; the message lists the suites.
    """
    return suite_named(cfg.data.eval, name)


def suites_of(cfg: LanguageConfig) -> dict[str, EvalDataConfig]:
    """Returns the suites of `workflow.eval_suites`, on which training (`runner.val_check_interval`) also evaluates.

    Raises:
        ConfigError: A suite is unknown, or its settings cannot be used.
    """
    suites = {name: find_suite(cfg, name) for name in cfg.workflow.eval_suites}
    for name, section in suites.items():
        _check_samples(section, name)
    return suites


def _check_samples(section: EvalDataConfig, suite: str) -> None:
    if section.samples > 1 and section.temperature == 0:
        raise ConfigError(
            f"data.eval: suite {suite!r} has samples {section.samples} and temperature 0, which makes the same answer "
            f"{section.samples} times; set its temperature above 0, or samples to 1"
        )


def describe(result: dict[str, Any]) -> str:
    """Formats the result of an evaluation as a line."""
    interval_text = parenthesized_interval(result["accuracy_ci95"], ".1%", "95 % interval ")
    summary = f"accuracy {result['accuracy']:.1%}{interval_text} on {result['n']} problems"
    summary += describe_samples(result)
    if result["failed"]:
        summary += f"; {result['failed']} answers could not be judged"
    return f"{summary}; suite {result['suite']}, step {result['global_step']}, {result['backend']}"


@contextmanager
def model_folder(model: str | Path, trusts_code: bool) -> Iterator[tuple[str, int | None]]:
    """Yields a Hugging Face folder of the model, and the model's step if it is a checkpoint. Exports checkpoints."""
    path = expand_home(model).absolute()
    if not (path / MANIFEST).is_file():
        yield resolve_model(str(model)), None
        return
    require_valid(path, hint="or evaluate another checkpoint")
    step = int(read_manifest(path)["global_step"])
    export_folder = _find_export(path, step)
    if export_folder is not None:
        yield str(export_folder), step
        return
    from rlhpc.language.export import export_language_model

    with tempfile.TemporaryDirectory(prefix="rlhpc-eval-") as temporary_folder:
        yield str(export_language_model(path, Path(temporary_folder) / path.name, trust_code=trusts_code)), step


def _find_export(checkpoint: Path, step: int) -> Path | None:
    """Returns the run's export of a checkpoint if the export is complete and up to date, or None."""
    from rlhpc.language.export import CONVERSION

    folder = default_output(checkpoint, step)
    try:
        backend_identity = read_json((checkpoint / "backend.json").read_bytes())
        for policy_folder in [folder / str(name) for name in backend_identity.get("agent.policies", ("",))]:
            conversion = read_json((policy_folder / CONVERSION).read_bytes())
            is_same_checkpoint = conversion["manifest_sha256"] == digest(checkpoint / MANIFEST)[1]
            is_same_dtype = conversion["dtype"] == backend_identity["about"]["dtype"]
            has_all_files = all(
                (policy_folder / name).stat().st_size == file["size"] for name, file in conversion["files"].items()
            )
            is_merged = not conversion["lora"] or conversion["lora"]["merged"]
            if not (is_same_checkpoint and is_same_dtype and has_all_files and is_merged):
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder


def answer_problems(
    problems: Problems,
    cfg: LanguageConfig,
    section: EvalDataConfig,
    suite: str,
    folder: str,
    tokenizer: Any,
    shows_progress: bool,
) -> list[dict[str, Any]]:
    """Generates and scores all answers to some problems, with an engine and reward functions in this process.

    Args:
        problems: Problems to answer.
        cfg, section, suite: See `answers_to`.
        folder: Folder of the model.
        tokenizer: Tokenizer of the model.
        shows_progress: Whether to show the number of scored answers on stderr.

    Returns:
        Rows in order of problem and sample.
    """
    from rlhpc.runs.device import evaluation_device

    device = evaluation_device(cfg)
    with (
        # Reward processes start first, before the engine fills the memory of this process.
        closing(make_local_aggregator(cfg, device)) as reward_scorer,
        closing(make_engine(cfg, model_path=folder, device=str(device), seed=cfg.runner.seed)) as engine,
        closing(make_generation(cfg, engine, tokenizer)) as generation,
        ProgressBar(len(problems) * section.samples, name=f"eval {suite}", unit="answer")
        if shows_progress
        else nullcontext() as progress_bar,
    ):
        rows = answers_to(
            problems, cfg, section, suite, generation, reward_scorer, tokenizer, bar=progress_bar, has_transcripts=True
        )
    identify(rows, section.samples)
    return rows


def problems_of(
    cfg: LanguageConfig, section: EvalDataConfig, tokenizer: Any, split_part: str = "eval"
) -> tuple[Problems, int]:
    """Returns the tokenized problems of a suite or of training, and the number of problems that are too long.

    Raises:
        ConfigError: All prompts are longer than `data.max_prompt_tokens`.
    """
    key, max_tokens = f"data.eval[{section.name}]" if split_part == "eval" else "data.train", cfg.data.max_prompt_tokens
    dataset = make_dataset(section, split_part, key=key)
    check_problems([term.name for term in cfg.reward.terms], dataset, key)
    encoder = PromptTokenizer(
        tokenizer,
        max_tokens,
        cfg.data.overlong_prompts,
        section.chat_template,
        key=key,
        context=context_tokens(cfg, tokenizer),
    )
    prompts = [dataset[index] for index in range(len(dataset))]
    for prompt in prompts:
        encoder.check(dataclasses.replace(prompt, turn=None))
    fitting_problems = [
        (prompt, tuple(ids_and_images[0]), ids_and_images[1], encoder)
        for prompt in prompts
        if (ids_and_images := encoder.encode(prompt)) is not None
    ]
    if not fitting_problems:
        raise ConfigError(f"{key}: all {len(prompts)} prompts are longer than data.max_prompt_tokens={max_tokens}")
    return fitting_problems, len(prompts) - len(fitting_problems)


def answers_to(
    problems: Problems,
    cfg: LanguageConfig,
    section: EvalDataConfig,
    suite: str,
    generation: Generation,
    reward_scorer: RewardScorer,
    tokenizer: Any,
    *,
    bar: ProgressBar | None = None,
    deadline: float = math.inf,
    has_transcripts: bool = False,
) -> list[dict[str, Any]]:
    """Generates and scores all answers to some problems of a suite. Reward functions score finished answers while the engine
    generates further answers.

    Args:
        problems: All problems, or a rank's share: the answers to a problem do not depend on the other problems.
        cfg, section, suite: Configuration, section and name of the suite.
        generation, reward_scorer: Runner of episodes, and reward functions, both without pending requests.
        tokenizer: Tokenizer of the model.
        bar: Progress bar of the scored answers.
        deadline: Deadline on the clock of `time.monotonic`.
        has_transcripts: Whether rows include the transcripts of episodes.

    Returns:
        Rows in order of problem and sample.

    Raises:
        DeadlineExceeded: The deadline has passed.
        NonFinite: A reward is not finite.
    """
    num_samples, seed, suite_seed = section.samples, cfg.runner.seed, zlib.crc32(suite.encode())
    sampling = SamplingParams(
        max_new_tokens=cfg.rollout.max_new_tokens,
        temperature=section.temperature,
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
    )
    for index, (prompt, ids, image_offsets, encoder) in enumerate(problems):
        images, seeds = (
            encoder.prompt_images(prompt, image_offsets),
            [seed_of(seed, suite_seed, prompt.id, sample) for sample in range(num_samples)],
        )
        generation.add(
            [
                Request(index * num_samples + j, ids, sampling, sample_seed, images)
                for j, sample_seed in enumerate(seeds)
            ],
            prompt,
        )
    rows: list[dict[str, Any]] = [{}] * (len(problems) * num_samples)
    num_scored = 0
    while num_scored < len(rows):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"evaluation of {suite}: {len(rows) - num_scored} answers are missing at its deadline"
            )
        episodes = generation.step() if generation.unfinished() else []
        for episode in episodes:
            prompt = problems[episode.id // num_samples][0]
            reward_input = sample_of(prompt, episode, tokenizer, has_finished=episode.finish_reason == "stop")
            rows[episode.id] = _make_row(prompt, episode.id % num_samples, reward_input)
            if has_transcripts:
                rows[episode.id] |= transcript(episode, tokenizer, roles_of(cfg))
            reward_scorer.submit(episode.id, reward_input, episode.id // num_samples, num_samples)
        scored_answers = reward_scorer.poll()
        for request_id, scored_answer in scored_answers:
            _add_score(rows[request_id], scored_answer, cfg.reward)
        num_scored += len(scored_answers)
        if bar is not None and scored_answers:
            bar.update(num_scored)
        if not episodes and not scored_answers and not generation.unfinished():
            time.sleep(_IDLE_S)
    return rows


def _make_row(prompt: Prompt, sample: int, answer: Sample) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "sample": sample,
        "level": prompt.level,
        "prompt": answer.prompt,
        "response": answer.response,
        "answer": answer.answer,
        "tokens": answer.tokens,
        "finished": answer.finished,
    }


def _add_score(row: dict[str, Any], scored_answer: Scored, reward: RewardConfig) -> None:
    """Adds rewards and correctness to a row. An answer is right if the first reward term is 1.

    Raises:
        NonFinite: The reward is not finite.
    """
    if not math.isfinite(scored_answer.total):
        terms_text = ", ".join(f"{name} {reward_value}" for name, reward_value in scored_answer.terms.items())
        raise NonFinite(
            f"the reward of problem {row['id']}, sample {row['sample']} is {scored_answer.total} ({terms_text}); see "
            f"reward.terms"
        )
    first_term = reward.terms[0]
    is_right = not scored_answer.failed and scored_answer.terms.get(first_term.name, 0.0) >= 1.0
    row |= {
        "right": is_right,
        "reward": scored_answer.total,
        "terms": dict(scored_answer.terms),
        "failed": scored_answer.failed,
        "vote": vote(row["response"], row["answer"], is_right, first_term),
    }


def vote(response: str, answer: str, is_right: bool, term: RewardTermConfig) -> str:
    """Returns an answer's vote in the majority: the normalized final answer, or "" if the response has no final answer.

    Args:
        response: Response of the model.
        answer: Reference answer.
        is_right: Whether the response is right.
        term: The first of `reward.terms`: `name` and `kwargs`.
    """
    name, extraction_methods = term.name, _EXTRACTION_METHODS
    if name == "code":  # different programs may be equivalent, so programs have no majority
        return ""
    if is_right and name in _UNIQUE_ANSWER_REWARDS:
        return normalize_answer(extract(answer, _EXTRACTION_METHODS) or "")
    if name == "math":  # the same extraction as in the reward
        extraction_methods = tuple(term.kwargs.get("extract", _EXTRACTION_METHODS[:2])) + ("last_number",) * bool(
            term.kwargs.get("last_number")
        )
    return normalize_answer(extract(response, extraction_methods) or "")


def identify(rows: Sequence[dict[str, Any]], num_samples: int) -> None:
    """Replaces the problems' ids by their positions if several problems have the same id."""
    ids = [row["id"] for row in rows[::num_samples]]
    if len(set(ids)) < len(ids):
        for index, row in enumerate(rows):
            row["id"] = index // num_samples


def write_result(path: Path, result: dict[str, Any], rows: Sequence[dict[str, Any]], rows_path: Path) -> None:
    """Writes the rows and then the JSON file of an evaluation, so that the rows exist when the JSON file appears.

    Args:
        path: Path of the JSON file.
        result: Contents of the JSON file.
        rows: Rows from which the result was computed.
        rows_path: Path of the file with the rows.

    Raises:
        ConfigError: A file cannot be written.
    """
    encoded_rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        # UTF-8 cannot encode a lone surrogate; its JSON escape is written instead.
        replace_durably(rows_path, encoded_rows.encode("utf-8", "backslashreplace"))
        replace_durably(path, json.dumps(result, indent=2, sort_keys=True).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
