"""What changed between two results: `compare.py OLD NEW`, two result files or two folders of them.

*Times* are compared as ratios to the row's reference in the same run (usually fp32), or as seconds if a row has none.
"Slower" means that the new interval lies entirely above the old one. Each is a 95 % interval of a median, so out of a
hundred unchanged times one may still be listed. *Counts* (ops, casts, bytes) are exact: every change is listed.

Ends with 1 if something got slower, failed, counts more than before or is no longer measured though it was asked for;
with 2 if a file cannot be read. More operations in low precision are not worse unless there are more in all. Where
machines or versions differ, or there were fewer than 5 rounds, times are shown but not judged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import BadResult, Ratio, Result, Row, interval, read
from harness.timing import Spread, times

MACHINE = ("cpu", "cores", "threads", "features", "settings")
VERSIONS = ("python", "torch", "triton", "numpy", "transformers")
VERDICTS = {
    "failed": "Fails now", "slower": "Slower", "more": "Counts more", "faster": "Faster", "less": "Counts less",
    "mended": "Runs again", "new": "New", "gone": "Gone",
}  # fmt: skip
NO_RESULT = "run_*.json"  # what `run.py` writes beside the results
WORSE = ("failed", "slower", "more", "gone")
ENOUGH = 5  # rounds: with fewer, nothing is known about noise


@dataclass(frozen=True)
class Finding:
    """One difference: `what` changed of the row `where`."""

    verdict: str
    where: str
    what: str = ""
    old: str = ""
    new: str = ""
    judged: bool = True

    @property
    def worse(self) -> bool:
        return self.judged and self.verdict in WORSE

    def __str__(self) -> str:
        change = f": {self.old} → {self.new}" if self.old or self.new else ""
        return f"{self.where}{' ' * bool(self.what)}{self.what}{change}"


def compare(old: Result, new: Result) -> list[Finding]:
    """All differences between two results of the same script.

    Rows are the same if their keys are.
    """
    before, after = ({_name(row): row for row in result.rows} for result in (old, new))
    comparable = not differing(old, new, MACHINE + VERSIONS)
    same = old.arguments == new.arguments  # rows that were not asked for are not missing
    found = [Finding("gone", f"{old.script} {name}", judged=same) for name in before if name not in after]
    found += [Finding("new", f"{new.script} {name}") for name in after if name not in before]
    for name, row in before.items():
        if name in after:
            where = f"{new.script} {name}"
            found += _rows(where, row, after[name])
            found += _times(where, row, after[name], old, new, comparable)
            found += _counts(where, row.counts, after[name].counts)
    return found


def differing(old: Result, new: Result, names: Sequence[str]) -> list[str]:
    """Return the differences between the machines, as text."""
    pairs = ((name, old.machine.get(name, "none"), new.machine.get(name, "none")) for name in names)
    return [f"{name} {first} → {second}" for name, first, second in pairs if first != second]


def _name(row: Row) -> str:
    return " ".join(str(value) for value in row.key.values())


def _rows(where: str, old: Row, new: Row) -> Iterator[Finding]:
    if old.failed != new.failed:
        yield Finding("failed" if new.failed else "mended", where, old=old.note or "ran", new=new.note or "runs")


def _times(where: str, old: Row, new: Row, before: Result, after: Result, comparable: bool) -> Iterator[Finding]:
    for name in old.samples:
        if old.samples[name] and not new.samples.get(name) and not new.failed:
            yield Finding("gone", where, name)
        if not old.samples[name] or not new.samples.get(name):
            continue
        first: Ratio | Spread | None = _interval(old, name, before)
        second: Ratio | Spread | None = _interval(new, name, after)
        if first is None or second is None:  # no reference on one side: seconds on both
            first, second = (Spread(*interval(row.samples[name])) for row in (old, new))
        verdict = "slower" if second.low > first.high else "faster" if second.high < first.low else ""
        if verdict:
            enough = min(len(old.samples[name]), len(new.samples[name])) >= ENOUGH
            yield Finding(verdict, where, name, _text(first), _text(second), comparable and enough)


def _interval(row: Row, name: str, result: Result) -> Ratio | None:
    """The row's time divided by its reference's, round by round."""
    other = next((r for r in result.rows if r.key == row.reference), None)
    peer = other.samples.get(name) if other is not None else None
    own = row.samples[name]
    return Ratio(*interval([a / b for a, b in zip(own, peer, strict=True)])) if peer and len(peer) == len(own) else None


def _text(found: Ratio | Spread) -> str:
    if isinstance(found, Spread):
        return f"{found} ms"
    return f"{times(found.median)} ({times(found.low)} to {times(found.high)})"


def _counts(where: str, old: dict[str, int], new: dict[str, int]) -> Iterator[Finding]:
    for name in dict.fromkeys((*old, *new)):
        if name not in new:
            yield Finding("gone", where, name, f"{old[name]:,}", "–")
        elif name not in old:
            yield Finding("new", where, name, "–", f"{new[name]:,}")
        elif old[name] != new[name]:
            more = new[name] > old[name]
            if name == "flops_low" and more:
                more = _flops(new) > _flops(old)
            yield Finding("more" if more else "less", where, name, f"{old[name]:,}", f"{new[name]:,}")


def _flops(counts: dict[str, int]) -> int:
    return counts.get("flops_low", 0) + counts.get("flops_fp32", 0)


# --------------------------------------------------------------------------------------------------------- files


def pairs(old: Path, new: Path) -> tuple[list[tuple[Path, Path]], list[Finding]]:
    """Files to compare, and findings about those that only one side has."""
    for path in (old, new):
        if not path.exists():
            raise BadResult(f"{path}: there is no such file or folder")
    if old.is_dir() != new.is_dir():
        raise BadResult("give two files or two folders, not one of each")
    if not old.is_dir():
        return [(old, new)], []
    before, after = (
        {path.name: path for path in sorted(folder.glob("*.json")) if not path.match(NO_RESULT)}
        for folder in (old, new)
    )
    if not before or not after:
        raise BadResult(f"{new if before else old}: there are no result files in this folder")
    if not before.keys() & after.keys():
        raise BadResult(f"{old} and {new} have no result in common")
    found = [Finding("gone", f"file {name}", judged=False) for name in before if name not in after]
    found += [Finding("new", f"file {name}") for name in after if name not in before]
    return [(path, after[name]) for name, path in before.items() if name in after], found


def warnings(name: str, old: Result, new: Result) -> list[str]:
    """Return what makes two results hard to compare, for the top of the page."""
    found = []
    if different := differing(old, new, MACHINE):
        found.append(f"{name}: other machines, times are not comparable, counts are: {', '.join(different)}")
    if different := differing(old, new, VERSIONS):
        found.append(f"{name}: other versions, neither times nor counts need agree: {', '.join(different)}")
    names = dict.fromkeys((*old.arguments, *new.arguments))
    if different := [n for n in names if old.arguments.get(n) != new.arguments.get(n)]:
        found.append(f"{name}: other arguments, only rows that both have are compared: {', '.join(different)}")
    return found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("old", type=Path, metavar="OLD")
    found.add_argument("new", type=Path, metavar="NEW")
    found.add_argument("--json", action="store_true", help="findings as JSON, nothing else")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    notes: list[str] = []
    try:
        files, found = pairs(args.old, args.new)
        for first, second in files:
            old, new = read(first), read(second)
            if old.script != new.script:
                raise BadResult(f"{first} is a result of {old.script}, {second} of {new.script}")
            notes += warnings(first.stem, old, new)
            found += compare(old, new)
    except BadResult as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    worse = [finding for finding in found if finding.worse]
    if args.json:
        findings = [{**asdict(finding), "worse": finding.worse} for finding in found]
        print(json.dumps({"warnings": notes, "findings": findings, "worse": len(worse)}, indent=1))
        return 1 if worse else 0
    for note in notes:
        print(f"Warning: {note}")
    for verdict, title in VERDICTS.items():
        chosen = [finding for finding in found if finding.verdict == verdict]
        if chosen:
            print(f"{title}:")
            for finding in chosen:
                print(f"  {finding}{'' if finding.judged else '  (not judged)'}")
    print(f"{len(worse)} worse of {len(found)} differences." if found else "No differences.")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
