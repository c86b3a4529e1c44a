"""Mends by hand what `move.py` cannot see: files that are loaded by name. Run after it, in the root of the work tree."""

from __future__ import annotations

import sys
from pathlib import Path

#: File (its new path): texts and what takes their place.
PATCHES = {
    "rlhpc/language/agents/runner/task.py": {
        '_load("..", "..", "runtime", "proxies.py")': '_load("..", "..", "..", "runtime", "proxies.py")'
    },
    "rlhpc/language/agents/runner/shell.py": {'"inside.py"': '"loopback.py"'},
    "rlhpc/language/agents/runner/main.py": {
        '_beside("shells")': '_beside("shell")',
        '_beside("tool_servers")': '_beside("mcp_client")',
        '_beside("policy_text")': '_task._load("..", "..", "policy_text.py")',
    },
    "rlhpc/language/agents/runner/frameworks.py": {"the modules `tool_servers` and": "the modules `mcp_client` and"},
    "rlhpc/language/agents/agent_processes.py": {
        'Path(__file__).with_name("runner.py")': 'Path(__file__).with_name("runner") / "main.py"'
    },
    "rlhpc/language/sandbox/python.py": {'_INSIDE / "attempts.py"': '_INSIDE / "self_test.py"'},
    "pyproject.toml": {
        '"rlhpc/language/agents/{inside,runner,shells}.py"': '"rlhpc/language/agents/runner/{loopback,main,shell}.py"'
    },
}


#: The same for tests, which move last.
TEST_PATCHES = {
    "tests/unit/language/agents/gateway/test_request_schema.py": {"parents[4]": "parents[5]"},
    "tests/unit/language/rewards/test_graders.py": {"parents[5]": "parents[4]"},
}


def main() -> None:
    """Applies the patches; each text must be there."""
    for path, texts in (TEST_PATCHES if "tests" in sys.argv else PATCHES).items():
        source = Path(path).read_text()
        for old, new in texts.items():
            assert old in source, (path, old)
            source = source.replace(old, new)
        Path(path).write_text(source)


if __name__ == "__main__":
    main()
