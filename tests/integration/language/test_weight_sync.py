"""Weights between real processes: every version equals the sender's bit for bit, on this host and on another one, also for
ranks that were started anew; and in runs of language models with frozen weights."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_reasoning import LanguageRun
from tiny_run import wait_until
from weight_ranks import CARD, RECEIVERS, Actor, Trainer

from rlhpc import FlexiblePlacementStrategy, Session, WorkerGroup
from rlhpc.runtime.comm.shared_memory import bytes_in_use
from rlhpc.runtime.errors import WorkerFailed
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from tests.accelerators import OTHERS_ON_CARD, cluster_of, placed
from tests.extras import need_extra

Groups = dict[str, WorkerGroup]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    session = Session.start(tcp_address="127.0.0.1")
    cluster = cluster_of(1, OTHERS_ON_CARD)
    one, two = placed(1, OTHERS_ON_CARD), FlexiblePlacementStrategy([[0], [0]]) if OTHERS_ON_CARD else placed(2, False)
    made = {"trainer": Trainer.create_group().launch(cluster, one, "trainer")}
    made["near"] = Actor.create_group().launch(cluster, two, "near")
    elsewhere = {"RLHPC_HOST_ID": "elsewhere"}
    made["far"] = Actor.create_group().launch(cluster, two, "far", env_vars=elsewhere)
    yield made
    session.stop()


@pytest.mark.parametrize("adopt", [False, True], ids=["copied", "adopted"])
@pytest.mark.parametrize("delta", ["off", "frozen", "elements"])
def test_every_version_arrives_bit_for_bit(groups: Groups, delta: str, adopt: bool) -> None:
    trainer, receivers = groups["trainer"], [groups["near"], groups["far"]]
    for handle in [trainer.open(delta), *(group.open(delta, adopt) for group in receivers)]:
        handle.wait()
    for version in range(12):
        if version in (4, 8):  # a rollout group that is started anew; the sender lives on and is told nothing
            again = groups["near" if version == 4 else "far"]
            again.shutdown()
            again.relaunch().wait_ready()
            again.open(delta, adopt).wait()
        handles = [trainer.send(version, (0.01, 0.0, 0.5)[version % 3]), *(group.take() for group in receivers)]
        (sent,), *taken = [handle.wait() for handle in handles]
        assert [result for group in taken for result in group] == [(version, sent)] * 4


GROUP = "weight_ranks:ByGroup"


@pytest.mark.parametrize("delta", ["off", "frozen"])
def test_versions_go_over_a_process_group(groups: Groups, delta: str) -> None:
    """What is sent between accelerators by NCCL, by gloo. Receivers that are started anew join another group."""
    trainer, receivers = groups["trainer"], [groups["near"], groups["far"]]
    for handle in [trainer.open(delta, GROUP), *(group.open(delta, False, GROUP) for group in receivers)]:
        handle.wait()
    for version in range(6):
        if version == 3:
            receivers[1].shutdown()
            receivers[1].relaunch().wait_ready()
            receivers[1].open(delta, False, GROUP).wait()
        handles = [*(group.take() for group in receivers), trainer.send(version, 0.5)]
        *taken, (sent,) = [handle.wait() for handle in handles]
        assert [result for group in taken for result in group] == [(version, sent)] * 4
        if version == 2:
            ((before, _),) = trainer.carried().wait()
    ((carried, _),) = trainer.carried().wait()
    assert 0 < before < carried, "the first parts of a version go by the host's road, but not all"


@pytest.mark.parametrize("address", [CARD, "its peer"])
def test_versions_stay_on_the_card_that_all_can_read(groups: Groups, tmp_path: Path, address: str) -> None:
    trainer, near, card = groups["trainer"], groups["near"], str(tmp_path)
    for handle in [
        trainer.open("frozen", "auto", card, RECEIVERS[:1]),
        near.open("frozen", False, "auto", card, address),
    ]:
        handle.wait()
    found = []
    for version in range(8):
        handles = [trainer.send(version, 0.5), near.take()]
        (sent,), taken = [handle.wait() for handle in handles]
        assert taken == [(version, sent)] * 2
        found += trainer.carried().wait()
    for handle in [trainer.open("off"), near.open("off", False)]:
        handle.wait()
    assert [carried for carried, _ in found[2:]] == [found[1][0] + number for number in range(1, 7)]
    assert found[-1][1] <= 2 * found[1][1], "buffers that all have read are written again"


def test_what_all_have_taken_is_freed(groups: Groups) -> None:
    """On another host one rank fetches for all: the others have to say so, too, when they are done."""
    session = Session.running()
    assert session is not None
    trainer, receivers = groups["trainer"], [groups["near"], groups["far"]]
    for handle in [trainer.open("off"), *(group.open("off", False) for group in receivers)]:
        handle.wait()

    def send(versions: range) -> int:
        for version in versions:
            for handle in [trainer.send(version, 0.5), *(group.take() for group in receivers)]:
                handle.wait()
        return bytes_in_use(session.scratch.shm)

    before = send(range(3))
    send(range(3, 20))
    wait_until(lambda: bytes_in_use(session.scratch.shm) <= before, timeout=10)


@pytest.mark.parametrize("how", ["breaks off", "dies"])
def test_who_is_lost_in_the_middle_costs_the_others_nothing(groups: Groups, how: str) -> None:
    """They get the version that was under way, through the host; the next one goes over a group again."""
    trainer, near, far = groups["trainer"], groups["near"], groups["far"]
    session = Session.running()
    assert session is not None
    with session.training(SessionPolicies({"near": GroupPolicy(min_ranks=1)})):
        for handle in [trainer.open("off", GROUP), *(group.open("off", False, GROUP) for group in (near, far))]:
            handle.wait()
        found, late = [], None
        for version in range(40):
            handles = [trainer.send(version, 0.5), far.take(), near.execute_on(0).take()]
            if version == 2:
                fallen = near.execute_on(1).fall(how)
                if how == "breaks off":
                    late = near.execute_on(1).take()  # of the next version
            else:
                handles.append(late or near.execute_on(1).take())
                late = None
            (sent,), *taken = [handle.wait(30) for handle in handles]
            assert [result for group in taken for result in group] == [(version, sent)] * len(handles)
            if version == 2 and how == "dies":
                fallen.wait(30)
                near.restart()
                wait_until(lambda: 1 in near.admit(), timeout=60)
                near.took_in(1)
                near.execute_on(1).open("off", False, GROUP).wait()
            found += [carried for carried, _ in trainer.carried().wait()]
            if version > 3 and found[-1] > found[-2]:  # on a busy machine the host may be the way of one more before
                break
    news = [after - before for before, after in zip([0, *found], found, strict=False)]
    assert 0 < news[2] < 36, "of more than 40 parts"
    assert news[-1] > 0


def test_who_does_not_come_is_named(groups: Groups) -> None:
    """The last test of these groups, which end with it."""
    trainer, near, far = groups["trainer"], groups["near"], groups["far"]
    for handle in [trainer.open("off", GROUP), *(group.open("off", False, GROUP) for group in (near, far))]:
        handle.wait()
    trainer.has_patience(5.0).wait()
    said = r"DeadlineExceeded: trainer-0 waited 5 s for near-0, near-1 in an update of weights by gloo"
    handles = [far.take(), near.fall("stalls"), trainer.send(0, 0.5)]
    with pytest.raises(WorkerFailed, match=said):
        handles[-1].wait()


LORA = (
    "actor.lora.rank=8", "actor.lora.target_modules=[q_proj]", "actor.optim.lr=2e-2", "runner.max_steps=4",
    "runner.save_interval=1",
)  # fmt: skip


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_language_model_with_frozen_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """The rollout rank is killed and started again; the actor, which has sent the frozen weights long ago, lives on."""
    need_extra("vllm" if engine == "vllm" else "llm")
    delta = {"hf": "elements", "vllm": "frozen"}[engine]
    run = LanguageRun(tmp_path / "run", *LORA, f"rollout.rollout_backend={engine}", f"rollout.weight_delta={delta}")
    run.environment["RLHPC_MAX_RESTARTS"] = "2"
    process = run.start()
    wait_until(lambda: (run.root / "checkpoints" / "global_step_2" / "COMPLETE").exists(), timeout=200)
    member = run.root / "registry" / "local-0" / "members" / "rollout-0.json"
    os.kill(json.loads(member.read_text())["pid"], signal.SIGKILL)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert "all other ranks stay" in said
    # The trainer's log-probs of what the engine drew are the engine's: it has the weights of each step.
    assert max(row["train/mismatch_abs"] for row in run.rows()) < 1e-4
    for line in (run.root / "metrics.jsonl").read_text().splitlines():  # with a digest of each version at both ends
        row = json.loads(line)
        assert 0 < row["time/proof_s"] < row["time/cpu_s"]
