"""Which module may import what, and how large files and functions may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "recbole_dgr2"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 300, 50, 6
MANY_PARAMETERS = ("forward_cached",)  # the model and the six parts of one cached pass

# paths below recbole_dgr2 that may import a package; everything else may not
MAY_IMPORT = {
    "recbole": (
        "config.py",
        "utils.py",
        "compat.py",
        "quick_start.py",
        "model/retriever.py",
        "model/dgr2.py",
    ),
    "transformers": ("model/backbone.py", "model/outline.py", "decode/cache.py"),
}
PIPELINE = ("quick_start", "pipeline")
# what a part of the package must not import of the package
FORBIDDEN = {
    "system/": ("data", "model", "decode", "trainer", "report", "config", "utils", *PIPELINE),
    "data/": ("model", "decode", "trainer", "report", "config", *PIPELINE),
    "model/": ("trainer", "report", *PIPELINE),
    "decode/": ("trainer", "report", "data", "config", "utils", *PIPELINE),
    "trainer/": ("report", "config", *PIPELINE),
    "report/": ("model", "decode", "trainer", "config", *PIPELINE),
    "pipeline/": (
        *("quick_start", "recommend", "speed", "study", "semantic_ids", "diagnose", "export", "benchmark"),
        *("scale", "memory", "acceptance", "atomic_files"),
    ),
    "model/loss.py": ("config", "utils", "data"),
    "model/block_diffusion.py": ("config", "utils", "data"),
}
STAGES = ("mid_training", "ar_teacher", "teacher_rl", "conversion", "distillation", "reinforcement")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield other
                yield from run_time_nodes(other)
            continue
        yield child
        yield from run_time_nodes(child)


def imports(path: Path) -> set[str]:
    """Modules a file imports at run time, functions included; `from a import b` counts as a and a.b."""
    found: set[str] = set()
    for node in run_time_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
    return found


def reaches(modules: set[str], target: str) -> bool:
    return any(module == target or module.startswith(target + ".") for module in modules)


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring apart."""
    assert node.end_lineno is not None
    first = node.body[0]
    text = ast.get_docstring(node, clean=False) if isinstance(first, ast.Expr) else None
    docstring = first.end_lineno - first.lineno + 1 if text is not None and first.end_lineno else 0
    return node.end_lineno - node.lineno + 1 - docstring


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_follow_the_arrows(path: Path) -> None:
    name, modules = name_of(path), imports(path)
    for package, allowed in MAY_IMPORT.items():
        assert name in allowed or not reaches(modules, package), f"{name} must not import {package}"
    for part, targets in FORBIDDEN.items():
        for target in targets if name.startswith(part) else ():
            assert not reaches(modules, f"recbole_dgr2.{target}"), f"{name} must not import {target}"
    if name.startswith("trainer/") and path.stem in STAGES:
        for stage in STAGES:
            other = stage != path.stem and reaches(modules, f"recbole_dgr2.trainer.{stage}")
            assert not other, f"{name} must not import the stage {stage}"


@pytest.mark.parametrize("path", [*SOURCES, ROOT / "run_recbole_dgr2.py"], ids=lambda path: path.name)
def test_ray_is_never_needed(path: Path) -> None:
    modules = imports(path)
    assert not reaches(modules, "recbole.quick_start")
    assert not reaches(modules, "ray")


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_sizes_and_annotations(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE, f"{name_of(path)} has more than {MAX_FILE} lines"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{name_of(path)}:{node.lineno} {node.name}"
        assert length(node) <= MAX_FUNCTION, f"{where} has more than {MAX_FUNCTION} lines"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
        few = len(named) <= MAX_PARAMETERS or node.name in MANY_PARAMETERS
        assert few, f"{where} has more than {MAX_PARAMETERS} parameters"
        bare = [argument.arg for argument in named if argument.annotation is None]
        assert not bare, f"{where}: no annotation for {bare}"


def test_files_of_tests_are_no_longer() -> None:
    lines = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("tests/*.py")
    }
    long = {name: number for name, number in lines.items() if number > MAX_FILE}
    assert not long, f"more than {MAX_FILE} lines: {long}"
