"""Prints the floors of a package's modules, for the import contracts: python tests/refactor/floors.py rlhpc.runtime"""

from __future__ import annotations

import os
import sys
from collections import defaultdict

import grimp


def main(container: str) -> None:
    """Prints the highest floor first; names each circle."""
    sys.path.insert(0, os.getcwd())
    graph = grimp.build_graph("rlhpc", exclude_type_checking_imports=True, cache_dir=None)
    depth = container.count(".") + 1
    children = {name for name in graph.modules if name.startswith(f"{container}.") and name.count(".") == depth}
    edges = defaultdict[str, set[str]](set)

    def child_of(module: str) -> str:
        return ".".join(module.split(".")[: depth + 1])

    for module in graph.modules:
        importer = child_of(module)
        if importer in children:
            imported = {child_of(other) for other in graph.find_modules_directly_imported_by(module)}
            edges[importer] |= imported & children - {importer}
    floors: dict[str, int] = {}

    def floor_of(module: str, path: tuple[str, ...] = ()) -> int:
        if module in path:
            print("circle:", *path[path.index(module) :], module)
            return 0
        if module not in floors:
            floors[module] = 1 + max((floor_of(other, (*path, module)) for other in sorted(edges[module])), default=-1)
        return floors[module]

    for module in sorted(children):
        floor_of(module)
    for floor in sorted(set(floors.values()), reverse=True):
        names = sorted(module.rpartition(".")[2] for module, level in floors.items() if level == floor)
        print(f'    "{" | ".join(names)}",')


if __name__ == "__main__":
    main(sys.argv[1])
