"""Preflight of language runs: checks of models, agents, rewards and groups (`ConfigChecks.preflight`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import select
from rlhpc.language.agents.registry import (
    INLINE,
    build_external_agent,
    build_inline_environment,
    check_harness,
    check_sandbox,
    configured_agent,
)
from rlhpc.language.config.run import GrpoConfig, LanguageConfig, TrainedLanguageConfig
from rlhpc.language.multi_policy import ENVIRONMENT
from rlhpc.language.scoring.groups import AGENT, CRITIC, group_roles, scoring_groups
from rlhpc.runs.model_names import model_resource
from rlhpc.runs.preflight import FILES, Check, Need, Resource, path_resource, strongest


def actor_resource(cfg: TrainedLanguageConfig) -> Resource:
    """Returns the resource that a check of the trained model with its training data needs."""
    maker_description = "the run of workflow.sft" if cfg.workflow.sft else ""
    return strongest(
        model_resource(cfg, cfg.actor.model.model_path, maker_description),
        data_resource(cfg, select(cfg, "data.train")),
    )


def data_resource(cfg: RunConfig, section: Any) -> Resource:
    """Returns the resource that a check of a section of `data` needs."""
    return path_resource(cfg, section.path) if section.path else FILES


def answer_checks(cfg: LanguageConfig, tokenizer: Callable[[], Any], resource: Resource) -> Iterator[Check]:
    """Yields the checks of agents, rewards and suites of a run with a model that answers.

    Args:
        cfg: The configuration.
        tokenizer: Returns the model's tokenizer; it is called after the check of the model.
        resource: Resource of the model.
    """
    yield from _agent_checks(cfg, tokenizer, resource)
    yield from _reward_checks(cfg)
    if select(cfg, "runner.val_check_interval") > 0:
        from rlhpc.language.evaluation.evaluate import problems_of, suites_of

        for name, section in suites_of(cfg).items():

            def check(section: Any = section) -> None:
                problems_of(cfg, section, tokenizer())

            yield Check(f"data.eval[{name}] and actor.model", check, strongest(resource, data_resource(cfg, section)))


def _agent_checks(cfg: LanguageConfig, tokenizer: Callable[[], Any], resource: Resource) -> Iterator[Check]:
    agent = cfg.agent
    if agent.kind == INLINE:
        yield Check("rollout.agent", lambda: configured_agent(cfg))
        return
    yield Check("agent and actor.model", lambda: build_external_agent(cfg, tokenizer()), resource)
    if agent.kind == ENVIRONMENT:
        yield Check("agent.target", lambda: build_inline_environment(cfg).environment().close())
        return
    yield Check("agent", lambda: check_harness(cfg))
    if agent.sandbox not in (None, "none"):
        usage = f"{agent.sandbox}, on the machine of the driver"
        yield Check("agent.sandbox", lambda: check_sandbox(cfg), Resource(Need.PROCESS, usage))


def _reward_checks(cfg: LanguageConfig) -> Iterator[Check]:
    from rlhpc.language.rewards.pool import build_inline, find_terms
    from rlhpc.language.scoring.reward_aggregator import Judging, terms_of_pool

    sections = terms_of_pool(cfg)
    terms = find_terms(cfg.reward, sections) if sections else []
    yield Check("reward.terms", lambda: build_inline(terms))
    if remote_terms := [term.name for term in terms if not term.inline]:
        usage = f"judges of {', '.join(remote_terms)}, with their sandboxes"
        yield Check("reward.terms", lambda: Judging(cfg).close(), Resource(Need.PROCESS, usage))


def group_checks(cfg: GrpoConfig, ranks: Mapping[str, int]) -> Iterator[Check]:
    """Yields the check of the models of the critic and of the scoring groups."""
    from rlhpc.language.scoring.checks import check_groups

    group_configs = scoring_groups(cfg)
    names = [name for name in group_roles(cfg) if name in ranks and name != AGENT]
    models = [cfg.critic.model if name == CRITIC else group_configs[name].model for name in names]
    resource = strongest(actor_resource(cfg), *(model_resource(cfg, model.model_path) for model in models))
    yield Check("the groups' models", lambda: check_groups(cfg, ranks), resource)
