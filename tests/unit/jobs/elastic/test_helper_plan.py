"""Ranks from jobs of their own: when there are more, when fewer, what a job asks for, and who was there when."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from rlhpc.jobs.elastic.helper_plan import Bounds, ClusterState, Decision, LiveHelperJob, Rule, helper_plans
from rlhpc.jobs.plan import build_plan, render_plan
from rlhpc.jobs.slurm import without_job_variables
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import find_task_type
from rlhpc.runtime.errors import ConfigError

ROOT = Path(__file__).parents[4]
BOUNDS = Bounds(min_ranks=0, max_ranks=8, per_job=1, hours_per_job=1.0, react_s=60.0)


def at_work(*ids: str, hours: float = 0.0) -> list[LiveHelperJob]:
    return [LiveHelperJob(name, "running", 1, hours) for name in ids]


def waits(rule: Rule, seen: ClusterState, seconds: float = 60.0) -> Decision:
    """What it decides once something has been so for as long."""
    rule.decide(seen)
    return rule.decide(replace(seen, now=seen.now + seconds))


def test_it_grows_while_the_actor_waits_and_all_are_at_work() -> None:
    rule = Rule(BOUNDS)
    assert rule.decide(ClusterState(0, waited_s=0.5)).submit == 0, "not at once"
    assert rule.decide(ClusterState(59, waited_s=0.5)).submit == 0
    first = rule.decide(ClusterState(60, waited_s=0.5))
    assert (first.submit, first.only_soon) == (1, True) and "waits for rollouts 50% of the time" in first.reason
    assert rule.decide(ClusterState(200, [LiveHelperJob("1", "queued")], waited_s=0.5)) == Decision(
        target=1, reason="there are to be 1"
    ), "one that is in the queue comes first"
    assert rule.decide(ClusterState(300, [LiveHelperJob("1", "running")], waited_s=0.5)).submit == 0, (
        "nor has it joined"
    )
    assert waits(rule, ClusterState(400, at_work("1"), waited_s=0.5)).submit == 1
    assert waits(rule, ClusterState(500, at_work("1", "2"), waited_s=0.5)).submit == 2, "as many again"
    assert waits(rule, ClusterState(600, at_work(*"1234"), waited_s=0.5)).submit == 4
    assert waits(rule, ClusterState(700, at_work(*"12345678"), waited_s=0.5)).submit == 0, "there are as many as may be"


def test_it_shrinks_while_the_actor_does_not_wait() -> None:
    rule = Rule(BOUNDS)
    assert waits(rule, ClusterState(0, at_work(*"123"), waited_s=0.15)).leave == ()
    gone = waits(rule, ClusterState(100, at_work(*"123"), waited_s=0.01))
    assert gone.leave == ("3",) and "only 1%" in gone.reason
    assert rule.decide(ClusterState(220, at_work(*"12"), waited_s=0.01)).leave == ("2",)
    assert waits(Rule(replace(BOUNDS, min_ranks=2)), ClusterState(0, at_work(*"12"), waited_s=0.01)).leave == ()


def test_what_is_queued_goes_first_and_what_is_young() -> None:
    jobs = [*at_work("1", "2"), LiveHelperJob("3", "queued"), LiveHelperJob("4", "queued"), *at_work("5")]
    assert Rule(BOUNDS).decide(ClusterState(0, jobs, requested_ranks=1)).leave == ("4", "3", "5", "2")


def test_a_number_that_was_asked_for_is_kept_within_its_bounds() -> None:
    rule = Rule(replace(BOUNDS, min_ranks=1))
    asked = rule.decide(ClusterState(0, requested_ranks=20))
    assert (asked.submit, asked.only_soon, asked.target) == (8, False, 8)
    assert rule.decide(ClusterState(1, at_work(*"123"), requested_ranks=0)).leave == ("3", "2")
    assert rule.decide(ClusterState(2, at_work("1"), waited_s=0.0)).leave == ()


def test_the_least_is_asked_for_whatever_the_queue_says() -> None:
    least = Rule(replace(BOUNDS, min_ranks=2)).decide(ClusterState(0))
    assert (least.submit, least.only_soon) == (2, False)


def test_where_the_queue_is_long_it_asks_again_later() -> None:
    rule = Rule(BOUNDS)
    assert waits(rule, ClusterState(0, waited_s=0.5)).submit == 1
    rule.limit_to_live_jobs(0)
    assert rule.decide(ClusterState(61, waited_s=0.5)).submit == 0
    assert waits(rule, ClusterState(70, waited_s=0.5)).submit == 1


def test_a_driver_that_comes_back_begins_with_what_is_there() -> None:
    assert Rule(BOUNDS).decide(ClusterState(0, [*at_work("1"), LiveHelperJob("2", "queued")])) == Decision(
        target=2, reason="there are to be 2"
    )


def test_nobody_is_asked_for_who_would_have_nothing_to_do() -> None:
    rule = Rule(BOUNDS)
    assert waits(rule, ClusterState(0, at_work("1", "2"), waited_s=0.9, useful=3)).submit == 1
    assert waits(rule, ClusterState(100, at_work("1", "2", "3"), waited_s=0.9, useful=3)).submit == 0


def test_jobs_of_several_ranks() -> None:
    bounds = replace(BOUNDS, per_job=4, max_ranks=10)
    assert Rule(bounds).decide(ClusterState(0, requested_ranks=10)).submit == 2, "three jobs would be too many ranks"
    assert Rule(replace(bounds, min_ranks=1)).decide(ClusterState(0)).submit == 1


class Cluster:
    """Jobs that start at once and run on; each look is half a minute after the one before."""

    def __init__(self, rule: Rule, draw: random.Random, useful: int) -> None:
        self.rule, self.draw, self.useful = rule, draw, useful
        self.jobs: list[LiveHelperJob] = []
        self.now, self.ids = 0.0, 0

    def look(self, waited: float, count: int) -> int:
        """Looks `count` times; jobs start a look later, and some lose a rank. Returns the number of jobs in the end."""
        for _ in range(count):
            self.now += 30.0
            decision = self.rule.decide(ClusterState(self.now, self.jobs, waited_s=waited, useful=self.useful))
            self.jobs = [
                replace(job, state="running", ranks=job.ranks or self.rule.bounds.per_job) for job in self.jobs
            ]
            self.jobs = [job for job in self.jobs if job.id not in decision.leave]
            self.jobs += [LiveHelperJob(f"{self.ids + at}", "queued") for at in range(decision.submit)]
            self.ids += decision.submit
            if self.jobs and self.draw.random() < 0.1:
                at = self.draw.randrange(len(self.jobs))
                self.jobs[at] = replace(self.jobs[at], ranks=max(1, self.jobs[at].ranks - 1))
        return len(self.jobs)


@pytest.mark.parametrize("seed", range(200))
def test_idleness_leads_to_the_least_and_starving_to_the_most_that_limits_and_budget_allow(seed: int) -> None:
    draw = random.Random(seed)
    per_job, hours = draw.randint(1, 4), draw.choice([0.5, 1.0, 3.0])
    least = draw.choice([0, 0, draw.randint(0, 6)])
    most = math.ceil(least / per_job) * per_job + draw.randint(0, 13)
    most = max(most, per_job)
    budget = draw.choice([None, hours * draw.uniform(1.0, 6.0)])
    useful = draw.choice([2**31, draw.randint(0, 12)])
    rule = Rule(Bounds(least, most, per_job, hours, budget))
    affordable = most if budget is None else int(budget / hours + 1e-9)
    least_jobs = min(math.ceil(least / per_job), affordable)
    most_jobs = max(least_jobs, min(min(most, useful) // per_job, affordable))
    cluster = Cluster(rule, draw, useful)
    assert cluster.look(0.5, 60) == most_jobs and most_jobs * per_job <= most
    assert cluster.look(0.0, 80) == least_jobs
    cluster.look(draw.choice([0.0, 0.5]), draw.randint(0, 9))
    assert cluster.look(0.5, 60) == most_jobs
    assert cluster.look(0.0, 80) == least_jobs


def test_the_budget_holds_for_whole_walltimes() -> None:
    bounds = replace(BOUNDS, budget=4.0)
    assert Rule(bounds).decide(ClusterState(0, requested_ranks=8)).submit == 4
    assert Rule(bounds).decide(ClusterState(0, at_work("1", "2", hours=0.5), requested_ranks=8)).submit == 2, (
        "those that run may take an hour"
    )
    assert Rule(bounds).decide(ClusterState(0, at_work("1", hours=0.5), requested_ranks=8, spent=2.2)).submit == 0
    over = Rule(bounds).decide(ClusterState(0, at_work("1", hours=0.5), requested_ranks=8, spent=3.5))
    assert over.leave == ("1",) and "budget of 4 hours" in over.reason


def test_jobs_that_end_at_once_are_not_submitted_again_and_again() -> None:
    rule = Rule(BOUNDS)
    for vain, pause in ((1, 30), (2, 60), (3, 120), (20, 3600)):
        seen = ClusterState(1000, requested_ranks=1, num_consecutive_failures=vain, failed_at=1000)
        assert rule.decide(replace(seen, now=1000 + pause - 1)).submit == 0
        assert rule.decide(replace(seen, now=1000 + pause)).submit == 1


SECTION = {
    "account": "abc", "gres_name": "gpu:a100", "setup": ["module load x"], "partition": "gpu", "mem": "900G",
    "component_placement": {"actor": "0", "rollout": "1-2"}, "accelerators_per_node": 4,
    "elastic": [{"max": 16, "partition": "preempt", "qos": "scavenger", "ranks_per_job": 2, "max_gpu_hours": 100,
                 "cpus_per_node": 16, "mem": "64G", "time": "01:30:00"}],
}  # fmt: skip


def test_what_a_job_asks_for() -> None:
    plan = build_plan(OmegaConf.create({"cluster": SECTION, "runner": {"name": "run"}}), launcher="slurm")
    (helpers,) = plan.helpers
    parameters = helpers.submitit_parameters()
    assert parameters == {
        "partition": "preempt", "account": "abc", "qos": "scavenger", "nodes": 1, "ntasks_per_node": 1, "cpus_per_task": 16,
        "mem": "64G", "gres": "gpu:a100:2", "time": 90, "setup": ["module load x"],
        "additional_parameters": {"signal": "B:USR2@30", "no-requeue": True},
    }  # fmt: skip
    assert helpers.bounds.hours_per_job == 3.0 and helpers.counted == 2
    shown = render_plan(plan)
    assert "# helpers: 0 to 16 more ranks of rollout, 2 a job, 100 accelerator-hours in all" in shown
    assert "#SBATCH --gres=gpu:a100:2" in shown


def test_without_accelerators_the_node_is_counted() -> None:
    (helpers,) = helper_plans({"elastic": [{"max": 4, "ranks_per_job": 4, "time": "30"}]}, {})
    assert helpers.bounds.hours_per_job == 0.5 and helpers.counted == 1 and "gres" not in dict(helpers.options)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("[{group: actor}]", r"cluster.elastic\[0\].group is 'actor'; groups of this run that take ranks under way: rollout"),
        ("[{}, {}]", r"cluster.elastic\[1\].group is 'rollout'; there is another entry for it"),
        ("[{min: 3}]", r"cluster.elastic\[0\].max is 1; it must be at least min \(3\)"),
        ("[{min: 3, max: 3, ranks_per_job: 2}]", r"max is 3; min \(3\) takes 2 jobs of 2 ranks: it must be at least 4"),
        ("[{ranks_per_job: 2}]", r"cluster.elastic\[0\].max is 1; it must be at least min \(0\) and ranks_per_job \(2\)"),
        ("[{max_gpu_hours: 0.5}]", r"cluster.elastic\[0\].max_gpu_hours is 0.5; one job takes 1 \(time 01:00:00\)"),
        ("[{time: soon}]", r"cluster.elastic\[0\].time is 'soon'; write it as Slurm does"),
        ("[{partition: 'a b'}]", r"cluster.elastic\[0\].partition is 'a b'; it goes into a job's directives"),
        ("[{look_s: 0}]", r"cluster.elastic\[0\].look_s is 0"),
        ("[{look_s: 4.9}]", r"cluster.elastic\[0\].look_s is 4.9(.|\n)*5"),
        ("[{nodes: 2}]", r"nodes"),
    ],
)  # fmt: skip
def test_what_is_refused(entries: str, said: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump({
            "defaults": [str(ROOT / "configs/base/grpo.yaml")], "runner": {"name": "run", "run_dir": str(tmp_path)},
            "data": {"train": {"source": "arithmetic"}}, "reward": {"terms": [{"name": "math"}]},
            "actor": {"model": {"model_path": "builtin:tiny"}},
        })
    )  # fmt: skip
    assert load_config(config, ["cluster.elastic=[{min: 1, max: 3}]"]).cluster.elastic[0].max == 3
    with pytest.raises(ConfigError, match=said):
        load_config(config, [f"cluster.elastic={entries}"])


def test_runs_that_take_no_ranks_have_no_such_key() -> None:
    with pytest.raises(
        ConfigError, match=r"is for task types that this one .* is not: embodied, off_policy, reasoning"
    ):
        load_config(ROOT / "configs/reasoning/reward_model.yaml", ["cluster.elastic=[{max: 2}]"])


def test_ranks_come_where_they_play_ahead() -> None:
    quickstart, ahead = ROOT / "configs/quickstart.yaml", "algorithm.max_staleness=1"
    with pytest.raises(ConfigError, match=r"take ranks under way: none; .*algorithm\.max_staleness of 1 or more"):
        load_config(quickstart, ["cluster.elastic=[{group: env, max: 2}]"])
    with pytest.raises(ConfigError, match=r"cluster\.elastic\[0\]\.group is .*take ranks under way: env, rollout$"):
        load_config(quickstart, [ahead, "cluster.elastic=[{group: actor, max: 2}]"])
    cfg = load_config(quickstart, [ahead, "cluster.elastic=[{group: env, max: 2}, {max: 2}]"])
    slots = cfg.env.train.num_envs // cfg.rollout.pipeline_stage_num  # type: ignore[attr-defined]
    assert find_task_type("embodied").groups.max_useful_ranks(cfg, {"env": 3, "rollout": 1}) == {
        "env": 3 * (32 // 4),
        "rollout": slots,
    }
    whole = load_config(quickstart, [ahead, "env.train.auto_reset=false"])
    assert find_task_type("embodied").groups.max_useful_ranks(whole, {"env": 3, "rollout": 1})["env"] == 6, (
        "episodes are not cut"
    )
    sac, elastic = ROOT / "configs/embodied/pendulum_sac.yaml", "cluster.elastic=[{group: env, max: 2}]"
    with pytest.raises(ConfigError, match=r"what each step adds to the buffer before its updates is fixed"):
        load_config(sac, [elastic])
    load_config(sac, [elastic, ahead])


def test_a_job_inherits_nothing_of_its_drivers() -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SBATCH_QOS": "x", "SLURM_CONF": "/c", "PATH": "/bin",
             "CUDA_VISIBLE_DEVICES": "0", "RLHPC_MODELS": "/m", "SUBMITIT_FOLDER": "/f"}  # fmt: skip
    assert without_job_variables(given) == {"SLURM_CONF": "/c", "PATH": "/bin", "RLHPC_MODELS": "/m"}
