"""The shape of the code: which layer may import which, who may call what, how long functions get."""

import ast
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import exercises, mutants

ROOT = Path(__file__).parents[2]

# Each layer may import the ones before it; layers on one line may not import each other.
LAYERS = [
    {"config", "kernels", "hlo", "quiet_imports", "units"},
    {"launch", "figures"},
    {"storage"},
    {"sharding"},
    {"parallel"},
    {"models"},
    {"huggingface", "train_step"},
    {"hooks"},
    {"checkpoint"},
    {"health"},
    {"plan"},
    {"training"},
    {"cli"},
    {"web"},
    {"scripts"},
]
ABOVE_DATA = {"health", "training", "plan", "cli", "web", "scripts"}
MAY_IMPORT = {
    layer: set().union(*LAYERS[:rank]) | ({"data"} if layer in ABOVE_DATA else set())
    for rank, layers in enumerate(LAYERS)
    for layer in layers
} | {
    "data": {"config", "launch", "quiet_imports", "sharding", "storage", "units"},
    "configs": {"config"},
}
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["cli"] |= {"configs", "package"}
MAY_IMPORT["scripts"] |= {"configs", "package"}

# What runs, or can run, code that it reads.
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "__import__", "runpy.run_path", "yaml.load", "yaml.unsafe_load"),
    *("torch.load", "os.system", "os.popen", "np.load", "numpy.load"),
}
# Keywords with the only values that they may have.
SAFE_KEYWORDS = {
    "allow_pickle": "False",
    "trust_remote_code": "False",
    "shell": "False",
    "weights_only": "True",
}

FILES = sorted(
    path
    for folder in ("ultrascale_jax", "kernels", "configs", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if path.relative_to(ROOT).parts[:2]
    not in (("ultrascale_jax", "kernels"), ("ultrascale_jax", "configs"))
)
LIBRARY = [
    path for path in FILES if path.relative_to(ROOT).parts[0] in ("ultrascale_jax", "kernels")
]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=name(path)))]


def layer_of(parts: tuple[str, ...]) -> str:
    """The layer of a dotted name of this project; `package` is `ultrascale_jax/__init__.py`."""
    if parts[0] != "ultrascale_jax":
        return parts[0]
    path = ROOT.joinpath(*parts[:2])
    is_part = len(parts) > 1 and (path.is_dir() or path.with_suffix(".py").is_file())
    return parts[1] if is_part else "package"


def layer_of_file(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return layer_of(tuple(part for part in parts if part != "__init__"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that the file imports; `from a import b` is `a.b`."""
    package = (*path.relative_to(ROOT).parent.parts,)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imports_of(paths: Iterable[Path], banned: Callable[[Path, tuple[str, ...]], bool]) -> list[str]:
    """`file:line: name` of the imports for which `banned(path, parts of the dotted name)` holds."""
    return [
        f"{name(path)}:{line}: {dotted}"
        for path in paths
        for line, dotted in imports(path)
        if banned(path, tuple(dotted.split(".")))
    ]


def test_no_layer_imports_a_higher_one():
    def is_higher(path: Path, parts: tuple[str, ...]) -> bool:
        layer = layer_of_file(path)
        return is_own(parts) and layer_of(parts) not in {layer} | MAY_IMPORT[layer]

    # The public API is imported on first use: `__init__` names every layer and depends on none.
    files = [path for path in FILES if layer_of_file(path) != "package"]
    assert len(files) > 200
    assert imports_of(files, is_higher) == []


def is_own(parts: tuple[str, ...]) -> bool:
    return parts[0] in ("ultrascale_jax", "scripts")


def test_nothing_imports_bare_kernels_and_the_library_knows_no_script_or_test():
    above = {"kernels", "configs", "tests"}
    assert imports_of(FILES, lambda path, parts: parts[0] in above) == []
    assert imports_of(LIBRARY, lambda path, parts: parts[0] == "scripts") == []


def test_config_imports_the_standard_library_only():
    def is_foreign(path: Path, parts: tuple[str, ...]) -> bool:
        own = parts[:2] == ("ultrascale_jax", "config")
        return not own and parts[0] not in sys.stdlib_module_names

    files = list((ROOT / "ultrascale_jax/config").glob("*.py"))
    assert files and imports_of(files, is_foreign) == []


def test_kernels_import_no_other_part_of_the_project():
    def is_other(path: Path, parts: tuple[str, ...]) -> bool:
        return is_own(parts) and parts[:2] != ("ultrascale_jax", "kernels")

    files = list((ROOT / "kernels").rglob("*.py"))
    assert files and imports_of(files, is_other) == []


def test_only_the_report_of_the_planner_draws():
    def draws(path: Path, parts: tuple[str, ...]) -> bool:
        return parts[:2] == ("ultrascale_jax", "figures")

    plan = ROOT / "ultrascale_jax/plan"
    files = [path for path in plan.rglob("*.py") if path.parent != plan / "report"]
    assert files and imports_of(files, draws) == []


def users_of(function: str) -> set[str]:
    """Files that import a function or name it, given with as much of its module as makes it unique."""
    last = function.split(".")[-1]

    def named(node: ast.AST) -> str:
        if isinstance(node, ast.alias):
            return node.name
        return ast.unparse(node) if isinstance(node, ast.Attribute) and node.attr == last else ""

    return {
        name(path)
        for path in FILES
        if any(f".{named(node)}".endswith(f".{function}") for node in nodes(path))
    }


def test_shard_map_is_called_in_one_place():
    assert users_of("shard_map") == {"ultrascale_jax/sharding/manual.py"}


@pytest.mark.parametrize(
    "function", ["optimization_barrier", "lax.empty", "with_layout_constraint"]
)
def test_what_is_asked_of_xla_for_speed_has_a_name_in_one_file(function):
    assert users_of(function) == {"kernels/xla.py"}


def test_only_the_primitives_ask_whether_values_are_pieces():
    """A model's text has one meaning: the two forms of an operation stand behind one name in `sharding/`."""
    asks = {
        name(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "manual"
    }
    assert asks == {"ultrascale_jax/sharding/primitives.py"}


def test_manual_regions_keep_the_check_of_varying_axes():
    off = [
        name(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.keyword)
        and node.arg == "check_vma"
        and not (isinstance(node.value, ast.Constant) and node.value.value is True)
    ]
    assert off == []


def test_nothing_shipped_can_run_code_that_it_reads():
    assert imports_of(FILES, lambda path, parts: parts[0] in UNSAFE_MODULES) == []
    calls = [(path, *call) for path in FILES for call in unsafe_calls(nodes(path))]
    assert [f"{name(path)}:{line}: {what}" for path, line, what in calls] == []


def unsafe_calls(of_file: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of what may run code: calls, and keywords with a value that lets them."""
    for node in of_file:
        if not isinstance(node, ast.Call):
            continue
        if (function := ast.unparse(node.func)) in UNSAFE_CALLS:
            yield node.lineno, function
        for keyword in node.keywords:
            safe = SAFE_KEYWORDS.get(keyword.arg or "")
            if safe is not None and ast.unparse(keyword.value) != safe:
                yield node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"


def test_the_linter_bans_it_too():
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert {"S301", "S302", "S307", "S506", "S602", "S605"} <= set(lint["select"])


def test_functions_stay_short():
    """At most 60 lines of code; its docstring does not count."""
    assert [
        f"{name(path)}:{node.lineno}: {node.name}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of_code(node) > 60
    ] == []


def lines_of_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    told = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0
    return (node.end_lineno or 0) - node.lineno + 1 - told


def test_every_mutant_and_every_exercise_finds_its_place_in_the_code():
    assert mutants.read_table() and exercises.exercises()


def test_the_layers_name_every_part_of_the_library():
    parts = {layer_of_file(path) for path in FILES} - {"package"}
    assert parts <= set(MAY_IMPORT)
    assert {"config", "sharding", "parallel", "models", "training", "data"} <= parts
