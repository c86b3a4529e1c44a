"""Configuration checks of language runs. The module neither imports torch nor writes files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.algorithms.registry import COMPARE_WITHIN_GROUPS, DISCOUNTED, REWARD_LOSSES
from rlhpc.config.constraints import Fail, check_choice, check_rules
from rlhpc.config.parallel import check_parallel
from rlhpc.config.typed import plain, select
from rlhpc.language.algorithms.registry import ALGORITHMS, make_algorithm
from rlhpc.language.config.agents import AgentConfig
from rlhpc.language.config.algorithms import GrpoAlgorithmConfig
from rlhpc.language.config.data import SourceConfig
from rlhpc.language.config.run import (
    GrpoConfig,
    LanguageConfig,
    RewardRunConfig,
    SftConfig,
    TrainedLanguageConfig,
    minibatch_size,
    responses_per_step,
)
from rlhpc.language.config.training import LanguageActorConfig
from rlhpc.language.engines.registry import ENGINES
from rlhpc.language.envs.registry import find_environment
from rlhpc.language.multi_policy import roles_of
from rlhpc.language.rollout_checks import check_rollout
from rlhpc.language.scoring.checks import VALUE_HEAD_SOURCE, check_group_sections
from rlhpc.language.scoring.groups import (
    AGENT,
    CRITIC,
    distils,
    needs_critic,
    needs_values,
    placed_groups,
    process_groups,
    rating_names,
)
from rlhpc.runtime.errors import ConfigError, PlacementError
from rlhpc.runtime.plugins import Registry, suggest_name
from rlhpc.training.registry import BACKENDS


def check_algorithm(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks the keys of `algorithm` against each other and against the rollout.

    Raises:
        ConfigError: The first rule that is broken.
    """
    algorithm, max_new_tokens, name = cfg.algorithm, cfg.rollout.max_new_tokens, cfg.algorithm.name
    is_single = algorithm.group_size < 2
    uses_estimator = name == "policy_gradient" or (name == "distillation" and algorithm.distillation.task_reward_coef)
    rules = (
        (
            is_single and algorithm.filter_groups,
            "algorithm.group_size",
            "algorithm.filter_groups compares within groups: it must be at least 2",
        ),
        (
            is_single and uses_estimator and algorithm.adv_type in COMPARE_WITHIN_GROUPS,
            "algorithm.group_size",
            f"algorithm.adv_type={algorithm.adv_type} compares the responses to a prompt, and one alone has the advantage 0: "
            "it must be at least 2; or take an estimator that does not compare, such as reinforce++",
        ),
        (  # E[∇(log p − log q)] = E[∇ log p] = 0 for any reference q
            algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_type in ("k1", "kl"),
            "algorithm.kl_type",
            "in the loss k1 has no effect: the expected gradient of log p - log q is 0, whatever the reference q is. Take k2, "
            "whose gradient is that of the KL, or k3; or set algorithm.kl_in=reward",
        ),
        (
            algorithm.overlong_buffer >= max_new_tokens,
            "algorithm.overlong_buffer",
            f"it must be below rollout.max_new_tokens ({max_new_tokens})",
        ),
        (
            algorithm.overlong_buffer and cfg.agent.kind != "inline",
            "algorithm.overlong_buffer",
            f"agent.kind={cfg.agent.kind} ends its answers by itself: set it 0",
        ),
        (
            algorithm.credit != "episode" and algorithm.adv_type in DISCOUNTED,
            "algorithm.credit",
            f"algorithm.adv_type={algorithm.adv_type} credits each token with what follows it, turns' rewards too: "
            "leave it, or take an estimator that compares, such as rloo",
        ),
        (
            algorithm.loss_type == "decoupled_ppo" and not algorithm.recompute_logprobs,
            "algorithm.recompute_logprobs",
            "decoupled_ppo takes its proximal policy from there: set it true",
        ),
        (
            algorithm.tis_cap is not None and not algorithm.recompute_logprobs,
            "algorithm.tis_cap",
            "it weighs recomputed log-probs: set algorithm.recompute_logprobs=true, or null",
        ),
        (
            cfg.actor.offload_in_rollout and algorithm.max_staleness,
            "actor.offload_in_rollout",
            "async generation goes on while the actor trains: set it false",
        ),
    )
    check_rules(rules, fail)
    if algorithm.corrections:
        _check_corrections(algorithm, fail)


def _check_corrections(algorithm: GrpoAlgorithmConfig, fail: Fail) -> None:
    """Builds the corrections, and checks them against the loss and the log-probs that it has."""
    from rlhpc.algorithms.corrections import make_corrections

    algorithm_corrections = make_corrections(algorithm.corrections)
    weighing_names = [
        section.name
        for section, correction in zip(algorithm.corrections, algorithm_corrections, strict=True)
        if correction.weighs
    ]
    rules = (
        (
            not algorithm.recompute_logprobs and any(correction.recomputes for correction in algorithm_corrections),
            "algorithm.recompute_logprobs",
            "algorithm.corrections compares the engine's log-probs with recomputed ones: set it true, or take the correction "
            "binary_tv alone",
        ),
        (
            weighing_names and algorithm.tis_cap is not None,
            "algorithm.tis_cap",
            f"it is the correction token_tis, and algorithm.corrections has {''.join(weighing_names)}, which weighs "
            f"by the same "
            "ratio: set it null, or keep it with corrections that only reject, such as geometric",
        ),
        (
            weighing_names and algorithm.loss_type == "decoupled_ppo",
            "algorithm.corrections",
            f"algorithm.loss_type=decoupled_ppo has importance weights already, and {''.join(weighing_names)} would weigh "
            "again: set algorithm.tis_cap as the cap of these, or take corrections that only reject, such as geometric",
        ),
    )
    check_rules(rules, fail)


#: Pattern of the names of policies.
_POLICY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
#: Key of each component's backend.
_BACKEND_KEYS = {
    "actor": "actor.training_backend",
    "rollout": "rollout.rollout_backend",
    CRITIC: "critic.training_backend",
}


def check_common(cfg: LanguageConfig, fail: Fail, *, training: bool) -> None:
    """Checks the names and key combinations that all runs with an answering model share.

    Raises:
        ConfigError: The first rule that is broken.
    """
    _check_backend("rollout.rollout_backend", cfg.rollout.rollout_backend, ENGINES, fail)
    _check_trained(cfg, cfg.data.eval, fail)
    if training:
        _check_sources(cfg.data.train, cfg.data.eval)
        _check_rewards(cfg)
    _check_agent(cfg, fail)


def check_reward_model(cfg: RewardRunConfig, fail: Fail, *, training: bool) -> None:
    """Checks the names and key combinations of a reward model's run.

    Raises:
        ConfigError: The first rule that is broken.
    """
    _check_trained(cfg, cfg.data.eval, fail)
    algorithm = cfg.algorithm
    if algorithm.loss_type not in REWARD_LOSSES.built_in or algorithm.loss_kwargs:
        from rlhpc.algorithms.preference_losses import find_reward_loss

        find_reward_loss(algorithm.loss_type, plain(algorithm.loss_kwargs))
    if training:
        _check_sources(cfg.data.train, cfg.data.eval)
        _check_suites(cfg.runner.val_check_interval, cfg.data.eval, cfg.workflow.eval_suites, fail)


def _check_suites(eval_interval: int, suites: Sequence[Any], evaluated_names: Sequence[str], fail: Fail) -> None:
    key = "runner.val_check_interval"
    rules = (
        (
            eval_interval > 0 and not suites,
            key,
            "data.eval is empty; it needs a suite, such as [{name: default, source: …}]",
        ),
        (
            eval_interval > 0 and not evaluated_names,
            key,
            "workflow.eval_suites is empty; name the suites of data.eval that it is to evaluate",
        ),
    )
    check_rules(rules, fail)


def check_suite_engines(cfg: SftConfig, metrics: Sequence[str], fail: Fail) -> None:
    """Checks that a supervised run has suites if it has engines, and engines if `runner.keep_best` names a suite's metric.

    Args:
        cfg: The configuration.
        metrics: Names of the suites' metrics.
        fail: Builds the error of a key.

    Raises:
        ConfigError: The first rule that is broken.
    """
    key = "cluster.component_placement"
    if "rollout" not in placed_groups(cfg):
        if cfg.runner.keep_best in metrics:
            raise fail(
                "runner.keep_best",
                f"an engine has to answer the suites of data.eval while the model is trained: set {key}.rollout, such as 0",
            )
        return
    eval_interval = cfg.runner.val_check_interval
    if eval_interval <= 0:
        raise fail(
            "runner.val_check_interval",
            f"the group 'rollout' of {key} answers the suites of data.eval every so many steps: set it, or leave it out",
        )
    _check_suites(eval_interval, cfg.data.eval, cfg.workflow.eval_suites, fail)
    if not cfg.reward.terms:
        raise fail("reward.terms", "say how the answers to the suites are judged, such as [{name: math}]")


def _check_backend(key: str, backend: str, registry: Registry[Any], fail: Fail) -> None:
    if ":" not in backend:
        check_choice(key, backend, registry.choices(), fail)


def _check_compiled(key: str, section: LanguageActorConfig, fail: Fail) -> None:
    """Checks that the layers of a trained model can be compiled, if `compile` asks for it.

    Args:
        key: Name of the section.
        section: A training section.
        fail: Builds the error.
    """
    if section.compile == "off":
        return
    mesh_sizes = section.parallel
    shared_dims = [name for name in ("context", "tensor", "expert") if getattr(mesh_sizes, name) > 1]
    rules = (
        (
            bool(shared_dims),
            f"{key}.compile",
            f"ranks exchange data inside the layers with {key}.parallel.{', '.join(shared_dims)} above 1: set it to off",
        ),
        (
            section.training_backend == "deepspeed" and section.deepspeed.zero_stage == 3,
            f"{key}.compile",
            f"{key}.deepspeed.zero_stage=3 gathers weights inside the layers: set it to off, or take stage 2 or fsdp",
        ),
    )
    check_rules(rules, fail)


def _check_trained(cfg: TrainedLanguageConfig, suites: Sequence[Any], fail: Fail) -> None:
    """Checks the keys of all runs that train a language model: backend, model and suites."""
    _check_backend("actor.training_backend", cfg.actor.training_backend, BACKENDS, fail)
    if not cfg.actor.model.model_path:
        raise fail("actor.model.model_path", "name a Hugging Face folder, or builtin:tiny or builtin:smollm2")
    if cfg.actor.model.kwargs and not str(cfg.actor.model.model_path).startswith("builtin:"):
        path = cfg.actor.model.model_path
        raise fail(
            "actor.model.kwargs",
            f"they are for builtin:tiny; what actor.model.model_path={path} is, its config.json says",
        )
    _check_compiled("actor", cfg.actor, fail)
    suite_names = [suite.name for suite in suites]
    if len(set(suite_names)) != len(suite_names):
        raise fail("data.eval", f"two suites have one name: {', '.join(suite_names)}")
    for suite in cfg.workflow.eval_suites:
        if suite != "default" and suite not in suite_names:
            raise fail(
                "workflow.eval_suites",
                f"{suggest_name(suite, suite_names)}data.eval has: {', '.join(suite_names) or 'none'}",
            )


def _check_sources(train_source: SourceConfig, suites: Sequence[Any]) -> None:
    """Checks the names of the sources of training and evaluation data, without importing built-in sources."""
    from rlhpc.language.data.registry import SOURCES

    built_in = SOURCES.names()
    for key, section in (("data.train", train_source), *((f"data.eval[{s.name}]", s) for s in suites)):
        if section.source not in built_in:
            SOURCES.find(section.source, f"{key}.source")


def _check_rewards(cfg: LanguageConfig) -> None:
    """Checks the names of reward terms and of `rollout.agent`, without importing built-in rewards and agents."""
    from rlhpc.language.agents.registry import AGENTS
    from rlhpc.language.rewards.registry import REWARDS

    built_in = REWARDS.names()
    group_terms = rating_names(cfg)
    for term in cfg.reward.terms:
        if term.name not in built_in and term.name not in group_terms:
            REWARDS.find(term.name)
    agent = cfg.rollout.agent
    if agent is not None and agent not in AGENTS.names():
        AGENTS.find(agent)


#: Key that each kind of agent needs, and an example of its value.
_REQUIRED_AGENT_KEYS = {
    "python": "target", "environment": "target", "command": "command", "mcp": "servers", "verifiers": "framework",
    "openenv": "framework",
}  # fmt: skip
_AGENT_KEY_EXAMPLES = {
    "target": "my_agent:solve",
    "command": "[my-agent, '{question}']",
    "servers": "[{command: [my-tool-server]}]",
    "framework": "{taskset: {id: my_taskset}} (verifiers) or {base_url: 'http://127.0.0.1:8000'} (openenv)",
}


def _check_agent_services(agent: AgentConfig, fail: Fail) -> None:
    """Checks the tool servers, services and sandbox of an agent."""
    rules: list[tuple[object, str, str]] = []
    for index, server in enumerate(agent.servers):
        key = f"agent.servers[{index}]"
        rules += [
            (
                bool(server.command) + bool(server.url) + server.shell != 1,
                key,
                "a server is a command, a url or a shell: set one of these",
            ),
            (
                server.shell and agent.sandbox is None,
                "agent.sandbox",
                f"{key} is a shell, which does what the model writes: set bubblewrap, unshare or none",
            ),
            (
                server.url and not server.url.startswith(("http://", "https://")),
                f"{key}.url",
                "it must begin with http:// or https://",
            ),
        ]
    rules += [
        (
            agent.kind == "openenv" and not agent.framework.get("base_url"),
            "agent.framework",
            "agent.kind=openenv needs base_url in it, such as http://127.0.0.1:8000",
        ),
        (
            agent.sandbox is not None and agent.kind != "command" and not any(server.shell for server in agent.servers),
            "agent.sandbox",
            "it is for agent.command and for shells, of which there are none: leave it out",
        ),
    ]
    service_names = [service.name for service in agent.services]
    for index, service in enumerate(agent.services):
        key = f"agent.services[{index}]"
        rules += [
            (
                agent.kind in ("inline", "environment"),
                key,
                f"agent.kind={agent.kind} runs no agents outside, which would need it: leave it out",
            ),
            (
                not re.fullmatch(r"\w+", service.name) or service_names.index(service.name) < index,
                f"{key}.name",
                "it must be of letters, digits and _, and each service has its own",
            ),
            (not service.command, f"{key}.command", "name what starts it, such as [python, server.py, '{port}']"),
            (
                service.ready != "port" and not service.ready.startswith(("/", "line:")),
                f"{key}.ready",
                "allowed: port, /path, line: text",
            ),
        ]
    check_rules(rules, fail)


def _check_agent(cfg: LanguageConfig, fail: Fail) -> None:
    """Checks the kind of agent, and the keys that exclude each other."""
    agent = cfg.agent
    required_key = _REQUIRED_AGENT_KEYS.get(agent.kind, "")
    agent_values = {
        "target": agent.target,
        "command": agent.command,
        "servers": agent.servers,
        "framework": agent.framework,
    }
    for name, example in _AGENT_KEY_EXAMPLES.items():
        if name == required_key and not agent_values[name]:
            example = "search" if agent.kind == "environment" else example
            raise fail(f"agent.{name}", f"agent.kind={agent.kind} is about it: set it, such as {example}")
        if agent_values[name] and name != required_key:
            raise fail(f"agent.{name}", f"agent.kind={agent.kind} has no {name}: set agent.kind, or leave it out")
    _check_agent_services(agent, fail)
    term_names = [term.name for term in cfg.reward.terms]
    if agent.kind == "inline":
        inline_rules = (
            ("agent" in term_names, "reward.terms", "agent is what an agent outside says: set agent.kind to python"),
            (
                cfg.rollout.agent is None and cfg.rollout.max_turns != 1,
                "rollout.max_turns",
                "rollout.agent is not set, so nobody answers the model: set that, or 1",
            ),
            (
                cfg.rollout.agent is not None and cfg.rollout.max_turns < 2,
                "rollout.max_turns",
                f"with rollout.agent {cfg.rollout.agent!r} it must be at least 2",
            ),
        )
        check_rules(inline_rules, fail)
        return
    if agent.kind == "environment":
        find_environment(str(agent.target), plain(agent.kwargs))
        if agent.roles or agent.python is not None:
            name = "roles" if agent.roles else "python"
            raise fail(f"agent.{name}", "an environment is in the rollout rank and says who speaks in it: leave it out")
    elif agent.target and ":" not in agent.target:
        raise fail("agent.target", f"it is {agent.target!r}; allowed: module:function, such as my_agent:solve")
    step_timeout_s, feedback_timeout_s = (
        cfg.runner.step_timeout_s,
        float(select(cfg, "agent.feedback_timeout_s") or 0.0),
    )
    sections = {"data.train": cfg.data.train, **{f"data.eval[{suite.name}]": suite for suite in cfg.data.eval}}
    rules = (
        (
            agent.kind in ("command", "mcp") and "agent" in term_names,
            "reward.terms",
            f"agent.kind={agent.kind} gives no reward, but a text: judge that, such as by [{{name: math}}]",
        ),
        (
            cfg.rollout.agent is not None,
            "rollout.agent",
            f"it answers the model in the rollout rank, but agent.kind is {agent.kind}: set one to null",
        ),
        (
            cfg.rollout.max_turns != 1,
            "rollout.max_turns",
            f"agent.kind={agent.kind} has agent.max_turns instead: leave it out",
        ),
        *(
            (
                section.tools_key,
                f"{key}.tools_key",
                f"agent.kind={agent.kind} shows the model tools of its own: leave it out",
            )
            for key, section in sections.items()
        ),
        *(
            (
                duration_s >= step_timeout_s,
                f"agent.{name}",
                f"it must be below runner.step_timeout_s ({step_timeout_s:g}), in which a whole step has to end",
            )
            for name, duration_s in (("timeout_s", agent.timeout_s), ("feedback_timeout_s", feedback_timeout_s))
        ),
        (
            feedback_timeout_s and (agent.kind != "python" or "agent" not in term_names),
            "agent.feedback_timeout_s",
            "rewards that come later need agent.kind=python, and the term agent in reward.terms: set these, or 0 here",
        ),
    )
    check_rules(rules, fail)


def _update_rules(cfg: GrpoConfig) -> tuple[tuple[object, str, str], ...]:
    """Returns the rules of the optimizer's keys for the value head, and of skipped optimizer steps."""
    optim, is_deepspeed = cfg.actor.optim, cfg.actor.training_backend == "deepspeed"
    is_set_by_key = {"value_lr": optim.value_lr is not None, "critic_warmup_steps": optim.critic_warmup_steps > 0}
    return (
        *(
            (
                is_set and not cfg.actor.model.value_head,
                f"actor.optim.{name}",
                "the actor has no value head: set actor.model.value_head, or leave the key out; a separate critic has "
                "critic.optim.lr and critic.warmup_steps",
            )
            for name, is_set in is_set_by_key.items()
        ),
        (
            optim.critic_warmup_steps and not cfg.algorithm.value_coef,
            "actor.optim.critic_warmup_steps",
            "no value is trained: set algorithm.value_coef above 0, or take 0",
        ),
        (
            optim.critic_warmup_steps and is_deepspeed,
            "actor.optim.critic_warmup_steps",
            "DeepSpeed updates all parameters in each step: take 0, or another training backend",
        ),
        (
            cfg.algorithm.early_stop_imp_ratio is not None and is_deepspeed,
            "algorithm.early_stop_imp_ratio",
            "DeepSpeed cannot take back a gradient: use null, or another training backend",
        ),
    )


def _check_deterministic(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks the settings with which trainer and engine cannot compute the same bits (`runner.deterministic`)."""
    if not cfg.runner.deterministic:
        return
    actor, rollout = cfg.actor, cfg.rollout
    obstacles = (
        (rollout.rollout_backend != "hf", f"rollout.rollout_backend={rollout.rollout_backend}", "take hf"),
        (actor.training_backend == "deepspeed", "actor.training_backend=deepspeed", "take local or fsdp"),
        (rollout.dtype not in ("auto", actor.model.dtype), f"rollout.dtype={rollout.dtype}", "take auto"),
        (actor.lora.rank > 0, f"actor.lora.rank={actor.lora.rank}, whose adapters are merged for the engine", "take 0"),
        (actor.compile != "off", f"actor.compile={actor.compile}", "take off"),
        (actor.model.attn_implementation != "sdpa", "another actor.model.attn_implementation", "take sdpa"),
        (distils(cfg), "algorithm.name=distillation", "take policy_gradient"),
        (cfg.algorithm.max_staleness > 0, f"algorithm.max_staleness={cfg.algorithm.max_staleness}", "take 0"),
    )  # fmt: skip
    for is_set, setting, remedy in obstacles:
        if is_set:
            raise fail("runner.deterministic", f"not with {setting}: {remedy}, or set it to false")


def check_reasoning(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks an RL run: names of rewards and agents, batch sizes, and keys that exclude each other.

    Raises:
        ConfigError: The first rule that is broken.
    """
    algorithm = cfg.algorithm
    check_group_sections(cfg, fail, column_sources(cfg))
    if AGENT in placed_groups(cfg) and cfg.agent.kind in ("inline", "environment"):
        raise fail(
            "cluster.component_placement",
            f"the group 'agent' runs agents outside the engines' ranks, and agent.kind is {cfg.agent.kind}: leave the group "
            "out, or set another kind",
        )
    _check_backend("critic.training_backend", cfg.critic.training_backend, BACKENDS, fail)
    _check_compiled("critic", cfg.critic, fail)
    responses = responses_per_step(cfg)
    if CRITIC in placed_groups(cfg) and responses % minibatch_size(cfg, cfg.critic):
        raise fail("critic.global_batch_size", f"a step has {responses} responses, which must divide by it")
    if algorithm.name not in ALGORITHMS.built_in or algorithm.kwargs:
        make_algorithm(cfg)
    if not cfg.reward.terms:
        raise fail("reward.terms", "say how responses are judged, such as [{name: math}]")
    _check_suites(cfg.runner.val_check_interval, cfg.data.eval, cfg.workflow.eval_suites, fail)
    if responses % minibatch_size(cfg, cfg.actor):
        raise fail(
            "actor.global_batch_size",
            f"a step has data.prompts_per_step({cfg.data.prompts_per_step}) * algorithm.group_size({algorithm.group_size})"
            f" = {responses} responses, which must divide by it",
        )
    check_algorithm(cfg, fail)
    check_rollout(cfg, fail)
    check_rules(_update_rules(cfg), fail)
    _check_deterministic(cfg, fail)
    check_policies(cfg, fail)
    if cfg.rollout.temperature == 0:
        raise fail("rollout.temperature", "training samples: it must be greater than 0")


def column_sources(cfg: GrpoConfig) -> frozenset[str]:
    """Returns the groups and other sources (`Column.by`) that compute the columns of the algorithm.

    For built-in algorithms the configuration determines the sources; other algorithms are instantiated.
    """
    if (distils(cfg) or cfg.algorithm.name == "policy_gradient") and not cfg.algorithm.kwargs:
        is_needed = {
            CRITIC: needs_critic(cfg),
            VALUE_HEAD_SOURCE: needs_values(cfg) and cfg.actor.model.value_head,
            "reference": cfg.algorithm.kl_coef,
            "teacher": distils(cfg) and "teacher" in placed_groups(cfg),
        }
        return frozenset([*(name for name, is_required in is_needed.items() if is_required), *process_groups(cfg)])
    return frozenset(column.by for column in make_algorithm(cfg).columns if isinstance(column.by, str))


def check_policies(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks the policies of an agent's roles (`agent.policies`), if there are any.

    Raises:
        ConfigError: The first rule that is broken.
    """
    policy_by_role = plain(cfg.agent.policies)
    if not policy_by_role:
        return
    key, roles = "agent.policies", () if cfg.agent.kind == "inline" else roles_of(cfg)
    if not roles:
        raise fail(key, "there are no roles, which speak by policies: set agent.roles, or agent.kind=environment and a target "
                   "with roles, such as kuhn_poker; or leave it out")  # fmt: skip
    for role in policy_by_role:
        if role not in roles:
            raise fail(f"{key}.{role}", f"{suggest_name(role, roles)}roles are: {', '.join(roles)}")
    if missing_roles := [role for role in roles if role not in policy_by_role]:
        raise fail(key, f"{', '.join(missing_roles)} has no policy: name one for each of {', '.join(roles)}")
    for role, name in policy_by_role.items():
        if not isinstance(name, str) or not _POLICY_NAME.fullmatch(name) or "lora_" in name:
            raise fail(
                f"{key}.{role}", f"it is {name!r}, which becomes a folder's name: letters, digits, _ and - (not lora_)"
            )
    if len({*policy_by_role.values()}) == 1:
        raise fail(
            key, f"all roles have the policy {next(iter(policy_by_role.values()))}: leave it out, or name another one"
        )
    if not cfg.actor.lora.rank:
        raise fail("actor.lora.rank", "each of several policies (agent.policies) is an adapter: set it, such as 16")
    engine = cfg.rollout.rollout_backend
    if engine not in ("hf", "vllm"):
        raise fail("rollout.rollout_backend", "an engine from outside has one policy (agent.policies): take hf or vllm")
    for name, option_value, allowed_option in (
        ("actor.training_backend", cfg.actor.training_backend, "local"),
        ("actor.model.value_head", cfg.actor.model.value_head, False),
        ("rollout.merge_adapters", cfg.rollout.merge_adapters, engine != "vllm"),
        ("rollout.routing_replay", cfg.rollout.routing_replay, False),
        ("reference.update_interval", cfg.reference.update_interval, 0),
    ):  # fmt: skip
        if option_value != allowed_option:
            raise fail(name, f"with several policies (agent.policies) it must be {str(allowed_option).lower()}")


def check_accelerators(cfg: TrainedLanguageConfig, per_process: Mapping[str, int]) -> None:
    """Checks that trainers and engines have one accelerator per process; further accelerators would be idle.

    Raises:
        PlacementError: A component has several accelerators per process, and its backend uses one of them.
    """
    for name, num_accelerators in per_process.items():
        key = _BACKEND_KEYS.get(name, f"the scorer of {name}")
        backend = str(select(cfg, key) or "") if name in _BACKEND_KEYS else name
        has_device_per_backend = ":" in backend or (name, backend) == (
            "rollout",
            "vllm",
        )  # vLLM has a rank for each accelerator
        if num_accelerators > 1 and not has_device_per_backend:  # a user's backend may use several
            raise PlacementError(
                f"cluster.component_placement.{name} ({cfg.cluster.component_placement}) gives each process "
                f"{num_accelerators} "
                f"accelerators, but {key}={backend} computes on one a process: give it a process an accelerator, such as "
                f"{name}: 0-{num_accelerators - 1}"
            )


def check_sizes(cfg: TrainedLanguageConfig, num_prompts: int, ranks_by_component: Mapping[str, int]) -> None:
    """Checks that the trainers' process counts fit the sizes of `parallel` and divide the prompts of a step. Any number of
    rollout ranks is allowed, because rollout ranks lease prompts when they have capacity.

    Args:
        cfg: The configuration.
        num_prompts: Prompts of a step, `data.prompts_per_step`.
        ranks_by_component: Number of processes, by component.

    Raises:
        ConfigError: The prompts or a model cannot be divided evenly over the ranks.
    """
    for name, num_ranks in ranks_by_component.items():
        num_data_ranks = num_ranks
        if name in ("actor", "critic"):
            num_data_ranks = check_parallel(select(cfg, name), num_ranks, name).data
        if name in _BACKEND_KEYS and name != "rollout" and num_prompts % num_data_ranks:
            raise ConfigError(
                f"cluster.component_placement.{name} gives {num_ranks} processes"
                + (
                    f", {num_data_ranks} of which see other prompts; they must divide "
                    if num_data_ranks != num_ranks
                    else "; they must divide "
                )
                + f"data.prompts_per_step({num_prompts})"
            )
