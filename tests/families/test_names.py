"""Names of the proven families: the package has none, apart from what its memory plan knows of shapes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.families.models import FAMILIES

PACKAGE = Path(__file__).resolve().parents[2] / "rlhpc"
#: Families whose shapes the memory plan computes from the configuration, and the module that does.
PLANNED = {"language/planning/model_size.py": {"mixtral", "qwen3_moe"}}


def iter_strings(path: Path) -> Iterator[str]:
    """Yields the strings of a module, without its docstrings."""
    tree = ast.parse(path.read_text())
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


def test_no_module_names_a_family() -> None:
    """A family is admitted by proof: nothing in the package has to be added for it."""
    names = sorted({*FAMILIES, "mixtral"}, key=len, reverse=True)
    class_names = r"(?!Auto)[A-Z]\w+ForCausalLM"
    pattern = re.compile(rf"(?<![a-z0-9_])(?:{'|'.join(names)})(?![a-z0-9_])|\b{class_names}\b")
    found = {
        str(path.relative_to(PACKAGE)): set(matches)
        for path in PACKAGE.rglob("*.py")
        if (matches := [name for text in iter_strings(path) for name in pattern.findall(text)])
    }
    assert found == PLANNED
