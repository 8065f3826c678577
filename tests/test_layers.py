"""The plan of the house: imports go down the layers that CONTRIBUTING shows, and torch's private names stay in rooms.

Every import counts: also one inside a function, and one that only a type checker sees.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
#: the folders of the package, as ``pyproject.toml`` maps them
PACKAGES = {"amp_compiler": "amp_compiler", "amp_compiler.passes": "passes", "amp_compiler.kernels": "kernels"}
FRONT = "amp_compiler"  # the room of the modules that are in no other
#: where private names of torch may be
MAY_NAME_PRIVATE = (
    "amp_compiler.capture.", "amp_compiler.parallel.", "amp_compiler.common.torch_names", "amp_compiler.common.compat",
)  # fmt: skip


class Module(NamedTuple):
    path: str
    source: str

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


Modules = Mapping[str, Module]


class Import(NamedTuple):
    by: str
    of: str
    line: int


class Room(NamedTuple):
    layer: int
    text: str  # of its row in the table


def modules() -> dict[str, Module]:
    """Every module of the package by its name."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *file.relative_to(ROOT / folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    return found


def table() -> dict[str, Room]:
    """The rooms of the first table below the headline "Layout" in CONTRIBUTING."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    layout = text[text.index("\n## Layout\n") :]
    rows = re.findall(r"^\| (\d+) \| `([\w/]+)/` \|(.*)\|$", layout, re.MULTILINE)
    assert rows, "CONTRIBUTING has no table of rooms"
    return {folder.replace("amp_compiler/", ""): Room(int(layer), rest) for layer, folder, rest in rows}


def room_of(name: str, known: Modules) -> str:
    parts = name.split(".")
    if name == "amp_compiler.__main__":
        return "cli"  # it must lie there for ``python -m amp_compiler``
    return FRONT if len(parts) == 1 or (len(parts) == 2 and not known[name].is_package) else parts[1]


def imports(known: Modules) -> list[Import]:
    """Every import of one module of the package by another, wherever it stands in the file."""
    found = []
    for name, module in known.items():
        package = name.split(".") if module.is_package else name.split(".")[:-1]
        for node in ast.walk(ast.parse(module.source)):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                targets = [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
            else:
                continue
            found += [Import(name, target, node.lineno) for target in targets if target in known and target != name]
    return found


def violations(known: Modules, rooms: Mapping[str, Room]) -> set[str]:
    """Imports that do not go to a lower layer or stay in their room, as "importer -> imported"."""
    found = set()
    for by, of, _ in imports(known):
        above, below = room_of(by, known), room_of(of, known)
        if above != below and not rooms[below].layer < rooms[above].layer:
            found.add(f"{by} -> {of}")
    return found


def cycles(known: Modules) -> set[frozenset[str]]:
    """The sets of modules that import each other, directly or by way of others."""
    graph: dict[str, set[str]] = {name: set() for name in known}
    for by, of, _ in imports(known):
        graph[by].add(of)
    reached = {name: _reachable(name, graph) for name in graph}
    groups = {frozenset(n for n in reached[name] if name in reached[n]) for name in graph}
    return {group for group in groups if group}


def _reachable(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += graph[name]
    return seen


# ------------------------------------------------------------------------------------------ private names


def private_names(source: str) -> set[str]:
    """What a file names of torch's that begins with an underscore. Names of ops are public, with or without one."""
    tree = ast.parse(source)
    known: dict[str, str] = {}  # a name in this file -> what it is in torch
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_torch(alias.name):
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and _is_torch(node.module):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in ("_schema", "_overloadname"):  # of an op, whatever the op is called here
                found.add(f"OpOverload.{node.attr}")
            parts = list(_chain(node))
            if parts and parts[0] in known:
                found.add(".".join([known[parts[0]], *parts[1:]]))
    return {name for name in found if _is_private(name)}


def _is_torch(name: str) -> bool:
    return name == "torch" or name.startswith("torch.")


def _chain(node: ast.expr) -> Iterator[str]:
    """``a``, ``b``, ``c`` of ``a.b.c``; nothing if it does not begin with a name."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        before = list(_chain(node.value))
        yield from [*before, node.attr] if before else []


def _is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"]:
        parts = parts[:3]
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


# -------------------------------------------------------------------------------------------- the package


def test_imports_go_down() -> None:
    assert violations(modules(), table()) == set()


def test_no_modules_import_each_other() -> None:
    assert cycles(modules()) == set()


def test_the_table_names_every_folder_and_no_other() -> None:
    known, rooms = modules(), table()
    assert {room_of(name, known) for name in known} == set(rooms)
    for name, module in known.items():
        if module.is_package and len(parts := name.split(".")) > 2:
            assert f"`{parts[2]}/`" in rooms[parts[1]].text, f"CONTRIBUTING's row of {parts[1]} does not name {name}"


def test_a_pass_imports_no_other_pass() -> None:
    room = "amp_compiler.passes"
    pairs = [(by.split(".")[2], of.split(".")[2]) for by, of, _ in imports(modules())
             if by.startswith(f"{room}.") and of.startswith(f"{room}.")]  # fmt: skip
    assert {f"{by} -> {of}" for by, of in pairs if by not in ("order", of)} == set()


def test_private_names_of_torch_stay_in_their_rooms() -> None:
    outside = {name: m for name, m in modules().items() if not name.startswith(MAY_NAME_PRIVATE)}
    assert {name for name, m in outside.items() if private_names(m.source)} == set()


def test_the_package_does_without_mock() -> None:
    for name, module in modules().items():
        assert not re.search(r"\bunittest\b", module.source), name


# --------------------------------------------------------------------------------- the checks can fail

FOLDERS = {"low": Room(1, ""), "left": Room(2, ""), "right": Room(2, ""), FRONT: Room(3, "")}


def small(**sources: str) -> dict[str, Module]:
    """A house of three rooms; a module is named ``left_a`` for ``amp_compiler/left/a.py``."""
    made = {"amp_compiler": Module("amp_compiler/__init__.py", sources.pop("front", ""))}
    for room in ("low", "left", "right"):
        made[f"amp_compiler.{room}"] = Module(f"amp_compiler/{room}/__init__.py", "")
    for name, source in sources.items():
        room, _, file = name.partition("_")
        made[f"amp_compiler.{room}.{file}"] = Module(f"amp_compiler/{room}/{file}.py", source)
    return made


def test_imports_that_go_down_are_fine() -> None:
    known = small(low_a="import torch", left_a="from ..low import a", left_b="from .a import name",
                  front="from .left.b import name\nfrom .low import a")  # fmt: skip
    assert violations(known, FOLDERS) == set()
    assert cycles(known) == set()
    assert len(imports(known)) == 4


@pytest.mark.parametrize("source", [
    "from ..left import a",
    "from ..left.a import name",
    "from amp_compiler.left import a",
    "import amp_compiler.left.a",
    "def f():\n    from ..left import a",
    "if TYPE_CHECKING:\n    from ..left.a import name",
    "try:\n    pass\nexcept ImportError:\n    import amp_compiler.left.a as x",
])  # fmt: skip
@pytest.mark.parametrize("room", ["low", "right"])
def test_an_import_that_goes_up_or_sideways(source: str, room: str) -> None:
    known = small(left_a="", **{f"{room}_a": source})
    assert violations(known, FOLDERS) == {f"amp_compiler.{room}.a -> amp_compiler.left.a"}


def test_a_room_that_imports_the_front_door() -> None:
    assert violations(small(left_a="from .. import name"), FOLDERS) == {"amp_compiler.left.a -> amp_compiler"}


def test_a_lazy_import_closes_a_cycle() -> None:
    known = small(left_a="from . import b", left_b="from .c import x", left_c="def f():\n    from .a import y")
    assert cycles(known) == {frozenset(f"amp_compiler.left.{name}" for name in "abc")}


@pytest.mark.parametrize(("source", "name"), [
    ("import torch\ntorch._C._x()", "torch._C._x"),
    ("import torch\ndef f(x: torch._ops.OpOverload): ...", "torch._ops.OpOverload"),
    ("import torch._dynamo", "torch._dynamo"),
    ("import torch._dynamo.exc as exc", "torch._dynamo.exc"),
    ("def f():\n    from torch._dynamo.exc import Unsupported", "torch._dynamo.exc.Unsupported"),
    ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
    ("from torch import nn\nnn.Module._call_impl", "torch.nn.Module._call_impl"),
    ("target._schema.name", "OpOverload._schema"),
])  # fmt: skip
def test_a_private_name(source: str, name: str) -> None:
    assert name in private_names(source)


@pytest.mark.parametrize("source", [
    "import torch\ntorch.ops.aten._to_copy.default",
    "from torch import nn\nnn.Module.__call__",
    "import torch\nself._x = torch.ones(1)",
    "from ._own import name",
    "import torch\ntorch.__version__",
])  # fmt: skip
def test_not_a_private_name(source: str) -> None:
    assert private_names(source) == set()
