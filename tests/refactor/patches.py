"""Mends by hand what `move.py` cannot see: files that are loaded by name. Run after it, in the root of the work tree."""

from __future__ import annotations

from pathlib import Path

#: File (its new path): texts and what takes their place.
PATCHES = {
    "rlhpc/language/agents/runner/task.py": {
        '_load("..", "..", "runtime", "proxies.py")': '_load("..", "..", "..", "runtime", "proxies.py")'
    },
    "rlhpc/language/agents/runner/shell.py": {'"inside.py"': '"loopback.py"'},
    "rlhpc/language/agents/runner/main.py": {'_beside("shells")': '_beside("shell")'},
    "rlhpc/language/agents/agent_processes.py": {
        'Path(__file__).with_name("runner.py")': 'Path(__file__).with_name("runner") / "main.py"'
    },
    "rlhpc/language/sandbox/python.py": {'_INSIDE / "attempts.py"': '_INSIDE / "self_test.py"'},
    "pyproject.toml": {
        '"rlhpc/language/agents/{inside,runner,shells}.py"': '"rlhpc/language/agents/runner/{loopback,main,shell}.py"'
    },
}


def main() -> None:
    """Applies the patches; each text must be there."""
    for path, texts in PATCHES.items():
        source = Path(path).read_text()
        for old, new in texts.items():
            assert old in source, (path, old)
            source = source.replace(old, new)
        Path(path).write_text(source)


if __name__ == "__main__":
    main()
