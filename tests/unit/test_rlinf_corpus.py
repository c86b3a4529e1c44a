"""Verdicts over RLinf's example files: the committed table, and how verdicts are reached."""

from __future__ import annotations

import ast
import fnmatch
import functools
import os
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli.foreign import rlinf, rlinf_language_unsupported, rlinf_unsupported_embodied
from rlhpc.cli.foreign.hydra import compose
from rlhpc.cli.foreign.rules import ForeignConfig, Translation, UnsupportedKeys
from rlhpc.runtime.errors import ConfigError
from tests import rlinf_corpus, rlinf_sample
from tests.drawn import drawn
from tests.rlinf_corpus import Verdict, format_table, read_table, summary, verdicts
from tests.unit.cli.foreign.rlinf_configs import merged, put

PENDULUM = {
    "env_type": "gymnasium", "total_num_envs": 2, "auto_reset": True, "ignore_terminations": True, "use_rel_reward": False,
    "seed": 0, "group_size": 1, "max_episode_steps": 20, "max_steps_per_rollout_epoch": 4,
    "init_params": {"id": "Pendulum-v1"},
}  # fmt: skip
RUN: dict[str, Any] = {
    "cluster": {"num_nodes": 1, "component_placement": {"actor,env,rollout": "0-0"}},
    "runner": {
        "task_type": "embodied", "max_epochs": 2, "max_steps": -1, "save_interval": -1, "val_check_interval": -1,
        "logger": {"experiment_name": "swing", "logger_backends": []},
    },
    "env": {"train": PENDULUM, "eval": {**PENDULUM, "total_num_envs": 2}},
    "rollout": {"pipeline_stage_num": 1},
    "actor": {
        "training_backend": "fsdp", "seed": 1, "global_batch_size": 8, "micro_batch_size": 8,
        "fsdp_config": {"sharding_strategy": "no_shard"},
        "model": {"model_type": "mlp_policy", "num_action_chunks": 1, "precision": "32"},
        "optim": {"lr": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "clip_grad": 1.0},
    },
}  # fmt: skip
ON_POLICY = {
    "algorithm": {
        "adv_type": "gae", "loss_type": "actor_critic", "gamma": 0.9, "gae_lambda": 0.9, "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2, "entropy_bonus": 0, "update_epoch": 1, "logprob_type": "chunk_level",
        "reward_type": "chunk_level", "entropy_type": "chunk_level", "normalize_advantages": True,
    },
}  # fmt: skip
OFF_POLICY = {
    "algorithm": {
        "loss_type": "embodied_sac", "update_epoch": 2, "gamma": 0.9, "tau": 0.01,
        "replay_buffer": {"sample_window_size": 50, "min_buffer_size": 1},
        "entropy_tuning": {"alpha_type": "softplus", "initial_alpha": 0.1, "optim": {"lr": 3e-4}},
    },
    "actor": {"optim": {"clip_grad": 10.0}, "critic_optim": {"lr": 3e-4, "clip_grad": 10.0}},
}  # fmt: skip
CROSSQ = {"algorithm": {"q_head_type": "crossq"}, "actor": {"model": {"q_head_type": "crossq"}}}
GROUPS = {
    "algorithm": {"adv_type": "grpo", "loss_type": "actor", "group_size": 2},
    "env": {"train": {"auto_reset": False, "group_size": 2, "max_steps_per_rollout_epoch": 20}},
}
FAMILIES = {
    "ppo": merged(RUN, ON_POLICY),
    "grpo": merged(merged(RUN, ON_POLICY), GROUPS),
    "sac": merged(RUN, OFF_POLICY),
    "crossq": merged(merged(RUN, OFF_POLICY), CROSSQ),
}


#: Keys whose numbers are written in another form: RLinf's top_k of 1000000 stands for all tokens.
CONVERTED = {"rollout.top_k"}


def test_the_committed_table_has_all_files_and_its_counts() -> None:
    table = read_table()
    assert len(table) == 227
    assert (rlinf_corpus.DATA / "verdicts.tsv").read_text() == format_table(table)
    for name, verdict in table.items():
        assert verdict.names if verdict.word != "same" else verdict.names in ("", rlinf_corpus.NOT_BUILT), name


def test_each_accepted_difference_has_a_reason_that_the_importer_gives() -> None:
    """A reason that the importer no longer gives would be a claim on the page that no code makes."""
    folder = Path(rlinf.__file__).parent
    trees = [ast.parse(file.read_text()) for file in folder.glob("*.py")]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for pattern in rlinf_corpus.accepted_differences():
        reason = pattern.partition(" (")[2].removesuffix(")").removesuffix("*")
        assert any(isinstance(text, str) and text.startswith(reason) for text in texts), pattern


def test_verdicts_name_what_differs_and_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "embodiment" / "config"
    later = merged(FAMILIES["sac"], {"algorithm": {"of_a_later_version": 1}})
    files = {
        "a_same": FAMILIES["sac"],
        "b_differs": merged(FAMILIES["sac"], {"env": {"train": {"episode_bonus": 1}}}),
        "b_later": later,
        "c_environment": merged(FAMILIES["ppo"], {"env": {"train": {"init_params": {"id": "NoSuchTask-v1"}}}}),
        "d_critics": merged(FAMILIES["sac"], {"algorithm": {"agg_q": "mean"}}),
        "env/piece": PENDULUM,
    }
    for name, content in files.items():
        put(folder, f"{name}.yaml", content)
    table = verdicts(tmp_path)
    found = {Path(name).stem: verdict for name, verdict in table.items()}
    assert found["a_same"] == Verdict("same")
    assert found["b_differs"] == Verdict("differs", "env.train.episode_bonus")
    assert found["b_later"].word == "import refuses" and "algorithm.of_a_later_version" in found["b_later"].names
    assert found["c_environment"].word == "plan refuses" and "NoSuchTask-v1" in found["c_environment"].names
    assert found["d_critics"].word == "import refuses" and "smallest value" in found["d_critics"].names
    assert "piece" not in found and summary(table).startswith(
        "5 files: 1 translate (20%), 0 of them with a simulator class of RLinf, which plan did not build; 2 pass plan (40%)"
    )


def test_the_page_compares_twenty_files_as_they_are_imported_today() -> None:
    assert len(rlinf_corpus.read_resolved()) == 20
    assert rlinf_corpus.PAGE.read_text() == rlinf_corpus.format_docs()


@pytest.mark.parametrize("name", rlinf_corpus.COMPARED)
def test_each_of_rlinfs_fields_gives_a_value_or_is_named(name: str) -> None:
    """A value that differs from RLinf's is in the list of omitted keys, with a reason."""
    translation = rlinf_corpus.translated(name, rlinf_corpus.read_resolved()[name])
    assert not rlinf_corpus.unnamed(translation)
    numbers = {
        key: ours
        for key, ours in translation.ours.items()
        if len(sources := translation.origin.get(key, [])) == 1
        and isinstance(ours, (int, float))
        and isinstance(theirs := translation.foreign[sources[0]], (int, float))
        and ours != theirs
        and sources[0] not in translation.omitted
    }
    assert numbers.keys() <= CONVERTED


#: Name of a key that no version of RLinf has.
_MADE_UP = "of_a_later_version"
#: Modules with tables of keys that have no counterpart.
_TABLES = (rlinf, rlinf_language_unsupported, rlinf_unsupported_embodied)
#: Reasons of rules that hold for any component: a run on demonstrations has one group, and rewards have processes.
_OF_PLACEMENT = ("only actors train on demonstrations", "rewards are judged by processes beside the rollout")


def every_unsupported_key() -> list[UnsupportedKeys]:
    """Returns the entries of all tables, also of the rows that a task type may lack."""
    values = [value for module in _TABLES for value in vars(module).values() if isinstance(value, list)]
    rows = [row.otherwise for kind in rlinf.KINDS for row in kind.optional]
    return [*rows, *(entry for table in values for entry in table if isinstance(entry, UnsupportedKeys))]


def unread_reasons(leaves: dict[str, Any]) -> set[str]:
    """Returns the reasons of a file's kind of run that hold for keys of any name."""
    kind = next(kind for kind in rlinf.KINDS if kind.applies(leaves))
    entries = [*kind.unsupported_of(leaves, ()), *rlinf.EVERYWHERE, *rlinf.NO_CRITIC]
    return {entry.reason for entry in entries if entry.any_name}


def test_a_pattern_that_passes_values_over_lists_its_keys() -> None:
    """A key of a later version may have any effect; only null says the same as no key."""
    entries = every_unsupported_key()
    assert len(entries) > 150
    for entry in entries:
        passes_values = entry.harmless is True or any(value is not None for value in entry.harmless)
        wide = [pattern for pattern in entry.patterns if "*" in pattern]
        assert entry.any_name or not wide or not passes_values, (wide, entry.reason)


@functools.cache
def importable() -> dict[str, dict[str, Any]]:
    """Returns file → dotted key → value: of the committed files, and of those of a checkout that are imported."""
    if "RLHPC_RLINF" not in os.environ:
        return rlinf_corpus.read_resolved()
    folder = Path(os.environ["RLHPC_RLINF"]) / "examples"
    return {
        name: compose(folder / name).leaves
        for name, verdict in read_table().items()
        if verdict.word != "import refuses"
    }


def _outcome(name: str, leaves: dict[str, Any]) -> Translation | None:
    """Returns the translation, or None if the file is refused."""
    try:
        return rlinf_corpus.translated(name, leaves)
    except ConfigError:
        return None


@pytest.mark.parametrize("name", importable())
def test_no_mapping_passes_a_made_up_key_over_in_silence(name: str) -> None:
    """A key that no table has is refused, copied or named as a difference, unless nothing reads the mapping at all."""
    leaves = importable()[name]
    sections = {key.rsplit(".", depth)[0] for key in leaves for depth in range(1, key.count(".") + 1)}
    names = {f"{section}.{_MADE_UP}" for section in sections} | {f"{key}_{_MADE_UP}" for key in leaves}
    unread = unread_reasons(leaves)
    together = _outcome(name, {**leaves, **dict.fromkeys(names, 7)})
    for key in sorted(names):
        translation = together or _outcome(name, {**leaves, key: 7})
        if translation is None or key in translation.used:
            continue
        reason, changes_training = translation.omitted[key]
        assert changes_training or reason in unread or reason.startswith(_OF_PLACEMENT), (key, reason)


@pytest.mark.parametrize("name", importable())
def test_a_difference_by_a_default_of_rlinfs_is_named_at_a_key_of_the_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report names keys that the file sets: a difference without one would be in no list."""
    unnamed, omit, leaves = [], ForeignConfig.omit, importable()[name]

    def record(
        config: ForeignConfig, key: str, reason: str, changes_training: bool = True, missing_feature: str = ""
    ) -> Any:
        if changes_training and leaves.keys().isdisjoint(key.split()):
            unnamed.append((key, reason))
        return omit(config, key, reason, changes_training, missing_feature)

    monkeypatch.setattr(ForeignConfig, "omit", record)
    translation = rlinf_corpus.translated(name, leaves)
    assert not unnamed or not translation.training


#: Keys of which several values mean the same → why.
_SAME_EITHER_WAY = {
    "*.fsdp_config.*": "memory, and autocast in the precision of the model",
    "*.enable_offload": "memory",
    "actor.offload_weight": "memory",
    "*.gradient_checkpointing": "memory",
    "*.recompute_granularity": "memory",
    "*.attn_implementation": "speed",
    "*.precision": "32 and fp32 are one precision, and a value of fsdp_config.mixed_precision goes before it",
    "*.lr_warmup_iters": "lr_warmup_fraction goes before it, and a step has several updates",
    "*.lr_scheduler": "cosine and openpi_cosine differ in the rate at which their warm-up begins",
    "*num_images_in_input": "any number but 1 stands for all cameras",
    "actor.model.image_num": "any number but 1 stands for all cameras",
    "actor.model.model_type": "several names of RLinf's for one network",
    "actor.model.openpi.config_name": "several names of RLinf's for one robot",
    "actor.model.openpi.action_env_dim": "the simulator's actions have a size of their own",
    "actor.training_backend": "FSDP2 stands for RLinf's FSDP and Megatron",
    "actor.pack_traj": "the weights of turns and episodes are the same with one scale",
    "algorithm.calculate_entropy": "an entropy_bonus of 0",
    "algorithm.entropy_bonus": "read with calculate_entropy",
    "algorithm.group_size": "env.train.group_size has it, with a critic",
    "algorithm.loss_agg_func": "micro-batches of one response, or loss_scales",
    "algorithm.loss_scales": "repetitions",
    "algorithm.recompute_logprobs": "importance_sampling_fix needs both log-probs",
    "*.top_k": "-1, 0 and numbers above the vocabulary's stand for all tokens",
    "algorithm.training_batch_size_per_gpu": "enable_dynamic_batch_size goes before it",
    "algorithm.use_valid_token_scale": "loss_scales go before it",
    "runner.enable_dynamic_batch_size": "a micro-batch has at least the longest sequence",
    "runner.max_tokens_per_mbs": "a micro-batch has at least the longest sequence",
    "cluster.auto_scheduler": "speed",
    "data.train_data_paths": "for training",
    "env.*.control_mode": "the mode that the robot has without it",
    "env.eval.max_steps_per_rollout_epoch": "the number of complete episodes is the same",
    "rollout.rollout_backend": "vLLM stands for RLinf's vLLM and SGLang",
    "runner.max_epochs": "the smaller of max_epochs and max_steps ends the run",
    "runner.max_steps": "the smaller of max_epochs and max_steps ends the run",
    "runner.task_type": "several names of RLinf's for one kind of run",
}


def _other_values(value: Any, values: set[Any]) -> list[Any]:
    """Returns other legal values of a key: those that RLinf's files have, and for numbers and flags others of the type."""
    others = sorted((other for other in values if type(other) is type(value) and other != value), key=str)[:2]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [*others, 2 * abs(value) + 1]
    if isinstance(value, float):
        return [*others, 2 * value + 0.125]
    return others


def _values() -> dict[str, set[Any]]:
    """Returns key → the scalar values that RLinf's files have."""
    values: dict[str, set[Any]] = {}
    for leaves in importable().values():
        for key, value in leaves.items():
            if isinstance(value, (str, bool, int, float)):
                values.setdefault(key, set()).add(value)
    return values


def _of_scalars() -> list[str]:
    return [
        f"{name} {key}"
        for name, leaves in importable().items()
        for key, value in leaves.items()
        if isinstance(value, (str, bool, int, float))
    ]


def test_each_value_decides_something_or_is_named() -> None:
    """Another legal value of a key changes the translation, is named with a reason, or is refused."""
    files, values = importable(), _values()
    silent = []
    for drawn_key in drawn("values of RLinf's files", _of_scalars(), least=300):
        name, _, key = drawn_key.partition(" ")
        leaves = files[name]
        for other in _other_values(leaves[key], values[key]):
            translation, before = _outcome(name, {**leaves, key: other}), rlinf_corpus.translated(name, leaves)
            if translation is None or key in translation.omitted:
                continue
            is_same = translation.ours == before.ours and translation.omitted == before.omitted
            if is_same and not any(fnmatch.fnmatchcase(key, pattern) for pattern in _SAME_EITHER_WAY):
                silent.append((drawn_key, leaves[key], other))
    assert not silent


@pytest.mark.skipif("RLHPC_RLINF" not in os.environ, reason="RLHPC_RLINF names no checkout of RLinf")
def test_the_committed_table_is_that_of_the_checkout() -> None:
    folder = Path(os.environ["RLHPC_RLINF"])
    assert rlinf_corpus.read_resolved() == rlinf_corpus.resolve(folder)
    assert verdicts(folder) == read_table()


def test_the_sample_that_trains_has_twenty_files_that_translate() -> None:
    table, files = read_table(), rlinf_sample.sample()
    assert len(files) == 20
    assert all(overrides and table[name].word in ("same", "differs") for name, overrides in files.items())
    assert len({name.split("/")[0] for name in files}) > 1


@pytest.mark.long
@pytest.mark.skipif("RLHPC_RLINF" not in os.environ, reason="RLHPC_RLINF names no checkout of RLinf")
def test_the_sample_trains() -> None:
    assert rlinf_sample.main([os.environ["RLHPC_RLINF"]]) == 0
