"""Files of converted models: written as a whole or not at all, read without running any code in them.

A file is what ``torch.export.save`` writes, with two additional texts: ``amp_compiler.json`` (``Details``) and
``amp_compiler_fp32.json`` (the fp32 graph for ``remove_casts``; the weights are in the file once).
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import IO

import torch
from torch.export import ExportedProgram

from ..capture import program as programs
from ..common.errors import AmpError, ArchiveError
from ..common.files import replacing
from ..common.messages import first_line
from .details import FORMAT, Details
from .fp32_form import Fp32Form, StoredFp32Form
from .safety import Unsafe, check_members, check_program

DETAILS, FP32 = "amp_compiler.json", "amp_compiler_fp32.json"


def write(
    path: str | os.PathLike[str], program: ExportedProgram, details: Details, form: Fp32Form | StoredFp32Form
) -> None:
    """Write the parts of a converted model."""
    extra = {DETAILS: details.to_json(), FP32: form.to_json(program)}
    place = replacing(path, what="The model", error=ArchiveError, example="model.pt2")
    with place as scratch, open(scratch, "wb") as file:
        torch.export.save(program, file, extra_files=extra)


def read(path: str | os.PathLike[str]) -> tuple[ExportedProgram, Details, StoredFp32Form]:
    """Return the parts of a converted model, from a file that ``write`` wrote."""
    source = Path(path)
    try:
        with open(source, "rb") as file:
            return _read(file, source)
    except OSError as error:
        raise ArchiveError(f"The file {source} cannot be read: {error.strerror or error}.") from error


def _read(file: IO[bytes], source: Path) -> tuple[ExportedProgram, Details, StoredFp32Form]:
    made = "another torch"
    try:
        with zipfile.ZipFile(file) as archive:
            texts = check_members(archive, (DETAILS, FP32))
            if DETAILS not in texts:
                raise ArchiveError(
                    f"{source} was not written by ConvertedModel.save: it has no {DETAILS}. Use torch.export.load for "
                    "a plain torch.export file."
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
            f"{source} is not a converted model, or it is truncated: {error}. Write it again with save()."
        ) from error
    except Unsafe as error:
        raise ArchiveError(f"{source} is refused: {error}. Only load files from people you trust.") from error
    except AmpError:
        raise
    except OSError:
        raise
    except Exception as error:  # torch's reader raises many kinds of errors on a damaged file
        raise ArchiveError(
            f"{source} cannot be read: {first_line(error, named=True, limit=200)} It is damaged, or {made} wrote "
            f"something that torch {torch.__version__} does not know: write it again with save()."
        ) from error
    return program, details, StoredFp32Form(texts[FP32])


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
        raise ArchiveError(f"{source}: its {DETAILS} is damaged ({type(error).__name__}: {error}).") from error
