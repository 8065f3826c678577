"""Publish the result files of a run: the tables and plots of docs/benchmarks.md, the README's table, and the baseline
of compare.py.

Reads every result in DIR (`run.py` writes them), copies it to benchmarks/published/ with times rounded, and its plot to
docs/bench/. Then it rewrites the tables in README.md and docs/benchmarks.md, which stand between `<!-- bench: NAME -->`
and `<!-- end bench -->`; `<!-- bench: plot NAME -->` is a picture. Each table ends with a line that says when, on what
machine, from which commit and by which command it was made. A block for which DIR has nothing stays as it is, and is
named at the end, as are files of an earlier run that this one did not renew.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from harness import ROOT, BadResult, Result
from tables import RENDERERS, RUNS, CannotPublish, Published, provenance

#: page -> the folder of the plots, as seen from it
PAGES = {"README.md": "docs/bench", "docs/benchmarks.md": "bench"}
BLOCK = re.compile(r"(<!-- bench: (?P<name>[^>]+?) -->\n)(?P<text>.*?)(<!-- end bench -->)", re.DOTALL)


def rewrite(text: str, published: Published, folder: str, kept: list[str]) -> str:
    """The text with every block rewritten; `folder` is where the plots are, as seen from the text.

    Blocks that the results have nothing for stay, and their names are added to `kept`.
    """

    def block(match: re.Match[str]) -> str:
        name = match["name"].strip()
        if name.startswith("plot "):
            stem = name.removeprefix("plot ").strip()
            if stem not in published.results:
                kept.append(name)
                return match[0]
            return f"{match[1]}![{stem}: {published.results[stem].script}.py]({folder}/{stem}.svg)\n{match[4]}"
        if name not in RENDERERS:
            raise CannotPublish(f"the block {name!r} is none of: {', '.join(RENDERERS)}, plot NAME")
        published.used.clear()
        body = RENDERERS[name](published)
        if not body:
            kept.append(name)
            return match[0]
        return f"{match[1]}{body}\n\n{provenance(published)}\n{match[4]}"

    return BLOCK.sub(block, text)


def smaller(result: Result) -> Result:
    """With six figures of each time: the rest is noise, and the files are kept in the repository."""

    def rounded(values: Mapping[str, float]) -> dict[str, float]:
        return {name: float(f"{value:.6g}") for name, value in values.items()}

    rows = [
        replace(row, figures=rounded(row.figures),
                samples={name: [float(f"{s:.6g}") for s in samples] for name, samples in row.samples.items()})
        for row in result.rows
    ]  # fmt: skip
    return replace(result, rows=rows)


def write(path: Path, result: Result) -> None:
    """One line per row, so that a diff shows what changed."""
    plain = asdict(result)
    rows = ",\n".join(json.dumps(row) for row in plain.pop("rows"))
    path.write_text(f'{json.dumps(plain)[:-1]}, "rows": [\n{rows}\n]}}\n')


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("results", type=Path, nargs="?", default=ROOT / "benchmarks" / "results", metavar="DIR")
    made.add_argument("--root", type=Path, default=ROOT, help="of the repository that is written to")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    root: Path = args.root
    plots, baseline = root / "docs" / "bench", root / "benchmarks" / "published"
    pages = {root / page: folder for page, folder in PAGES.items()}
    kept: list[str] = []
    try:
        published = Published.load(args.results)
        published.results = {name: smaller(result) for name, result in published.results.items()}
        texts = {page: rewrite(page.read_text(), published, folder, kept) for page, folder in pages.items()}
    except (CannotPublish, BadResult, OSError) as error:
        print(f"publish.py: {error}", file=sys.stderr)
        return 2
    for folder in (plots, baseline):
        folder.mkdir(parents=True, exist_ok=True)
    for name, result in published.results.items():
        write(baseline / f"{name}.json", result)
        plot = args.results / f"{name}.svg"
        if plot.exists():
            shutil.copyfile(plot, plots / plot.name)
    for run in args.results.glob(RUNS):
        shutil.copyfile(run, baseline / run.name)
    for page, text in texts.items():
        page.write_text(text)
    known = {*published.results, *(run.stem for run in baseline.glob(RUNS))}
    old = sorted(file.name for file in baseline.glob("*.json") if file.stem not in known)
    written = sum(len(BLOCK.findall(text)) for text in texts.values()) - len(kept)
    print(f"{len(published.results)} results published, {written} blocks written")
    for what, names in (("blocks as they were", kept), ("results of an earlier run", old)):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
