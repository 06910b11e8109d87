"""The shape of the code: no circle of modules, no private name of another module, no endless list of parameters."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

import forerun

ROOT = Path(forerun.__file__).parent
MOST_PARAMETERS = 12


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Syntax of every module by its name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(autouse=True, scope="module")
def _forgotten():
    """Millions of nodes would slow down every garbage collection after these tests."""
    yield
    modules.cache_clear()


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("forerun", exclude_type_checking_imports=True)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert circles(imports) == []


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(imports[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(imports):
        if name not in index:
            visit(name)
    return found


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"a"}}) == []


def private_uses(name: str, tree: ast.Module) -> Iterator[str]:
    """Private names of other modules of the package that a module imports or reads."""
    ours: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "forerun":
            for alias in node.names:
                if is_private(alias.name):
                    yield f"{name}: from {node.module} import {alias.name}"
                if f"{node.module}.{alias.name}" in modules():
                    ours[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name in modules():
                    ours[alias.asname] = alias.name
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        if node.value.id in ours and is_private(node.attr):
            yield f"{name}: {ours[node.value.id]}.{node.attr}"


def test_no_private_name_of_another_module_is_used():
    assert [use for name, tree in modules().items() for use in private_uses(name, tree)] == []


def test_private_uses_are_found():
    code = (
        "from forerun.base import units\nfrom forerun.base.units import _x\nunits._y()\nunits.z()\nself._mine"
    )
    assert list(private_uses("m", ast.parse(code))) == [
        "m: from forerun.base.units import _x",
        "m: forerun.base.units._y",
    ]


def public_functions(name: str, tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Public functions of a module and public methods of its public classes, with their names."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not is_private(node.name):
            yield f"{name}.{node.name}", node
        elif isinstance(node, ast.ClassDef) and not is_private(node.name):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not is_private(method.name):
                    yield f"{name}.{node.name}.{method.name}", method


def num_parameters(function: ast.FunctionDef) -> int:
    """Parameters of its own: neither self or cls, nor those that a ** takes on."""
    arguments = function.args
    own = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([one for one in own if one.arg not in ("self", "cls")])


def test_public_functions_take_few_parameters():
    found = {
        name
        for module, tree in modules().items()
        for name, function in public_functions(module, tree)
        if num_parameters(function) > MOST_PARAMETERS
    }
    assert found == set()


def test_docstrings_say_something():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    empty = [
        f"{module}, line {getattr(node, 'lineno', 1)}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        and (text := ast.get_docstring(node)) is not None
        and not text.strip(" .\n")
    ]
    assert empty == []
