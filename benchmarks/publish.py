"""From the result files of a run into the repository: the README's tables, the plots, and the baseline of compare.py.

Reads every result in DIR (`run.py` writes them), copies it to benchmarks/published/ with times rounded, its plot to
docs/bench/, and writes the tables anew that stand in README.md between `<!-- bench: NAME -->` and `<!-- end bench -->`;
`<!-- bench: plot NAME -->` is a picture. Each table ends with a line that says when, on what machine, from which commit
and by which command it was made. A block for which DIR has nothing is an error, before anything is written.
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
from tables import RENDERERS, CannotPublish, Published, provenance

BLOCK = re.compile(r"(<!-- bench: (?P<name>[^>]+?) -->\n)(?P<text>.*?)(<!-- end bench -->)", re.DOTALL)


def rewrite(text: str, published: Published, folder: str) -> str:
    """The README with every block written anew."""

    def block(match: re.Match[str]) -> str:
        name = match["name"].strip()
        if name.startswith("plot "):
            stem = name.removeprefix("plot ").strip()
            if stem not in published.results:
                raise CannotPublish(f"README's block {name!r}: there is no result {stem}.json")
            return f"{match[1]}![{stem}: {published.results[stem].script}.py]({folder}/{stem}.svg)\n{match[4]}"
        if name not in RENDERERS:
            raise CannotPublish(f"README's block {name!r} is none of: {', '.join(RENDERERS)}, plot NAME")
        published.used.clear()
        body = RENDERERS[name](published)
        if not body:
            raise CannotPublish(f"README's block {name!r}: the results hold nothing for it")
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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("results", type=Path, nargs="?", default=ROOT / "benchmarks" / "results", metavar="DIR")
    made.add_argument("--root", type=Path, default=ROOT, help="of the repository that is written to")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    root: Path = args.root
    readme, plots, baseline = root / "README.md", root / "docs" / "bench", root / "benchmarks" / "published"
    try:
        published = Published.load(args.results)
        text = rewrite(readme.read_text(), published, plots.relative_to(root).as_posix())
    except (CannotPublish, BadResult, OSError) as error:
        print(f"publish.py: {error}", file=sys.stderr)
        return 2
    for folder in (plots, baseline):
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier run had and this one has not would be stale
        folder.mkdir(parents=True)
    for name, result in published.results.items():
        # Compact: a line a row, so that a diff shows what changed.
        small = asdict(smaller(result))
        rows = ",\n".join(json.dumps(row) for row in small.pop("rows"))
        (baseline / f"{name}.json").write_text(f'{json.dumps(small)[:-1]}, "rows": [\n{rows}\n]}}\n')
        plot = args.results / f"{name}.svg"
        if plot.exists():
            shutil.copyfile(plot, plots / plot.name)
    readme.write_text(text)
    print(f"{len(published.results)} results published: README.md, {plots.name}/, {baseline.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
