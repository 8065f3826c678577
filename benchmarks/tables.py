"""The tables of docs/benchmarks.md and README.md, from the result files of a run: one function per table, all in
`RENDERERS`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import Ratio, Result, Row, ratio, read
from subjects import SUBJECTS

RUNS = "run_*.json"  # what run.py says about its runs; no results
COMMANDS = {
    "quick": "make bench-quick", "diagonal": "make bench", "compiled": "make bench-compiled", "full": "make bench-full",
    "units": "make bench-units",
}  # fmt: skip
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
NONE = "–"
UNITS = "units_"  # how the names of results begin for which low-precision units were not switched off


class CannotPublish(Exception):
    """The message is one line for the user."""


@dataclass
class Published:
    """The results of a run, by the names of their files, and by which command they were made."""

    results: dict[str, Result]
    commands: dict[str, str] = field(default_factory=dict)  # that made a result, where it was a plan of run.py
    used: set[str] = field(default_factory=set)  # since `used` was last cleared

    @classmethod
    def load(cls, folder: Path) -> Published:
        runs = sorted(folder.glob(RUNS))
        files = sorted(file for file in folder.glob("*.json") if file not in runs)
        if not files:
            raise CannotPublish(f"{folder} holds no result of a benchmark")
        try:
            said = [json.loads(run.read_text()) for run in runs]
            commands = {job["name"]: COMMANDS[run["plan"]] for run in said for job in run["jobs"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CannotPublish(f"{folder}/{RUNS} is not what run.py writes: {error!r}") from None
        results = {file.stem: read(file) for file in files}
        for name, result in results.items():
            failed = next((row for row in result.rows if row.failed), None)
            if failed is not None:
                raise CannotPublish(f"{name}: {' '.join(map(str, failed.key.values()))} failed: {failed.note}")
            if result.arguments.get("tiny"):
                raise CannotPublish(f"{name} is of networks in their tiny form, which is for tests")
        return cls(results, commands)

    def of(self, script: str) -> Iterator[tuple[str, Result]]:
        return ((name, result) for name, result in self.results.items() if result.script == script)

    def rows(self, script: str, **key: str) -> Iterator[tuple[Result, Row]]:
        """Rows of a script that have these values in their keys."""
        for name, result in self.of(script):
            for row in result.rows:
                if all(row.key.get(part) == value for part, value in key.items()):
                    self.used.add(name)
                    yield result, row


# ------------------------------------------------------------------------------------------------------- Markdown


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown.

    >>> print(table(["", "ms"], [["a | b", 1]]))
    | | ms |
    | --- | --- |
    | a \\\\| b | 1 |
    """

    def line(cells: Sequence[object]) -> str:
        return "|" + "".join(f" {text} |" if (text := str(cell).replace("|", "\\|")) else " |" for cell in cells)

    return "\n".join([line(columns), "|" + " --- |" * len(columns), *(line(row) for row in rows)])


def provenance(published: Published) -> str:
    """When, where, from what and how the results that were just used came."""
    results = [published.results[name] for name in sorted(published.used)]

    def each(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    names = sorted(published.used)
    made = (published.commands.get(name) or by_hand(published.results[name]) for name in names)
    command = "` and `".join(dict.fromkeys(made))
    machines = each(
        f"{m['cpu']}, {m['cores']} cores, {m['threads']} thread{'s' * (m['threads'] != '1')}, {m['features']}"
        + "".join(f", `{setting}`" for setting in m.get("settings", "").split())
        for m in (result.machine for result in results)
    )
    versions = each(f"torch {result.machine.get('torch', '?')}" for result in results)
    commits = each(result.machine["commit"] for result in results)
    dates = each(result.date[:10] for result in results)
    return f"`{command}`, {dates}: {machines}; {versions}, commit {commits}."


def by_hand(result: Result) -> str:
    """The command that made a result outside of any plan: its lists of sizes and names, and its rounds."""
    told = {name: value for name, value in result.arguments.items() if name == "rounds" or isinstance(value, list)}
    words = [f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
             for name, value in told.items()]  # fmt: skip
    return " ".join(["python", f"benchmarks/{result.script}.py", *words])


# ------------------------------------------------------------------------------------------------ training, inference


@dataclass
class Comparison:
    """The variants of one subject, kind and dtype that ran in turns."""

    subject: str
    dtype: str
    rows: dict[str, Row] = field(default_factory=dict)

    def ratio(self, own: str, peer: str) -> Ratio | None:
        samples = [self.rows[name].samples.get("seconds") if name in self.rows else None for name in (own, peer)]
        if not samples[0] or not samples[1] or len(samples[0]) != len(samples[1]):
            return None
        return ratio(samples[0], samples[1])

    def cell(self, own: str, peer: str) -> str:
        found = self.ratio(own, peer)
        if found is not None:
            return str(found)
        notes = [self.rows[name].note for name in (own, peer) if name in self.rows and self.rows[name].note]
        return notes[0] if notes else NONE


def comparisons(published: Published, kind: str, needed: Sequence[str], units: bool = False) -> list[Comparison]:
    """Those that have all the variants; of two runs of the same the one with more variants, then more rounds. `units`:
    of the results with low-precision units, or of the others."""
    found: dict[tuple[str, str], Comparison] = {}
    for name, result in published.of("steps"):
        if name.startswith(UNITS) is not units:
            continue
        here: dict[tuple[str, str], Comparison] = {}
        for row in result.rows:
            plain = not {"optimizer", "accumulate"} & row.key.keys()
            if row.key["kind"] == kind and plain:
                place = str(row.key["subject"]), str(row.key["dtype"])
                here.setdefault(place, Comparison(*place)).rows[str(row.key["variant"])] = row
        for place, comparison in here.items():
            if all(variant in comparison.rows for variant in needed):
                if place not in found or _weight(comparison) > _weight(found[place]):
                    found[place] = comparison
                published.used.add(name)
    return list(found.values())


def _weight(comparison: Comparison) -> tuple[int, int]:
    rounds = max((len(row.samples.get("seconds", ())) for row in comparison.rows.values()), default=0)
    return len(comparison.rows), rounds


def by_dtype(
    found: Sequence[Comparison], columns: Mapping[str, Callable[[Comparison], str]]
) -> str:
    """One line per subject; every column once for each dtype that was measured."""
    dtypes = [dtype for dtype in DTYPES if any(one.dtype == dtype for one in found)]
    subjects = list(dict.fromkeys(one.subject for one in found))
    places = {(one.subject, one.dtype): one for one in found}

    def cells(subject: str) -> list[str]:
        return [
            column(places[subject, dtype]) if (subject, dtype) in places else NONE
            for dtype in dtypes
            for column in columns.values()
        ]

    heads = [f"{DTYPES[dtype]}: {head}" for dtype in dtypes for head in columns]
    return table(["", *heads], [[title(subject), *cells(subject)] for subject in subjects])


def title(subject: str) -> str:
    """What a subject is, for people who do not know its name."""
    return f"{subject}: {SUBJECTS[subject].title}" if subject in SUBJECTS else subject


def steps(kind: str) -> Callable[[Published], str]:
    def render(published: Published) -> str:
        found = comparisons(published, kind, ("fp32", "autocast", "O2"))
        return by_dtype(found, {
            "O2 / fp32": lambda one: one.cell("O2", "fp32"), "autocast / O2": lambda one: one.cell("autocast", "O2"),
        }) if found else ""  # fmt: skip

    return render


def with_units(published: Published) -> str:
    """Training and inference side by side, on a CPU whose low-precision units are used."""
    needed = ("fp32", "autocast", "O2")
    found = {kind: comparisons(published, kind, needed, units=True) for kind in ("training", "inference")}
    places = {(kind, one.subject): one for kind, all_ in found.items() for one in all_}
    columns = [(kind, own, peer) for kind in found for own, peer in (("O2", "fp32"), ("autocast", "O2"))]
    lines = [
        [title(subject), *(places[kind, subject].cell(own, peer) if (kind, subject) in places else NONE
                           for kind, own, peer in columns)]
        for subject in dict.fromkeys(subject for _, subject in places)
    ]  # fmt: skip
    return table(["", *(f"{kind}: {own} / {peer}" for kind, own, peer in columns)], lines) if lines else ""


#: what the README shows: subject, kind and dtype, the first words of its line
HEADLINES = {
    ("bert", "training", "bfloat16"): "training, BERT-like",
    ("bert", "training", "float16"): "training, BERT-like",
    ("resnet", "training", "bfloat16"): "training, small ResNet",
    ("lstm", "training", "bfloat16"): "training, LSTM",
    ("bert", "inference", "bfloat16"): "inference, BERT-like",
    ("bert", "inference", "float16"): "inference, BERT-like",
}


def results(published: Published) -> str:
    """The README's one table: time beside fp32, and what a training step writes and holds beside autocast."""
    needed = ("fp32", "autocast", "O2")
    found = {(one.subject, kind, one.dtype): one for kind in ("training", "inference")
             for one in comparisons(published, kind, needed)}  # fmt: skip

    def both(one: Comparison, name: str, shown: Callable[[float], str]) -> str:
        counts = [one.rows[variant].counts.get(name) for variant in needed[1:]]
        return NONE if None in counts else " → ".join(shown(count) for count in counts if count is not None)

    lines = [
        [f"{words}, {DTYPES[place[2]]}", found[place].cell("autocast", "fp32"), found[place].cell("O2", "fp32"),
         both(found[place], "casts", str) if place[1] == "training" else NONE,
         both(found[place], "peak_bytes", _size) if place[1] == "training" else NONE]
        for place, words in HEADLINES.items() if place in found
    ]  # fmt: skip
    heads = [
        "", "time, autocast relative to fp32", "time, O2 relative to fp32", "casts, autocast → O2",
        "peak memory, autocast → O2",
    ]  # fmt: skip
    return table(heads, lines) if lines else ""


def compiled(published: Published) -> str:
    found = comparisons(published, "training", ("autocast+compile", "O2+inductor"))
    return by_dtype(found, {
        "O2 inductor / autocast + compile": lambda one: one.cell("O2+inductor", "autocast+compile"),
        "O2 inductor / fp32": lambda one: one.cell("O2+inductor", "fp32"),
    }) if found else ""  # fmt: skip


def detail(name: str) -> Callable[[Published], str]:
    """One job with its variants side by side: what each takes and does."""

    def render(published: Published) -> str:
        if name not in published.results:
            return ""
        published.used.add(name)
        lines, sizes = [], ("cast_bytes", "peak_bytes", "saved_bytes")
        for row in published.results[name].rows:
            taken, counts = row.samples.get("seconds"), row.counts
            peer = next((r for r in published.results[name].rows if r.key == row.reference), None)
            beside = peer.samples.get("seconds") if peer is not None else None
            flops = counts.get("flops_low", 0) + counts.get("flops_fp32", 0)
            lines.append([
                row.key["variant"], f"{statistics.median(taken) * 1e3:,.1f}" if taken else row.note or NONE,
                ratio(taken, beside) if taken and beside and peer is not row else NONE,
                *(f"{counts[part]:,}" if part in counts else NONE for part in ("ops", "casts")),
                *(_size(counts[part]) if part in counts else NONE for part in sizes),
                f"{100 * counts['flops_low'] / flops:.0f} %" if "flops_low" in counts and flops else NONE,
            ])  # fmt: skip
        heads = ["", "ms", "/ fp32", "ops", "casts", "bytes cast", "peak memory", "kept for backward", "FLOPs low"]
        return table(heads, lines)

    return render


def memory_and_casts(published: Published) -> str:
    columns = {"ops": "ops", "casts": "casts", "bytes cast": "cast_bytes", "peak memory": "peak_bytes",
               "kept for backward": "saved_bytes", "converted in kernels": "inside_bytes"}  # fmt: skip

    def cell(own: Row, peer: Row, name: str) -> str:
        ours, theirs = own.counts.get(name), peer.counts.get(name)
        if ours is None or theirs is None:
            return NONE
        shown = [f"{value:,}" if name in ("ops", "casts") else _size(value) for value in (ours, theirs)]
        return f"{ours / theirs:.2f} ({shown[0]} / {shown[1]})" if theirs else f"{shown[0]} / {shown[1]}"

    found = [one for one in comparisons(published, "training", ("autocast", "O2")) if one.rows["O2"].counts]
    lines = []
    for one in found:
        own, peer = one.rows["O2"], one.rows["autocast"]
        lines.append([f"{one.subject}, {DTYPES[one.dtype]}", *(cell(own, peer, name) for name in columns.values())])
    return table(["O2 / autocast", *columns], lines) if lines else ""


def _size(number: float) -> str:
    """Bytes for people.

    >>> _size(512), _size(13_200), _size(14_300_000)
    ('512 B', '13.2 KB', '14.3 MB')
    """
    for unit, size in (("MB", 1e6), ("KB", 1e3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f} B"


# ------------------------------------------------------------------------------------------------------ other scripts


def growth(published: Published) -> str:
    """A pair of tables for each result file: figures by layers, and exponents."""
    parts = []
    for name, result in published.of("growth"):
        published.used.add(name)
        rows = {(str(row.key["what"]), str(row.key["variant"]), row.key.get("layers")): row for row in result.rows}
        model = str(result.rows[0].key["model"])
        parts += [_by_layers(model, rows), _exponents(model, rows)]
    return "\n\n".join(part for part in parts if part)


def _by_layers(model: str, rows: Mapping[tuple[str, str, str | int | None], Row]) -> str:
    def divided(what: str, own: str, peer: str, size: int) -> str:
        both = [row for name in (own, peer) if (row := rows.get((what, name, size))) is not None]
        return str(ratio(*(row.samples["seconds"] for row in both))) if len(both) == 2 else NONE

    def seconds(own: str, size: int) -> str:
        row = rows.get(("compile", own, size))
        return NONE if row is None else f"{statistics.median(row.samples['seconds']):.1f} s"

    columns: dict[str, Callable[[int], str]] = {
        "`amp_compile`": lambda size: seconds("amp_compile", size),
        "/ `torch.compile` (aot_eager)":
            lambda size: divided("compile", "amp_compile", "torch.compile aot_eager", size),
        "`compile_train_step` / autocast + aot_eager":
            lambda size: divided("compile", "compile_train_step", "autocast + aot_eager", size),
        "with Inductor / autocast + Inductor":
            lambda size: divided("compile", "compile_train_step inductor", "autocast + inductor", size),
        "a step: O2 / fp32": lambda size: divided("step", "O2", "fp32", size),
    }  # fmt: skip
    layers = sorted({size for _, _, size in rows if isinstance(size, int) and size})
    kept = {head: cell for head, cell in columns.items() if any(cell(size) != NONE for size in layers)}
    lines = [[f"{model}, {size} layers", *(cell(size) for cell in kept.values())] for size in layers]
    return table(["", *kept], lines) if lines else ""


def _exponents(model: str, rows: Mapping[tuple[str, str, str | int | None], Row]) -> str:
    found = [(variant, row) for (what, variant, _), row in rows.items() if what == "exponent"]
    lines = [[name, _exponent(row), f"{row.figures['whole_exponent']:.2f}", row.note] for name, row in found]
    heads = [f"{model}: figure = c · layers^k", "k of what layers add", "k of the whole", ""]
    return table(heads, lines) if lines else ""


def _exponent(row: Row) -> str:
    if "exponent" not in row.figures:
        return NONE
    middle, low, high = (row.figures[name] for name in ("exponent", "exponent_low", "exponent_high"))
    return f"{middle:.2f}" if low == high else f"{middle:.2f} ({low:.2f} to {high:.2f})"


def kernels(published: Published) -> str:
    rows = {(str(row.key["case"]), str(row.key["dtype"]), str(row.key["variant"])): row
            for _, row in published.rows("kernels")}  # fmt: skip
    cases = list(dict.fromkeys(case for case, _, variant in rows if variant == "fp32"))
    dtypes = [dtype for dtype in DTYPES if any(key[1] == dtype for key in rows)]

    def divided(case: str, dtype: str, own: str, peer: str) -> str:
        both = [rows.get((case, dtype, name)) for name in (own, peer)]
        return NONE if None in both else str(ratio(*(row.samples["seconds"] for row in both if row is not None)))

    pairs = {"ours / fp32": ("ours", "fp32"), "native / ours": ("native", "ours"),
             "in Python / ours": ("in Python", "ours")}  # fmt: skip
    heads = [f"{DTYPES[dtype]}: {head}" for dtype in dtypes for head in pairs]
    lines = [[case, *(divided(case, dtype, *pair) for dtype in dtypes for pair in pairs.values())] for case in cases]
    parts = [table(["", *heads], lines)] if lines else []
    gradients = list(dict.fromkeys(case for case, _, variant in rows if variant == "foreach"))
    kinds = list(dict.fromkeys(dtype for case, dtype, _ in rows if case in gradients))
    if gradients:
        found = [[case, *(divided(case, dtype, "foreach", "ours") for dtype in kinds)] for case in gradients]
        parts.append(table(["foreach / ours", *kinds], found))
    parts += [f"Compiling the kernels, once per machine: {row.figures['seconds']:.0f} s."
              for (case, _, _), row in rows.items() if case == "compiling the kernels"]  # fmt: skip
    return "\n\n".join(parts)


def convert(published: Published) -> str:
    inference = {(str(row.key["dtype"]), str(row.key["variant"])): row
                 for _, row in published.rows("convert", what="inference")}  # fmt: skip
    dtypes = [dtype for dtype in DTYPES if (dtype, "fp32") in inference]
    variants = list(dict.fromkeys(variant for _, variant in inference if variant != "fp32"))
    lines = [
        [variant, *(str(ratio(*(inference[dtype, name].samples["seconds"] for name in (variant, "fp32"))))
                    for dtype in dtypes)]
        for variant in variants
    ]  # fmt: skip
    parts = [table(["inference / fp32", *(DTYPES[dtype] for dtype in dtypes)], lines)] if lines else []
    time = {str(row.key["dtype"]): row for _, row in published.rows("convert", what="conversion")}
    memory = {str(row.key["dtype"]): row for _, row in published.rows("convert", what="memory")}
    lines = [
        [DTYPES[dtype], str(ratio(time[dtype].samples["seconds"], time["float32"].samples["seconds"])),
         *(_size(memory[dtype].counts[name]) for name in ("fp32_bytes", "converted_bytes")),
         _size(memory[dtype].figures["peak_resident"])]
        for dtype in dtypes if dtype in time and dtype in memory
    ]  # fmt: skip
    if lines:
        heads = ["conversion", "time / `torch.export`", "fp32 weights", "converted", "memory beyond the model"]
        parts.append(table(heads, lines))
    return "\n\n".join(parts)


def dump(published: Published) -> str:
    def median(row: Row, name: str) -> str:
        return f"{statistics.median(row.samples[name]):.1f} s" if name in row.samples else NONE

    lines = []
    for _, row in published.rows("dump"):
        size = row.figures.get("page_bytes")
        times = [median(row, name) for name in ("seconds", "cpu_seconds")]
        page = NONE if size is None else _size(size)
        lines.append([f"{row.key['layers']} layers, {row.key['graph']}", *times, page, median(row, "drawn")])
    return table(["", "whole process", "CPU", "page", "drawn"], lines) if lines else ""


def casts(published: Published) -> str:
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for _, row in published.rows("casts"):
        place = str(row.key["network"]), str(row.key["dtype"])
        found.setdefault(place, {})[str(row.key["variant"])] = row

    def cell(row: Row | None) -> str:
        return NONE if row is None or not row.counts else f"{row.counts['casts']:,}, {_size(row.counts['cast_bytes'])}"

    names = {"autocast": "autocast", "the same lists": "Policy.torch", "O2": "O2"}
    lines = [
        [f"{network}, {DTYPES[dtype]}", *(cell(rows.get(name)) for name in names.values())]
        for (network, dtype), rows in found.items()
    ]
    return table(["casts, bytes", *names], lines) if lines else ""


def gpu(published: Published) -> str:
    rows = {(row.key["layer"], row.key["target"], row.key["variant"]): row
            for _, row in published.rows("gpu", what="computed", part="all three")}  # fmt: skip
    layers = list(dict.fromkeys(layer for layer, _, _ in rows))
    targets = list(dict.fromkeys(target for _, target, _ in rows))

    def cell(layer: str | int, target: str | int, name: str) -> str:
        own, peer = (rows[layer, target, variant].counts[name] for variant in ("ours", "cast before"))
        return f"{own} / {peer}" if name == "kernels" else f"{own / peer:.2f}"

    heads = [f"{target}: {head}" for target in targets for head in ("kernels", "bytes, least", "most")]
    names = ("kernels", "least_bytes", "most_bytes")
    lines = [[layer, *(cell(layer, target, name) for target in targets for name in names)] for layer in layers]
    return table(["ours / cast before", *heads], lines) if lines else ""


def frameworks(published: Published) -> str:
    found: dict[str, dict[tuple[str, str], Row]] = {}
    for _, row in published.rows("frameworks"):
        key = row.key
        found.setdefault(str(key["subject"]), {})[str(key["framework"]), str(key["variant"])] = row
    parts = []
    for subject, rows in found.items():
        lines = []
        for (framework, variant), row in rows.items():
            if row.samples:
                middle = f"{statistics.median(row.samples['seconds']) * 1e3:,.1f} ms"
                own = rows["torch" if framework == "ours" else framework, "fp32"]
                shown = NONE if row is own else str(ratio(row.samples["seconds"], own.samples["seconds"]))
                lines.append([f"{framework} {variant}", middle, shown, f"{row.figures['loss']:.6f}"])
            else:
                lines.append([f"{framework} {variant}", row.note, "", ""])
        parts.append(table([subject, "a step", "/ its own fp32", "last loss"], lines))
    return "\n\n".join(parts)


RENDERERS: dict[str, Callable[[Published], str]] = {
    "steps_training": steps("training"),
    "steps_inference": steps("inference"),
    "compiled": compiled,
    "peers": detail("peers"),
    "levels": detail("levels"),
    "memory_and_casts": memory_and_casts,
    "casts": casts,
    "growth": growth,
    "kernels": kernels,
    "convert": convert,
    "dump": dump,
    "gpu": gpu,
    "frameworks": frameworks,
    "results": results,
}
