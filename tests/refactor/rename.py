"""Renames names of a module's top level wherever they are used: python tests/refactor/rename.py tests/refactor/names.txt

A line of the table: `rlhpc/package/module.py: Old New`. The definition, every import of it and its uses there change, in the
package, its tests and benchmarks; so do names in backticks in the same files. A name that a function or a parameter of the
module also uses for something else is refused: mypy and the tests show the rest.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path


def imported_name(tree: ast.Module, module: str, name: str) -> tuple[bool, set[str]]:
    """Returns whether a file imports the name itself, and the names under which it has the module."""
    direct, holders = False, set[str]()
    parent, _, leaf = module.rpartition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if node.module == module and alias.name == name and alias.asname is None:
                    direct = True
                if node.module == parent and alias.name == leaf:
                    holders.add(alias.asname or alias.name)
        elif isinstance(node, ast.Import):
            holders |= {alias.asname or alias.name for alias in node.names if alias.name == module}
    return direct, holders


def rename_tokens(source: str, old: str, new: str, direct: bool, holders: set[str], module: str) -> str:
    """Returns source in which a name is another: alone where `direct`, else after one of the holders."""
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    edits: list[tuple[int, int]] = []
    depth, from_other = 0, False
    for i, token in enumerate(tokens):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        if token.type == tokenize.NAME and token.string == "from" and not depth:
            j, path = i + 1, ""
            while tokens[j].string != "import" and tokens[j].type != tokenize.NEWLINE:
                path += tokens[j].string
                j += 1
            from_other = path != module
        if token.type == tokenize.NEWLINE:
            from_other = False
        if token.type == tokenize.STRING and direct and "f" in token.string[:3].lower().partition(token.string[-1])[0]:
            for field in re.finditer(r"\{[^{}]*\}", token.string):
                for use in re.finditer(rf"(?<![\w.'\"]){re.escape(old)}\b", field[0]):
                    before = token.string[: field.start() + use.start()]
                    row = token.start[0] + before.count("\n")
                    column = len(before) - before.rfind("\n") - 1 + (0 if "\n" in before else token.start[1])
                    edits.append((row, column))
        if token.type != tokenize.NAME or token.string != old:
            continue
        before, after = tokens[i - 1].string, tokens[i + 1].string
        if before == ".":
            if tokens[i - 2].string in holders and tokens[i - 3].string != ".":
                edits.append(token.start)
        elif not from_other and (before == "import" or (direct and not (depth and after == "=" and before in "(,"))):
            edits.append(token.start)
    for row, column in sorted(edits, reverse=True):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + len(old) :]
    return "".join(lines)


def main(table: Path) -> int:
    """Renames what the table says."""
    files = subprocess.run(
        ["git", "ls-files", "rlhpc", "tests", "bench", "docs", "examples", "demos"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    sources = {path: Path(path).read_text() for path in files if path.endswith((".py", ".md")) and Path(path).is_file()}
    changed: set[str] = set()
    for line in table.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        home, _, names = line.partition(":")
        old, new = names.split()
        module = home.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        leaf = module.rpartition(".")[2]
        if not re.search(rf"\b{re.escape(old)}\b", sources[home]):
            print(f"not there: {line}")
            continue
        for path, source in sources.items():
            if (
                path.endswith(".md")
                or old not in source
                or (path != home and leaf not in source and module not in source)
            ):
                continue
            direct, holders = imported_name(ast.parse(source), module, old)
            if path == home:
                direct = True
            if not direct and not holders:
                continue
            text = rename_tokens(source, old, new, direct, holders, module)
            text = re.sub(rf"`((?:\w+\.)*){re.escape(old)}\b", rf"`\g<1>{new}", text) if direct else text
            if text != source:
                sources[path] = text
                changed.add(path)
        for path, source in sources.items():
            text = re.sub(rf"{re.escape(module)}([.:]){re.escape(old)}\b", rf"{module}\g<1>{new}", source)
            if text != source:
                sources[path] = text
                changed.add(path)
    for path in changed:
        Path(path).write_text(sources[path])
    print(f"{len(changed)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
