"""Words check of docstrings and names: `python -m tests.words`.

Seven kinds of findings in `rlhpc/` and `bench/`, each of which is an error:

- `module_docstring`, `class_docstring`: opens with a word such as What, How or Of, where a noun phrase of the field belongs.
- `function_docstring`: does not begin with a verb in the third person. A property may begin with a noun.
- `arguments`: explains a parameter that does not exist, or has a section such as `Raises:` with its text on one line.
- `errors`: a public function or constructor of `rlhpc/` raises an error whose class, or a base class of it, its docstring does
  not name. A docstring that refers to the method of a base class is excepted.
- `name`: a variable, parameter, attribute, function or class has one of the reserved names.
- `class_name`: a public class name that is defined more than once in the package.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import inspect
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Folders whose files are checked.
FOLDERS = ("rlhpc", "bench")
KINDS = ("module_docstring", "class_docstring", "function_docstring", "arguments", "errors", "name", "class_name")


def _set_of(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


OPENINGS = _set_of(
    "what how which where who whose whom whether that those of when why whoever whatever whichever wherever"
)
#: Participles, pronouns and fillers that do not say what a value is.
RESERVED = _set_of(
    "found said own known seen given asked wanted what whole left most told made there shown ended rest kept begun "
    "who others lost taken beside same least looks nothing paid heard due late mine theirs gone vain meanwhile "
    "together alike nobody somebody one_of_them whoever anyway later useless furthest because awake handed meant lacks "
    "fired kin settle looker misfit masked guarded"
)
#: Fields whose name is that of a key in users' configurations.
CONFIGURATION_KEYS = {("rlhpc/language/data/drawn_images.py", "most")}
#: First words that end in -s and are neither verbs nor nouns.
_FUNCTION_WORDS = _set_of(
    "afterwards always as backwards besides continuous cross downwards forwards hers heterogeneous his its less ours "
    "perhaps plus previous sometimes synchronous theirs this thus towards unless upwards various whereas yours"
)
#: First words that are nouns alone.
_NOUNS = _set_of(
    "accelerators actions adapters addresses advantages agents algorithms announcements arguments arrays assertions "
    "bodies bytes cards channels characters classes columns components conditions configurations connections "
    "coordinates cores counters cpus critics curves decisions decorators defaults demonstrations devices dictionaries "
    "dimensions distributions elements embeddings engines environments episodes epochs errors evaluations events "
    "examples exceptions experts extras factors facts features fields files folders formulas fractions gpus gradients "
    "headers histograms hours hyperparameters ids images impulses indices infos instances integers intervals items "
    "jobs kernels kwargs layers lengths literals log-odds log-probabilities log-probs logits logprobs machines "
    "matrices medians members messages metrics micro-batches milliseconds minibatches minutes modules neighbours "
    "networks nodes numbers objects obs observations operations optimizers optionals options outcomes owners pages "
    "parameters paths pictures pieces pixels policies positions priorities probabilities problems programs properties "
    "questions ratios receivers regions replicas replies resources responses results returns-to-go rewards roles "
    "rollouts routers rows scalars schemas seconds sections segments senders sequences servers settings simulators "
    "slots statistics strategies strings suites symbols tables targets tasks tensors texts things threads tickets "
    "tokens tooltips trainers trajectories transitions users variables vectors verdicts versions widths windows words "
    "workers wrappers"
)
#: First words that are nouns where one of `_AFTER_NOUN` follows ("Names of the columns"), and verbs elsewhere.
_NOUNS_OR_VERBS = _set_of(
    "answers batches bins bounds buffers charts checkpoints chunks claims copies counts cuts estimates forms groups "
    "halves judges keys labels limits lines lists locks logs maps marks masks means names notes overrides packages "
    "pairs partitions parts patches places plans points polls posts probes processes prompts queries queues ranks "
    "rates records reports requests rounds samples scales scores seeds shapes shards shares signals sizes sorts "
    "sources stages states steps stores sums terms tests times traces turns updates values views weights"
)
_AFTER_NOUN = _set_of(
    "of that which who whose in for per by with without between and or are were have until since from before after as "
    "on under below over above beside"
)
_FIRST_WORDS = re.compile(r"""["'`(]*([A-Za-z][\w-]*)(?:(?=[^\w\s-])|\s+(\S+)|$)""")
_CANDIDATES = re.compile(rf"(?<![A-Za-z0-9])_*(?:{'|'.join(sorted(RESERVED))})_*(?![A-Za-z0-9])", re.IGNORECASE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

_SECTION_ON_ONE_LINE = re.compile(r"^((?:Args|Returns|Raises|Yields|Attributes):) +\S", re.MULTILINE)
#: The section of a docstring that explains parameters, and the names that open its entries.
_ARGUMENTS = re.compile(r"^Args:\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^ {4}([A-Za-z_*][\w, *`]*):(?: |$)", re.MULTILINE)


@dataclass(frozen=True, order=True)
class Finding:
    """A broken rule at a line of a file.

    Attributes:
        path: Path of the file, relative to the root of the checkout.
        line: Line number, from 1.
        kind: One of `KINDS`.
        message: Rule with the offending text.
    """

    path: str
    line: int
    kind: str
    message: str

    def __str__(self) -> str:
        """Formats the finding as `file:line: message`."""
        return f"{self.path}:{self.line}: {self.message}"


def begins_with_verb(docstring: str) -> bool:
    """Returns whether a docstring's first word reads as a verb in the third person, such as "Returns"."""
    match = _FIRST_WORDS.match(docstring)
    if match is None:
        return False
    word, following = match[1].lower(), match[2]
    if docstring[match.end(1) :].startswith(":"):  # "Raises:", a section without a first sentence
        return False
    if not re.fullmatch(r"[a-z-]*s", word) or word.endswith(("ss", "us", "is")):
        return False
    if word in OPENINGS or word in _FUNCTION_WORDS or word in _NOUNS:
        return False
    if word in _NOUNS_OR_VERBS:
        if following is None or following.lstrip("`").startswith("["):  # "Ranks, …", "Ranks `[N]`"
            return False
        return following.lower().strip("`'\".,;:()") not in _AFTER_NOUN
    return following is None or following.lower() != "of"


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, str] | None:
    """Returns line and text of a docstring."""
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.lineno, first.value.value.strip()
    return None


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether a decorator makes a function a property, also a setter of one."""
    for decorator in node.decorator_list:
        name = decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
        if name.endswith("property") or name in ("setter", "deleter", "getter"):
            return True
    return False


def _parameters_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str] | None:
    """Returns the names of a function's or constructor's parameters; None if a base class may have the constructor."""
    if isinstance(node, ast.ClassDef):
        constructors = [x for x in node.body if isinstance(x, _FUNCTIONS) and x.name in ("__init__", "__new__")]
        if constructors:
            return _parameters_of(constructors[0])
        if node.bases:
            return None
        return {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
    every = node.args
    single = [argument for argument in (every.vararg, every.kwarg) if argument is not None]
    return {argument.arg for argument in (*every.posonlyargs, *every.args, *every.kwonlyargs, *single)}


class _Errors:
    """Check that docstrings name the errors which their functions raise themselves.

    An error that the function itself catches does not count, and neither do those of the functions that it calls.

    Args:
        trees: Path → syntax tree, for all files; their classes give the base classes of the errors.
    """

    #: Errors that say that a program is wrong or unfinished, or that end an iterator or the process.
    _UNNAMED = frozenset({"NotImplementedError", "AssertionError", "StopIteration", "SystemExit", "KeyboardInterrupt"})

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self._bases: dict[str, set[str]] = defaultdict(set)
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._bases[node.name] |= {_last_name(base) for base in node.bases}

    def _with_bases(self, name: str) -> set[str]:
        """Returns the names of a class and of all its base classes."""
        names, pending = {name}, [name]
        while pending:
            current = pending.pop()
            built_in = getattr(builtins, current, None)
            bases = {each.__name__ for each in built_in.__mro__} if isinstance(built_in, type) else set()
            pending += (bases | self._bases.get(current, set())) - names
            names |= bases | self._bases.get(current, set())
        return names

    def _raised(self, node: ast.AST, caught: frozenset[str] = frozenset()) -> Iterator[str]:
        """Yields the names of the errors that leave a statement, without those of functions inside it."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            return
        body: list[ast.stmt] = []
        if isinstance(node, ast.Try):
            body = node.body
            types = [each for handler in node.handlers for each in _members(handler.type)]
            inner = caught | {_last_name(each) for each in types}
            inner |= {"BaseException"} if any(handler.type is None for handler in node.handlers) else set()
        elif isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            body = node.body
            inner = caught | {_last_name(x) for call in calls if _last_name(call.func) == "suppress" for x in call.args}
        for statement in body:
            yield from self._raised(statement, inner)
        if isinstance(node, ast.Raise) and node.exc is not None:
            name = _last_name(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            if name[:1].isupper() and name not in self._UNNAMED and self._with_bases(name).isdisjoint(caught):
                yield name
        for child in ast.iter_child_nodes(node):
            if child not in body:
                yield from self._raised(child, caught)

    def unnamed(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None) -> list[str]:
        """Returns the errors that a function raises and its docstring does not name, sorted.

        Args:
            node: The function.
            owner: Its class, whose docstring explains the constructor.
        """
        text = ast.get_docstring(node)
        if text is None and owner is not None and node.name == "__init__":
            text = ast.get_docstring(owner)
        if text is None or re.search(rf"`\w+\.{node.name}`", text):
            return []
        words = set(re.findall(r"[A-Z]\w+", text))
        raised = {name for statement in node.body for name in self._raised(statement)}
        return sorted(name for name in raised if self._with_bases(name).isdisjoint(words))

    def check(self, path: str, tree: ast.Module) -> Iterator[Finding]:
        """Yields a finding for each public function whose docstring lacks an error."""
        scopes: list[tuple[ast.Module | ast.ClassDef, ast.ClassDef | None]] = [(tree, None)]
        while scopes:
            scope, owner = scopes.pop()
            for node in scope.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    scopes.append((node, node))
                elif isinstance(node, _FUNCTIONS) and (node.name == "__init__" or not node.name.startswith("_")):
                    for name in self.unnamed(node, owner):
                        yield Finding(path, node.lineno, "errors", f"docstring of {node.name} does not name {name}")


def _members(node: ast.expr | None) -> list[ast.expr]:
    """Returns the classes that a handler of errors names."""
    return node.elts if isinstance(node, ast.Tuple) else [] if node is None else [node]


def _last_name(node: ast.expr) -> str:
    """Returns the last part of a dotted name; "" for another expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _bound_names(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and name of each variable, parameter, attribute, function or class that a node itself binds."""
    if isinstance(node, ast.Name | ast.Attribute):
        if isinstance(node.ctx, ast.Store):
            yield (node.lineno, node.id) if isinstance(node, ast.Name) else (node.end_lineno or node.lineno, node.attr)
    elif isinstance(node, ast.arg):
        yield node.lineno, node.arg
    elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.lineno, node.name
    elif isinstance(node, ast.alias):
        if node.asname:
            yield node.lineno, node.asname
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        if node.name:
            yield node.lineno, node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.lineno, node.rest


class _File:
    """Findings and public classes of one source file.

    Args:
        source: Text of the file.
        path: Path that the findings name.
    """

    def __init__(self, source: str, path: str) -> None:
        self.path = path
        self.findings: list[Finding] = []
        self.classes: list[tuple[str, int]] = []
        #: Lines on which a reserved name stands at all: only their expressions are searched.
        self._candidates = {
            number for number, line in enumerate(source.splitlines(), 1) if _CANDIDATES.search(line) is not None
        }
        self.tree = ast.parse(source)
        self._check_opening(self.tree, "module_docstring")
        self._visit_children(self.tree)

    def _add(self, line: int, kind: str, message: str) -> None:
        self.findings.append(Finding(self.path, line, kind, message))

    def _check_opening(
        self, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, kind: str
    ) -> None:
        """Adds a finding where a docstring opens with a word such as What."""
        doc = _docstring(node)
        match = _FIRST_WORDS.match(doc[1]) if doc else None
        if doc and match and match[1].lower() in OPENINGS:
            self._add(doc[0], kind, f'docstring opens with "{match[1]}": {doc[1].splitlines()[0][:80]}')

    def _check_arguments(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Adds a finding for each name under `Args:` that is no parameter, and for each section on one line."""
        doc = _docstring(node)
        if doc is None:
            return
        line, text = doc
        text = inspect.cleandoc(text)
        for section in _SECTION_ON_ONE_LINE.findall(text):
            self._add(line, "arguments", f"docstring has {section} and its text on one line")
        if (arguments := _ARGUMENTS.search(text)) is None or (parameters := _parameters_of(node)) is None:
            return
        names = [name.strip("*` ") for entry in _ARGUMENT.findall(arguments[1]) for name in entry.split(",")]
        for name in names:
            if name not in parameters:
                self._add(line, "arguments", f"docstring of {node.name} explains {name}, which is no parameter")

    def _check_names(self, node: ast.AST) -> None:
        for line, name in _bound_names(node):
            if name.strip("_").lower() in RESERVED and (self.path, name) not in CONFIGURATION_KEYS:
                self._add(line, "name", f"name does not say what it is: {name}")

    def _visit_children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                self._visit(child)
            elif (line := getattr(child, "lineno", None)) is None:  # a list of parameters, an item of `with`
                self._visit_children(child)
            elif not self._candidates.isdisjoint(range(line, getattr(child, "end_lineno", line) + 1)):
                for inner in ast.walk(child):
                    self._check_names(inner)

    def _visit(self, node: ast.AST) -> None:
        """Checks a statement, then those inside it."""
        if isinstance(node, ast.ClassDef):
            if not node.name.startswith("_"):
                self.classes.append((node.name, node.lineno))
            self._check_opening(node, "class_docstring")
            self._check_arguments(node)
        elif isinstance(node, _FUNCTIONS):
            self._check_arguments(node)
            if _is_property(node):
                self._check_opening(node, "function_docstring")
            elif (doc := _docstring(node)) and not begins_with_verb(doc[1]):
                text = (doc[1].splitlines() or [""])[0][:80]
                self._add(doc[0], "function_docstring", f"docstring does not begin with a verb: {text}")
        self._check_names(node)
        self._visit_children(node)


def check_sources(sources: Mapping[str, str]) -> list[Finding]:
    """Returns the findings in source texts.

    Args:
        sources: Path, relative to the root of the checkout, to text.
    """
    findings: list[Finding] = []
    classes: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    trees: dict[str, ast.Module] = {}
    for path, source in sources.items():
        file = _File(source, path)
        trees[path] = file.tree
        findings += file.findings
        for name, line in file.classes:
            classes[path.split("/")[0], name].append((path, line))
    errors = _Errors(trees)
    for path, tree in trees.items():
        findings += errors.check(path, tree) if path.startswith("rlhpc/") else ()
    for (_, name), places in classes.items():
        for path, line in places if len(places) > 1 else ():
            elsewhere = ", ".join(f"{other}:{number}" for other, number in places if (other, number) != (path, line))
            findings.append(Finding(path, line, "class_name", f"class {name} is defined again: {elsewhere}"))
    return sorted(findings)


def read_sources(root: Path) -> dict[str, str]:
    """Returns path and text of each file that is checked."""
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
    }


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Runs the check; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.words", description="Checks docstrings and names.")
    parser.add_argument("--list", metavar="PATH", default="", help="check only the files whose paths begin so")
    options = parser.parse_args(arguments)
    findings = [finding for finding in check_sources(read_sources(root)) if finding.path.startswith(options.list)]
    for finding in findings:
        print(finding)
    counts = Counter(finding.kind for finding in findings)
    print("words: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
