"""Any ``torch.export`` archive, a converted model's or a plain one's, read without running code that is in it."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import torch

from ..capture import program as programs
from ..common.errors import AmpError, ArchiveError
from .archive import DETAILS, load_converted
from .converted import ConvertedModel
from .safety import Unsafe, check_members, check_program


def load_any(path: str | os.PathLike[str]) -> ConvertedModel | torch.export.ExportedProgram:
    """What a ``.pt2`` holds: a converted model if ``ConvertedModel.save`` wrote it, else the exported program."""
    source = Path(path)
    try:
        with open(source, "rb") as file:
            with zipfile.ZipFile(file) as archive:
                if any(name.endswith(f"/extra/{DETAILS}") for name in archive.namelist()):
                    return load_converted(source)
                check_members(archive, ())
                graph, sample = programs.parts(archive)
                check_program(graph)
            file.seek(0)
            return programs.load(file, graph, sample)
    except OSError as error:
        raise ArchiveError(f"The file {source} cannot be read: {error.strerror or error}.") from error
    except zipfile.BadZipFile as error:
        hint = f" For a model in that file write {source}:name." if source.suffix == ".py" else ""
        raise ArchiveError(f"{source} is no torch.export archive, or it is cut off: {error}.{hint}") from error
    except Unsafe as error:
        raise ArchiveError(f"{source} is refused: {error}. It could run code when it is loaded.") from error
    except AmpError:
        raise
    except Exception as error:  # torch's reader gives many kinds of errors on a damaged or foreign file
        first = (str(error).strip().splitlines() or [""])[0][:200]
        raise ArchiveError(
            f"{source} is no program of torch.export, or it is damaged: {type(error).__name__}: {first}"
        ) from error
