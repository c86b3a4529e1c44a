"""A server of tools and an environment of OpenEnv, for tests; each runs in the Python that has its package."""

from __future__ import annotations

import os
import sys
from typing import Any


def tools(transport: str) -> None:
    """A server of the Model Context Protocol with its own package."""
    from mcp.server.fastmcp import FastMCP, Image

    server = FastMCP("tests", host="127.0.0.1", port=int(os.environ.get("PORT", "0")))

    @server.tool()
    def multiply(a: int, b: int) -> str:
        """Multiplies."""
        if a < 0:
            raise ValueError("a is negative")
        return str(a * b)

    @server.tool(structured_output=False)
    def look() -> list[Any]:
        """Shows a picture."""
        return ["there:", Image(data=b"PNG", format="png")]

    server.run(transport=transport)


def environment() -> None:
    """Says at the third step how often it was told the right thing."""
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Said(Action):
        message: str

    class Seen(Observation):
        text: str = ""

    class Counting(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def reset(self, seed: Any = None, episode_id: Any = None, **_: Any) -> Seen:
            self.steps = 0
            return Seen(text="say 84", done=False, reward=0.0)

        def step(self, action: Said, timeout_s: Any = None, **_: Any) -> Seen:
            self.steps += 1
            reward = float("84" in action.message)
            return Seen(text=f"step {self.steps}", done=self.steps == 3, reward=reward)

        @property
        def state(self) -> State:
            return State(step_count=self.steps)

    app = create_app(Counting, Said, Seen, env_name="counting", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["PORT"]), log_level="warning")


if __name__ == "__main__":
    if sys.argv[1] == "environment":
        environment()
    else:
        tools(sys.argv[1])
