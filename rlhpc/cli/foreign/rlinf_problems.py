"""Translation of the data and rewards of RLinf's runs with language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, Rows

#: RLinf's data types whose prompts have pictures.
_PICTURES = "vlm"


def train_path(config: ForeignConfig) -> Any:
    """Returns the first training file; a source is one file, folder or pattern."""
    paths = config.texts("data.train_data_paths")
    if len(paths) > 1:
        config.omit(
            "data.train_data_paths",
            "a source is one file, folder or pattern: the first one is written; give a pattern that matches all",
        )
    return paths[0] if paths else UNSET


def source_name(path: str) -> str:
    """Returns the source that reads a file. RLinf's folders have Parquet or JSON files (data/datasets/vlm/base.py)."""
    folder = Path(path)
    suffixes = {file.suffix for file in folder.iterdir()} if folder.is_dir() else {folder.suffix}
    return "jsonl" if suffixes & {".jsonl", ".json"} else "parquet"


def has_pictures(config: ForeignConfig) -> bool:
    """Returns whether the prompts contain images, which RLinf decides in its data/datasets/__init__.py."""
    return bool(config.leaves.get("data.type") == _PICTURES)


def _uses_chat_template(config: ForeignConfig) -> bool:
    used, unused = ("use", "apply") if has_pictures(config) else ("apply", "use")
    config.omit(f"data.{unused}_chat_template", f"RLinf reads data.{used}_chat_template for such data", False)
    return bool(config(f"data.{used}_chat_template", False))


def _system_prompt(config: ForeignConfig) -> Any:
    if str(config.leaves.get("data.dataset_name")).lower() == "robo2vlm":
        config.omit(
            "data.dataset_name", "RLinf's data set has a system prompt of its own: set data.train.system_prompt"
        )
        return UNSET
    return config("data.system_prompt", UNSET)


def _images_key(config: ForeignConfig) -> Any:
    if not has_pictures(config):
        return UNSET
    keys = config("data.image_keys") or ()
    keys = [keys] if isinstance(keys, str) else list(keys)
    if len(keys) > 1:
        config.omit("data.image_keys", "a source has one column of pictures: the first one is written")
    return str(keys[0]) if keys else UNSET


def _prompt_template(config: ForeignConfig) -> Any:
    """Returns the template that appends a column of choices to the question, as RLinf's data sets do."""
    if not has_pictures(config) or (column := config("data.choice_key")) is None:
        return UNSET
    config.omit(
        "data.choice_key",
        "the column is appended as it is; RLinf letters the choices of its Robo2VLM data sets",
        missing_feature=r"choices_key",
    )
    return f"{{prompt}}\nChoices: {{{column}}}\n"


#: Keys that are the same in `data.train` and in a suite.
_SOURCE_ROWS: Rows = [
    ("prompt_key", "data.prompt_key"),
    ("answer_key", "data.answer_key"),
    ("images_key", _images_key),
    ("prompt_template", _prompt_template),
    ("chat_template", _uses_chat_template),
    ("system_prompt", _system_prompt),
]


def eval_suites(config: ForeignConfig, files: str = "data.val_data_paths") -> Any:
    """Returns a suite for each validation file, which the key `files` names."""
    paths, suites = config.texts(files), []
    for number, path in enumerate(paths):
        values = {key: config(rule, UNSET) if isinstance(rule, str) else rule(config) for key, rule in _SOURCE_ROWS}
        suite = {"name": "validation" if len(paths) == 1 else f"validation_{number}", "source": source_name(path)}
        suites.append({**suite, "path": path, **{key: value for key, value in values.items() if value is not UNSET}})
    return suites or UNSET


def suite_names(config: ForeignConfig, files: str = "data.val_data_paths") -> Any:
    """Returns the names of the suites."""
    suites = eval_suites(config, files)
    return suites if suites is UNSET else [suite["name"] for suite in suites]


def _long_prompt_treatment(config: ForeignConfig) -> str:
    """Returns the treatment of long prompts. RLinf truncates prompts that it does not filter, but never their pictures."""
    return "drop" if config("data.filter_prompt_by_length") else "error"


def reward_terms(config: ForeignConfig) -> Any:
    name = str(config("reward.reward_type", "math"))
    if name == "vqa":
        return _choice_rewards(config)
    if name != "math":
        config.omit(
            "reward.reward_type",
            f"rlhpc has no reward {name}: register yours (docs/how-to/add-reward.md)",
            missing_feature=rf"^name {name}$",
        )
        return [{"name": name}]
    wrong, right = (_math_reward(config, key) for key in ("min_val", "max_val"))
    term = {"name": name, "weight": right - wrong}  # an answer is worth 0 or 1 before its weight
    return [term] if _ignores_offset(config) or not wrong else [term, {**_EVERY_RESPONSE, "weight": wrong}]


def _math_reward(config: ForeignConfig, key: str) -> float:
    return config.number(f"reward.reward_{key}") * config.number("reward.reward_scale")


#: Estimators that subtract a mean of the rewards: they do not depend on what a wrong answer is worth.
_WITH_BASELINE = ("grpo", "grpo_dynamic", "reinpp")
#: Reward of 1 for every response.
_EVERY_RESPONSE: dict[str, Any] = {"name": "format", "kwargs": {"pattern": ".*"}}


def _ignores_offset(config: ForeignConfig) -> bool:
    return config.text("algorithm.adv_type", "grpo") in _WITH_BASELINE


def failed_reward(config: ForeignConfig) -> Any:
    """Returns the reward of a response that cannot be judged, which RLinf takes for a wrong one."""
    is_offset = config.text("reward.reward_type", "math") == "math" and not _ignores_offset(config)
    return (_math_reward(config, "min_val") or UNSET) if is_offset else UNSET


#: RLinf's rewards of multiple-choice questions (algorithms/rewards/vqa), as rlhpc's.
_CHOICE_REWARDS: dict[str, dict[str, Any]] = {
    "qa_accuracy": {
        "name": "exact",
        "kwargs": {"extract": r"<answer>\s*([A-Ea-e])\..*?</answer>", "ignore_case": True},
    },
    "think_format": {"name": "format", "kwargs": {"pattern": r"\s*<think>(?!.*<think>).*</think>.*"}},
    "answer_format": {
        "name": "format",
        "kwargs": {"pattern": r"<answer>\s*[A-Ea-e]\.\s*.+?\s*</answer>", "anywhere": True},
    },
}


def _choice_rewards(config: ForeignConfig) -> list[dict[str, Any]]:
    config.omit("reward.reward_type", "the letter of the answer is compared, not also the text of the choice")
    weights = {name: config.number(f"reward.reward_weights.{name}", 0.0) for name in _CHOICE_REWARDS}
    return [{**term, "weight": weights[name]} for name, term in _CHOICE_REWARDS.items() if weights[name]]


def _num_problems(config: ForeignConfig) -> Any:
    if (size := config.integer("data.data_size", -1)) < 1:
        return UNSET
    config.omit("data.data_size", "the problems are drawn, by data.train.seed; RLinf takes the first ones")
    return size


PROBLEMS: Rows = [
    ("data.max_prompt_tokens", "data.max_prompt_length"),
    ("data.overlong_prompts", _long_prompt_treatment),
    ("data.train.source", lambda config: p if (p := train_path(config)) is UNSET else source_name(p)),
    ("data.train.path", train_path),
    *((f"data.train.{key}", rule) for key, rule in _SOURCE_ROWS),
    ("data.train.size", _num_problems),
    ("data.eval", eval_suites),
    ("workflow.eval_suites", suite_names),
]
