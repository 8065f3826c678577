"""Runs the pages of the documentation: every block of a page in one process, from the top.

What a block's first line (``` and a word) and its text say of it:

- ``python`` with ``>>>``: a doctest, compared with the output that is printed there; ``...`` stands for anything, and
  an empty line belongs to the output if more of it follows.
- ``python``, ``toml`` that begin with ``# name.py``, ``# name.toml``: saved under that name for the blocks below.
- ``python``: executed.
- ``console``: each ``$ amp-compiler ...`` is run, and what it prints compared as in a doctest.
- ``sh``: not run. Its ``make`` targets must exist, and its ``amp-compiler`` lines must parse.
- ``text``: a picture or a sketch, nothing is done with it.
"""

from __future__ import annotations

import doctest
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import typer.main
from typer.testing import CliRunner

from amp_compiler.cli.app import app

ROOT = Path(__file__).parents[1]
FLAGS = doctest.ELLIPSIS
_FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (?P<name>[\w./-]+\.(?:py|toml))\n")
_SETTING = re.compile(r"(?P<name>[A-Z_]+)=(?P<value>\S*)")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line``: of its first line of text."""

    page: Path
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def pages() -> list[Path]:
    """The README and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, found.start("text")) + 1, found["kind"], found["text"])


def run_page(page: Path) -> list[str]:
    """Run all blocks of a page in the folder we are in; the failures as texts. Modules that were imported from that
    folder are forgotten afterwards."""
    known = set(sys.modules)
    home = ModuleType(f"page_{page.stem}")  # Dynamo looks a function's module up by its name
    sys.modules[home.__name__] = home
    sys.path.insert(0, os.getcwd())
    try:
        return [failure for block in blocks(page) for failure in run_block(block, vars(home))]
    finally:
        sys.path.remove(os.getcwd())
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if name == home.__name__ or (file and Path(file).parent == Path.cwd()):
                del sys.modules[name]


def run_block(block: Block, namespace: dict[str, Any]) -> list[str]:
    """Run one block; what went wrong."""
    if block.kind == "python" and ">>> " in block.text:
        return _doctest(block, namespace)
    if file := _FILE.match(block.text):
        Path(file["name"]).write_text(block.text, encoding="utf-8")
        sys.modules.pop(Path(file["name"]).stem, None)  # another test's module of that name
    elif block.kind == "python":
        # the page's own file and lines, so that a traceback and a report name them
        exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), namespace)
    elif block.kind == "console":
        return _console(block)
    elif block.kind == "sh":
        return _commands(block)
    elif block.kind != "text":
        return [f"{block.place}: a block of kind {block.kind!r}, which this runner does not know"]
    return []


def _doctest(block: Block, namespace: dict[str, Any]) -> list[str]:
    # an empty line ends the output of a doctest, unless more output follows it here
    text = re.sub(r"^$(?=\n+(?!>>>|\n).)", "<BLANKLINE>", block.text, flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, block.place, str(block.page), block.line - 1)
    test.globs = namespace
    told = io.StringIO()
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=told.write, clear_globs=False)
    return [told.getvalue()] if told.getvalue() else []


def _console(block: Block) -> list[str]:
    """Each command of the block, run in this process; what it prints must be what stands below it."""
    failures = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        arguments, environment = _parse(command)
        if arguments[0] != "amp-compiler":
            failures.append(f"{block.place}: {command!r} is not amp-compiler: use a block of kind sh")
            continue
        printed = CliRunner(env=environment).invoke(app, arguments[1:], prog_name="amp-compiler").output
        printed = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
        if not doctest.OutputChecker().check_output(wanted.rstrip() + "\n", printed.rstrip() + "\n", FLAGS):
            failures.append(f"{block.place}: {command}\nwanted:\n{wanted}\nprinted:\n{printed}")
    return failures


def _parse(command: str) -> tuple[list[str], Mapping[str, str]]:
    """The words of a command and the settings in front of it."""
    words = shlex.split(command, comments=True)
    environment = {}
    while words and (setting := _SETTING.fullmatch(words[0])):
        environment[setting["name"]] = setting["value"]
        words = words[1:]
    return words, environment


def _commands(block: Block) -> list[str]:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    failures = []
    for line in block.text.splitlines():
        words, _ = _parse(line)
        if words[:1] == ["make"] and words[1] not in targets:
            failures.append(f"{block.place}: there is no target {words[1]}")
        if words[:1] == ["amp-compiler"]:
            group: Any = typer.main.get_command(app)
            try:
                command = group.commands[words[1]]
                command.make_context(words[1], words[2:])
            except Exception as error:
                failures.append(f"{block.place}: {line}: {error!r}")
    return failures


if __name__ == "__main__":  # python tests/doc_pages.py docs/guide.md: while you write, in an empty folder
    import tempfile

    for path in [Path(given).resolve() for given in sys.argv[1:]] or pages():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            print(f"{path.name}:", "\n".join(run_page(path)) or "ok")
