"""Files that are not plain text: archives of one file, Parquet, and Excel workbooks."""

import gzip
import io
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posterity.datasets.fields import MISSING
from posterity.datasets.frames import Frame, array_of, frame_of, framed
from posterity.datasets.shard_files import MAGIC
from posterity.errors import BadData, shown

_ZIP, _PARQUET, _OLD_EXCEL = b"PK\x03\x04", b"PAR1", b"\xd0\xcf\x11\xe0"
_WORKBOOK = "xl/workbook.xml"


class Sheet(NamedTuple):
    """Typed columns of a file, the row on which each value stands (N,), and sentences about what was decided."""

    frame: Frame
    lines: Any
    notes: tuple[str, ...] = ()


def unpacked(data: bytes, path: Path) -> bytes:
    """Return the content of a gzip or zip archive of one file, and other data as they are."""
    try:
        if data.startswith(b"\x1f\x8b"):
            return gzip.decompress(data)
        if not data.startswith(_ZIP):
            return data
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if _WORKBOOK in archive.namelist():
                return data
            names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
            if len(names) == 1:
                return archive.read(names[0])
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise BadData(f"{path}: cannot be unpacked: {reason}. Unpack it by other means, or get it again.") from error
    raise BadData(f"{path}: the archive must have one file. Got {len(names)}: {shown(names)}. Unpack it, and name one.")


def typed_sheet(data: bytes, path: Path, header: bool | None) -> Sheet | None:
    """Return the columns of a Parquet file or an Excel workbook; None for other data."""
    if data.startswith(_PARQUET):
        return _parquet(data, path)
    if data.startswith(_ZIP):
        return _workbook(data, path, header is not False)
    if data.startswith(_OLD_EXCEL):
        raise BadData(f"{path}: not a text file but an old spreadsheet. Export it as CSV or .xlsx.")
    if kind := next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), None):
        raise BadData(
            f"{path}: not a text file but of the kind {kind}. Write it as Parquet or CSV. In a program "
            "posterity.datasets.read_shards reads it."
        )
    return None


def _parquet(data: bytes, path: Path) -> Sheet:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(pa.BufferReader(data))
        table.validate(full=True)  # such as strings in UTF-8
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise BadData(f"{path}: not a Parquet file that can be read: {reason}. Get it again.") from error
    return Sheet(frame_of(table, path), np.arange(len(table)))


def _workbook(data: bytes, path: Path, header: bool) -> Sheet:
    try:
        import openpyxl
    except ImportError as error:
        raise BadData(
            f"{path}: a spreadsheet, which is read by openpyxl. Install it (pip install 'posterity[excel]'), or export "
            "the sheet as CSV."
        ) from error
    try:
        book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        sheet = book.worksheets[0]
        cells = [[_cell(value) for value in row] for row in sheet.iter_rows(values_only=True)]
    except Exception as error:  # openpyxl raises what its parsers raise
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise BadData(f"{path}: not a spreadsheet that can be read: {reason}. Export the sheet as CSV.") from error
    rows = [(line, row) for line, row in enumerate(cells, start=1) if any(value is not None for value in row)]
    width = max((place for _, row in rows for place, value in enumerate(row, start=1) if value is not None), default=0)
    if width < 2 or len(rows) <= header:
        raise BadData(f"{path}: the sheet {shown(sheet.title)} needs two columns, their names, and rows.")
    notes = [f"The first of {len(book.worksheets)} sheets, {shown(sheet.title)}, was read."] * (
        len(book.worksheets) > 1
    )
    names: list[str | None] = [None] * width
    if header:
        (line, first), *rows = rows
        names = [f"x{place}" if name is None else str(name) for place, name in enumerate(first[:width], start=1)]
        names += [f"x{place}" for place in range(len(names) + 1, width + 1)]
        if not any(isinstance(name, str) for name in first):
            raise BadData(f"{path}: row {line} must name the columns. If it is data, say so (--no-header).")
    columns = [array_of([row[place] if place < len(row) else None for _, row in rows]) for place in range(width)]
    return Sheet(framed(names, columns, path), np.array([line for line, _ in rows]), tuple(notes))


def _cell(value: Any) -> Any:
    """Return the value of a cell; None for text that marks a missing value."""
    if not isinstance(value, str):
        return value
    value = value.strip()
    return None if value in MISSING else value
