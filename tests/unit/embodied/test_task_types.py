"""What a run with simulators would refuse once it has started, its plan refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.cli import main
from tests.extras import need_extra

need_extra("embodied")

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SAC, PPO = CONFIGS / "embodied" / "pendulum_sac.yaml", CONFIGS / "quickstart.yaml"
DISCRETE = "env.train.env_id=CartPole-v1"


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (SAC, [DISCRETE], "needs bounded continuous actions (Box); the environment's are Discrete(2): take another"),
        (SAC, [DISCRETE, "algorithm.name=td3", "actor.model.model_type=td3"], "needs bounded continuous actions"),
        (SAC, ["algorithm.name=td3"], "algorithm.name td3 trains td3"),
        (SAC, ["actor.model.model_type=iql"], "algorithm.name sac trains sac, crossq, dsrl"),
        (PPO, ["actor.model.gradient_checkpointing=true"], "model_type mlp has nothing to recompute"),
    ],
)
def test_a_plan_refuses_it(
    config: Path, overrides: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), f"runner.run_dir={tmp_path}", *overrides]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("rlhpc: error:") == 1 and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_plan_accepts_what_is_right(tmp_path: Path) -> None:
    for words in ([], ["algorithm.name=td3", "actor.model.model_type=td3"], ["actor.model.model_type=crossq"]):
        assert main(["plan", str(SAC), f"runner.run_dir={tmp_path}", *words]) == 0
