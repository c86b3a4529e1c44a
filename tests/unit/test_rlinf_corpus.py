"""Verdicts over RLinf's example files: the committed table, and how verdicts are reached."""

from __future__ import annotations

import ast
import fnmatch
import os
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli.foreign import rlinf
from tests import rlinf_corpus, rlinf_sample
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


def test_the_page_compares_fifteen_files_as_they_are_imported_today() -> None:
    assert len(rlinf_corpus.read_resolved()) == 15
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


#: Sections whose further keys cannot select another run: speed and memory of RLinf's trainers and engines, logs, Hydra, and
#: parts that the file turns off or that have the actor's values.
_WITHOUT_EFFECT = (
    "actor.fsdp_config*", "actor.megatron*", "*tokenizer", "weight_syncer*", "*.video_cfg", "hydra*", "rollout.vllm",
    "rollout.sglang", "rollout.model", "inference*", "critic", "critic.*", "reward", "reward.model*", "rollout_judge*",
)  # fmt: skip


@pytest.mark.parametrize("name", rlinf_corpus.COMPARED)
def test_no_section_passes_a_key_of_a_later_version_over_in_silence(name: str) -> None:
    """A key that no table names is refused, copied or named as a difference: it may select anything."""
    leaves = rlinf_corpus.read_resolved()[name]
    sections = {key.rpartition(".")[0] for key in leaves if "." in key} - {"cluster.component_placement"}
    silent = []
    for section in sorted(sections):
        key = f"{section}.of_a_later_version"
        translation = rlinf_corpus.translated(name, {**leaves, key: 7})
        is_named = key not in translation.omitted or translation.omitted[key][1]
        if not is_named and not any(fnmatch.fnmatchcase(section, pattern) for pattern in _WITHOUT_EFFECT):
            silent.append(section)
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
