"""Files of converted models: written whole or not at all, read without running anything that is in them.

A file is what ``torch.export.save`` writes, with two texts beside it: ``amp_compiler.json`` (``Details``) and
``amp_compiler_fp32.json`` (the fp32 graph for ``remove_casts``; the weights are in the file once).
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from ..capture import program as programs
from ..common.errors import AmpError, ArchiveError
from ..common.files import why_not_written
from .details import FORMAT, Details
from .fp32_form import StoredFp32Form
from .safety import Unsafe, check_members, check_program

if TYPE_CHECKING:
    from .converted import ConvertedModel

DETAILS, FP32 = "amp_compiler.json", "amp_compiler_fp32.json"


def save(converted: ConvertedModel, path: str | os.PathLike[str]) -> None:
    """Write ``converted`` to ``path``: first into a file beside it, which then takes its place."""
    target = Path(path)
    if not target.name or target.is_dir():
        raise ArchiveError(f"The model cannot be written to {str(path)!r}: give the path of a file, such as model.pt2.")
    extra = {DETAILS: converted.details.to_json(), FP32: converted.fp32_form.to_json(converted.exported_program)}
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(scratch, "wb") as file:
            torch.export.save(converted.exported_program, file, extra_files=extra)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except OSError as error:
        raise ArchiveError(f"The model could not be written to {target}: {why_not_written(target, error)}.") from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def load_converted(path: str | os.PathLike[str]) -> ConvertedModel:
    """A model that ``ConvertedModel.save`` wrote, with its policy and report; kernels are chosen for this machine.

    Nothing that is stored in the file is run as code: tensors are read as bytes, the graph may only name ops of torch
    and of packages that you have imported, and an archive that would need unpickling is refused. ``torch.export.load``
    reads the same file but unpickles what asks for it, so give it only files that you trust.
    """
    from .converted import ConvertedModel

    source = Path(path)
    try:
        with open(source, "rb") as file:
            details, program, form = _read(file, source)
    except OSError as error:
        raise ArchiveError(f"The file {source} cannot be read: {error.strerror or error}.") from error
    return ConvertedModel(program, details, form, [])


def _read(file: IO[bytes], source: Path) -> tuple[Details, torch.export.ExportedProgram, StoredFp32Form]:
    made = "another torch"
    try:
        with zipfile.ZipFile(file) as archive:
            texts = check_members(archive, (DETAILS, FP32))
            if DETAILS not in texts:
                raise ArchiveError(
                    f"{source} was not written by ConvertedModel.save: it holds no {DETAILS}. A plain torch.export "
                    "file is read by torch.export.load."
                )
            details = _details(texts[DETAILS], source)
            made = f"torch {details.torch_version}"
            graph, sample = programs.parts(archive)
            check_program(graph)
            check_program(json.dumps(json.loads(texts[FP32])["graph"]))
        file.seek(0)
        program = programs.load(file, graph, sample)
    except zipfile.BadZipFile as error:
        raise ArchiveError(
            f"{source} is not a converted model, or it is cut off: {error}. Write it again by save()."
        ) from error
    except Unsafe as error:
        raise ArchiveError(f"{source} is refused: {error}. Only load files from people you trust.") from error
    except AmpError:
        raise
    except OSError:
        raise
    except Exception as error:  # torch's reader gives many kinds of errors on a damaged file
        raise ArchiveError(
            f"{source} cannot be read: {type(error).__name__}: {_first_line(error)} It is damaged, or {made} wrote "
            f"what torch {torch.__version__} does not know: write it again by save()."
        ) from error
    return details, program, StoredFp32Form(texts[FP32])


def _details(text: str, source: Path) -> Details:
    try:
        data = json.loads(text)
        found = data["format"]
        if found > FORMAT:
            raise ArchiveError(
                f"{source} has format {found}, written by amp-compiler {data.get('amp_version', '?')}; this release "
                f"reads up to {FORMAT}. Update amp-compiler, or save the model again with this release."
            )
        return Details.from_json(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArchiveError(f"{source}: what {DETAILS} says is damaged ({type(error).__name__}: {error}).") from error


def _first_line(error: Any) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else ""
