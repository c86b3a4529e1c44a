"""An exported policy that acts without rlhpc: `policy.pt2`, a program in torch's own format, and `policy.py` to run it."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rlhpc.embodied.models import Policy

log = logging.getLogger(__name__)

#: Acts in any Gymnasium environment with the folder's files and torch; it knows nothing of rlhpc.
SCRIPT = '''"""The policy of this folder: needs torch and numpy, and gymnasium to play. `python policy.py` plays an episode."""

import json
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
CONFIG = json.loads((HERE / "config.json").read_text())
PROGRAM = torch.export.load(str(HERE / "policy.pt2")).module()


def act(obs):
    """The most likely action for one observation of the environment, as `env.step` takes it."""
    if isinstance(obs, dict):
        rows = {key: torch.as_tensor(np.asarray(part))[None] for key, part in obs.items()}
    else:
        rows = torch.as_tensor(np.asarray(obs))[None]
    with torch.no_grad():
        action = PROGRAM(rows)[0, 0].numpy()  # the first one, of the chunk that is chosen at once
    space = CONFIG["policy"]["action_space"]
    if space["type"] == "Discrete":
        return int(action[0]) + space["start"]
    if space["type"] == "Box":
        low, high = (np.asarray(space[name], np.float64) for name in ("low", "high"))
        low, high = (bound.reshape(space["shape"]) if bound.ndim else bound for bound in (low, high))
        return np.clip(action.reshape(space["shape"]), low, high).astype(space["dtype"])
    return action + np.asarray(space.get("start", 0))


if __name__ == "__main__":
    import gymnasium

    env = gymnasium.make(CONFIG["env_id"])
    obs, _ = env.reset(seed=0)
    total, done = 0.0, False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(act(obs))
        total, done = total + float(reward), terminated or truncated
    print(f"return {total:g}")
'''


class _Acts(nn.Module):
    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: Any) -> Tensor:
        """The most likely actions `[B, chunk, dim]`."""
        return self.policy.predict_action_batch(obs, mode="eval")[0]


def program_of(policy: Policy) -> bytes | None:
    """The content of `policy.pt2`; None for a policy that torch.export cannot follow.

    Args:
        policy: In eval mode, on the CPU. Its program takes observations `[B, ...]` with any B, as the environment gives
            them, or a dict of such.
    """
    batch = torch.export.Dim("batch", min=1)
    try:
        # Two rows: a dimension of one would be taken for a constant.
        obs = _rows(policy.observation_space, 2)
        shapes: Any = {key: {0: batch} for key in obs} if isinstance(obs, dict) else {0: batch}
        with torch.no_grad():
            program = torch.export.export(_Acts(policy).eval(), (obs,), dynamic_shapes=(shapes,))
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
    except Exception as error:  # whatever a model's code is that a trace cannot follow
        log.info("no program of this policy: %s", str(error).splitlines()[0] if str(error) else type(error).__name__)
        return None
    return buffer.getvalue()


def _rows(space: Any, count: int) -> Any:
    """`count` zero observations of a space, as tensors."""
    if hasattr(space, "spaces"):
        return {key: _rows(part, count) for key, part in space.spaces.items()}
    return torch.from_numpy(np.zeros((count, *space.shape), space.dtype))
