"""Moves, merges and splits modules of rlhpc as a table says, with everything that names them.

    python tests/refactor/move.py tests/refactor/moves.txt [PREFIX …]      (in a clean work tree)

With prefixes only steps of files whose paths begin with one are taken. The table has a line for each step: `A moves to B`,
`A is folded into B`, `from A to B: names`. Import statements are rewritten by the syntax tree; module and file paths in other
text by one pass over all tracked files. What needs a person is printed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".smk", ".sh", ".txt", ".cfg", ".in", ".json", ".ini", ""}
SKIPPED = ("tests/refactor/", "CHANGELOG.md", "tests/data/", "bench/results/")


@dataclass
class Table:
    """Steps: paths of files, old to new.

    Attributes:
        moves: Old to new.
        folds: Old to the new path of what it becomes a part of.
        splits: Of an old file, the new file of each name that does not stay with the rest.
    """

    moves: dict[str, str] = field(default_factory=dict)
    folds: dict[str, str] = field(default_factory=dict)
    splits: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))

    @classmethod
    def read(cls, path: Path, prefixes: tuple[str, ...]) -> Table:
        table = cls()
        for line in path.read_text().splitlines():
            line = line.strip()
            if line.startswith("PART"):
                continue
            origin = line.removeprefix("from ").partition(" ")[0]
            if prefixes and not origin.startswith(prefixes):
                continue
            if found := re.match(r"(\S+) moves to (\S+)$", line):
                table.moves[found[1]] = found[2]
            elif found := re.match(r"(\S+) is folded into (\S+)$", line):
                table.folds[found[1]] = found[2]
            elif found := re.match(r"from (\S+) to (\S+): (.+)$", line):
                for name in found[3].split(","):
                    table.splits[found[1]][name.strip()] = found[2]
            elif line and not line.startswith("#"):
                print(f"by hand: {line}")
        return table


def dotted(path: str) -> str:
    """Returns the module of a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Mapping:
    """Where modules and their names are afterwards."""

    def __init__(self, table: Table, files: set[str]) -> None:
        self.modules = {dotted(path) for path in files if path.endswith(".py")}
        self.new = {dotted(old): dotted(new) for old, new in {**table.moves, **table.folds}.items()}
        self.split = {
            dotted(old): {name: dotted(new) for name, new in names.items()} for old, names in table.splits.items()
        }
        self.paths = {**table.moves, **table.folds}
        self.renames: dict[tuple[str, str], str] = {}
        self.bound = {
            dotted(path): {
                alias.asname or alias.name
                for node in ast.parse(Path(path).read_text()).body
                if isinstance(node, ast.ImportFrom) and node.module != dotted(path)
                for alias in node.names
            }
            for path in files
            if path.endswith("/__init__.py")
        }
        changed = sorted({*self.new, *self.split}, key=len, reverse=True)
        name = "|".join(map(re.escape, changed)) or r"(?!)"
        self.pattern = re.compile(rf"(?<![\w.])({name})(?![\w])(?:(:|\.)([A-Za-z_]\w*))?")
        files_ = "|".join(re.escape(old) for old in sorted(self.paths, key=len, reverse=True)) or r"(?!)"
        self.file_pattern = re.compile(rf"(?<![\w/])({files_})(?![\w])")

    def module(self, old: str, name: str | None = None) -> str:
        """Returns the new module of a name of an old one."""
        if name is not None and name in self.split.get(old, {}):
            return self.split[old][name]
        return self.new.get(old, old)

    def text(self, text: str) -> str:
        """Returns text with the paths of today's modules and files."""

        def replace(found: re.Match[str]) -> str:
            old, mark, name = found[1], found[2], found[3]
            if name is None:
                return self.module(old)
            if mark == "." and f"{old}.{name}" in self.modules:  # a package whose module of that name stays
                return found[0]
            return f"{self.module(old, name)}{mark}{name}"

        return self.file_pattern.sub(lambda found: self.paths[found[1]], self.pattern.sub(replace, text))


def imports_of(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def rewritten_import(node: ast.ImportFrom, mapping: Mapping, target: str | None) -> list[str]:
    """Returns the statements that take the place of one; those from `target` itself are left out.

    Args:
        node: Of an absolute import from rlhpc.
        mapping: The new modules.
        target: The new module in which the statement stands.
    """
    by_module: dict[str, list[str]] = defaultdict(list)
    renamed = []
    for alias in node.names:
        full = f"{node.module}.{alias.name}"
        if full in mapping.modules and alias.name not in mapping.bound.get(str(node.module), ()):
            parent, _, leaf = mapping.module(full).rpartition(".")
            local = alias.asname or alias.name
            by_module[parent].append(leaf if leaf == local and not alias.asname else f"{leaf} as {local}")
            continue
        module = mapping.module(str(node.module), alias.name)
        if module == target:
            name = mapping.renames.get((str(node.module), alias.name), alias.name)
            if name != (alias.asname or alias.name):
                renamed.append(f"{alias.asname or alias.name} = {name}")
            continue
        name = mapping.renames.get((str(node.module), alias.name), alias.name)
        local = alias.asname or alias.name
        by_module[module].append(name if name == local and not alias.asname else f"{name} as {local}")
    return [f"from {module} import {', '.join(names)}" for module, names in by_module.items()] + renamed


def rewrite(source: str, mapping: Mapping, target: str | None) -> str:
    """Returns Python source with new imports, and new paths in its strings and comments."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()
    edits: list[tuple[int, int, str]] = []
    bodies = {
        id(child): (block, parent)
        for parent in ast.walk(tree)
        for block in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
        if isinstance(block, list)
        for child in block
    }
    for node in imports_of(tree):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        if isinstance(node, ast.ImportFrom):
            if node.level or not (node.module or "").startswith("rlhpc"):
                continue
            statements = rewritten_import(node, mapping, target)
            indent = " " * node.col_offset
            if not statements:
                block, _ = bodies[id(node)]
                others = [other for other in block if other is not node and not is_from(other, mapping, target)]
                statements = [] if others else ["pass"]
            text = f"\n{indent}".join(statements)
            if not text:  # the line goes
                line_start = starts[node.lineno - 1]
                if raw[line_start:begin].strip() == b"":
                    begin = line_start
                    end += raw[end : end + 200].find(b"\n") + 1 if b"\n" in raw[end : end + 200] else 0
            edits.append((begin, end, text))
        else:
            edits.append((begin, end, mapping.text(raw[begin:end].decode())))
    pieces, place = [], 0
    for begin, end, text in sorted(edits):
        pieces += [mapping.text(raw[place:begin].decode()), text]
        place = end
    return "".join([*pieces, mapping.text(raw[place:].decode())])


def is_from(node: ast.stmt, mapping: Mapping, target: str | None) -> bool:
    """Returns whether a statement is an import of the module that it stands in."""
    return (
        isinstance(node, ast.ImportFrom)
        and not node.level
        and (node.module or "").startswith("rlhpc")
        and not rewritten_import(node, mapping, target)
    )


@dataclass
class Piece:
    """A module, or definitions of one, that becomes a part of another."""

    origin: str
    docstring: str
    head: list[str]
    body: str
    names: set[str]


def top_names(body: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def piece_of(origin: str, source: str) -> Piece:
    """Takes a rewritten module apart: imports at its head, and the rest."""
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    docstring, head, taken = "", [], set()
    for index, node in enumerate(tree.body):
        span = range(node.lineno - 1, node.end_lineno or node.lineno)
        if (
            index == 0
            and isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstring = "".join(lines[i] for i in span)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                head.append("".join(lines[i] for i in span))
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            head.append("".join(lines[i] for i in span))
        else:
            continue
        taken |= set(span)
    rest = "".join(line for i, line in enumerate(lines) if i not in taken).strip("\n")
    return Piece(origin, docstring, head, rest + "\n" if rest else "", top_names(tree.body))


def renamed(source: str, names: dict[str, str]) -> str:
    """Returns source in which names of its top level have others."""
    if not names:
        return source
    pattern = re.compile(rf"(?<![\w.'\"])({'|'.join(map(re.escape, names))})(?!\w)(?!\s*=[^=].*#\s*kw)")
    return pattern.sub(lambda found: names[found[1]], source)


def main() -> int:
    table = Table.read(Path(sys.argv[1]), tuple(sys.argv[2:]))
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    files = {path for path in listed if not path.startswith(SKIPPED)}
    missing = [old for old in {*table.moves, *table.folds, *table.splits} if old not in files]
    for old in missing:
        print(f"not there: {old}")
        for steps in (table.moves, table.folds, table.splits):
            steps.pop(old, None)  # type: ignore[attr-defined]
    mapping = Mapping(table, files)
    find_clashes(table, mapping, files)
    sources: dict[str, str] = {}
    pieces: dict[str, list[Piece]] = defaultdict(list)
    depends: dict[str, set[str]] = {}
    for path in sorted(files):
        if Path(path).suffix not in TEXT or not Path(path).is_file() or Path(path).is_symlink():
            continue
        try:
            text = Path(path).read_text()
        except UnicodeDecodeError:
            continue
        if not path.endswith(".py"):
            if (new := mapping.text(text)) != text:
                sources[path] = new
            continue
        new_path = table.moves.get(path, table.folds.get(path, path))
        tree = ast.parse(text)
        depends[path] = {
            str(node.module)
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhpc")
        }
        if path in table.splits:
            text = split_out(path, text, tree, table, mapping, pieces, depends)
        new = rewrite(text, mapping, dotted(new_path) if path.startswith("rlhpc/") else None)
        if path in table.folds:
            pieces[new_path].append(piece_of(path, new))
        elif new != text or new_path != path or path in table.splits:
            sources[new_path] = new
    for old, new in table.moves.items():
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", "-f", old, new], check=True)
    for old in table.folds:
        subprocess.run(["git", "rm", "-q", "--cached", old], check=True)
        Path(old).unlink()
    for path, text in sources.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    origin_of = {new: old for old, new in table.moves.items()}
    for target, parts in pieces.items():
        merge(target, origin_of.get(target, target), parts, depends, mapping.renames)
    make_packages()
    listed = subprocess.run(
        ["git", "ls-files", "rlhpc", "tests"], capture_output=True, text=True, check=True
    ).stdout.split()
    for path in listed:
        if (
            path.endswith(".py")
            and Path(path).is_file()
            and (new := united_keys(text := Path(path).read_text())) != text
        ):
            Path(path).write_text(new)
    return 0


def united_keys(source: str) -> str:
    """Returns source in whose tables of lists by module (`{"rlhpc.x": [...]}`) each module stands once."""
    edits = []
    raw = source.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Dict) or not all(isinstance(key, ast.Constant) for key in node.keys):
            continue
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        if len(set(keys)) == len(keys) or not all(isinstance(value, ast.List) for value in node.values):
            continue
        lists: dict[object, list[object]] = defaultdict(list)
        for key, value in zip(keys, node.values, strict=True):
            lists[key] += ast.literal_eval(value)
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        edits.append((begin, end, repr({key: sorted(names) for key, names in lists.items()}).replace("'", '"')))
    for begin, end, text in sorted(edits, reverse=True):
        raw = raw[:begin] + text.encode() + raw[end:]
    return raw.decode()


def split_out(path: str, text: str, tree: ast.Module, table: Table, mapping: Mapping, pieces: dict[str, list[Piece]],
              depends: dict[str, set[str]]) -> str:  # fmt: skip
    """Takes definitions out of a module, as pieces of others; returns what remains, which imports none of them by itself."""
    lines, by_target, gone = text.splitlines(keepends=True), defaultdict(list), set()
    heads = [
        "".join(lines[node.lineno - 1 : node.end_lineno])
        for node in tree.body
        if (
            isinstance(node, ast.Import | ast.ImportFrom)
            and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        )
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    names = table.splits[path]
    for node in tree.body:
        defined = top_names([node])
        if not defined & set(names):
            continue
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        span = range(first, node.end_lineno or node.lineno)
        by_target[names[next(iter(defined & set(names)))]].append("".join(lines[i] for i in span))
        gone |= set(span)
    rest = "".join(line for i, line in enumerate(lines) if i not in gone)
    all_names = top_names(tree.body)
    own = dotted(path)
    for target, bodies in by_target.items():
        here = {name for name, to in names.items() if to == target}
        source = "from __future__ import annotations\n" + "".join(heads)
        used = {one.id for one in ast.walk(ast.parse("\n\n".join(bodies))) if isinstance(one, ast.Name)}
        if needed := sorted((all_names - here) & used):
            source += f"from {own} import {', '.join(needed)}\n"
        source += "\n\n" + "\n\n".join(bodies)
        key = f"{path}:{target}"
        depends[key] = {own} if needed else set()
        pieces[target].append(piece_of(key, rewrite(source, mapping, dotted(target))))
    kept = {one.id for one in ast.walk(ast.parse(rest)) if isinstance(one, ast.Name)}
    if back := sorted(set(names) & kept):
        place = next(
            i for i, node in enumerate(tree.body) if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        )
        line = tree.body[place].end_lineno or 1
        rest_lines = rest.splitlines(keepends=True)
        rest = "".join([*rest_lines[:line], f"from {own} import {', '.join(back)}\n", *rest_lines[line:]])
    return rest


def find_clashes(table: Table, mapping: Mapping, files: set[str]) -> None:
    """Finds new names for those that two modules of one new module have."""
    members: dict[str, list[str]] = defaultdict(list)
    for path in sorted(files):
        if path.startswith("rlhpc/") and path.endswith(".py"):
            members[table.moves.get(path, table.folds.get(path, path))].append(path)
    for target, paths in members.items():
        seen: dict[str, str] = {}
        for path in sorted(paths, key=lambda path: path in table.folds):
            gone = set(table.splits.get(path, {}))
            for name in sorted(top_names(ast.parse(Path(path).read_text()).body) - gone):
                if name not in seen or name in ("log", "logger", "LOG", "__all__"):
                    seen.setdefault(name, path)
                    continue
                stem = Path(path).stem
                constant = name.upper() == name
                new = f"_{stem}{name}" if name.startswith("_") else f"{stem}_{name}"
                if constant:
                    new = new.upper()
                elif name[:1].isupper():
                    new = "".join(part.capitalize() for part in stem.split("_")) + name
                mapping.renames[dotted(path), name] = new
                print(f"clash: {target}: {name} of {path} and {seen[name]}; now {new}")


def merge(
    target: str, origin: str, parts: list[Piece], depends: dict[str, set[str]], renames: dict[tuple[str, str], str]
) -> None:
    """Writes a module of several: their imports, then their bodies, what is needed first."""
    path = Path(target)
    whole = list(parts)
    docstring = ""
    if path.is_file():
        main_piece = piece_of(origin, path.read_text())
        docstring, whole = main_piece.docstring, [main_piece, *parts]
    else:
        print(f"new: {target}")
        docstring = next(
            (one.docstring for one in parts if one.docstring), f'"""{path.stem.replace("_", " ").capitalize()}."""\n'
        )
        path.parent.mkdir(parents=True, exist_ok=True)
    for one in whole:
        one.body = renamed(
            one.body, {name: new for (module, name), new in renames.items() if module == dotted(one.origin)}
        )
    # The same word, imported from two modules.
    words: dict[str, str] = {}
    for one in whole:
        for index, statement in enumerate(one.head):
            node = ast.parse(statement.strip()).body[0]
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                local, source = alias.asname or alias.name, f"{node.module}.{alias.name}"
                if words.setdefault(local, source) == source or {source, words[local]} <= {
                    f"typing.{alias.name}",
                    f"collections.abc.{alias.name}",
                }:
                    continue
                new = f"{local}_of_{Path(one.origin.split(':')[0]).stem}"
                print(f"clash: {target}: {local} is {words[local]} and {source}; now {new}")
                one.body = renamed(one.body, {local: new})
                one.head[index] = one.head[index].replace(f" as {local}", "")
                before, mark, after = one.head[index].partition(" import ")
                one.head[index] = (
                    before + mark + re.sub(rf"\b{re.escape(alias.name)}\b", f"{alias.name} as {new}", after)
                )
    order, left = [], whole
    modules = {one.origin: dotted(one.origin.split(":")[0]) if ":" not in one.origin else one.origin for one in whole}

    def comes_first(other: Piece, one: Piece) -> bool:
        imported = modules[other.origin] in depends.get(one.origin, set()) and ":" not in one.origin
        return imported or bool(needed_first(one.body) & other.names)

    while left:
        ready = [one for one in left if not any(comes_first(other, one) for other in left if other is not one)]
        if not ready:
            print(f"circle: {target}: {[one.origin for one in left]}")
            ready = left
        order.append(ready[0])
        left = [one for one in left if one is not ready[0]]
    head = "".join(line for one in whole for line in one.head)
    body = "\n\n".join(one.body for one in order if one.body)
    path.write_text(f"{docstring}\nfrom __future__ import annotations\n\n{head}\n\n{body}")
    subprocess.run(["git", "add", "-N", target], check=True)


def needed_first(body: str) -> set[str]:
    """Returns the names that a module looks up while it is executed: those outside of functions and annotations."""
    found: set[str] = set()

    class Visitor(ast.NodeVisitor):
        def visit_Name(self, node: ast.Name) -> None:
            found.add(node.id)

        def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
            for one in [
                *node.decorator_list,
                *node.args.defaults,
                *(default for default in node.args.kw_defaults if default),
            ]:
                self.visit(one)

        visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

        def visit_Lambda(self, node: ast.Lambda) -> None:
            pass

        def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
            if node.value:
                self.visit(node.value)

    Visitor().visit(ast.parse(body))
    return found


def make_packages() -> None:
    """Gives each new folder of modules its `__init__.py`, and removes those of empty ones."""
    listed = subprocess.run(["git", "ls-files", "rlhpc"], capture_output=True, text=True, check=True).stdout.split()
    for folder in sorted({str(Path(path).parent) for path in listed if path.endswith(".py")}):
        init = Path(folder) / "__init__.py"
        if not init.exists():
            init.write_text(f'"""{Path(folder).name.replace("_", " ").capitalize()}."""\n')
            print(f"package: {init}")


if __name__ == "__main__":
    sys.exit(main())
