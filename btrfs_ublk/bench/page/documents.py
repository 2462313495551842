"""Any benchmark's document as a chapter: its tables, and where it is a comparison or a
matrix, plots and findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from btrfs_ublk.bench.page import comparisons, matrices
from btrfs_ublk.bench.page.inputs import Data, DocumentData, MatrixData
from btrfs_ublk.bench.page.labels import labels_of, software_line
from btrfs_ublk.bench.page.repeat import command_of
from btrfs_ublk.bench.page.shapes import Block, Chapter, Finding
from btrfs_ublk.bench.report import Document, Highlight
from btrfs_ublk.errors import UsageError

#: Below what compares.
_WEIGHT_OF_HIGHLIGHTS = -10.0

#: Title, what was compared, blocks, findings, the name of a published table.
_Parts = tuple[str, str, Sequence[Block], Sequence[Finding], str]


@contextmanager
def naming(data: Data) -> Iterator[None]:
    """Whatever a changed file makes of pure functions becomes a UsageError that names
    the file.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{data.name} does not hold what its benchmark writes: "
            f"{type(error).__name__}: {error}",
            hint="it is of another version, or was changed",
        ) from error


def chapter_of(data: Data) -> Chapter:
    """Raises UsageError, naming the file, for what makes no sense of its kind."""
    with naming(data):
        return _chapter_of(data)


def _chapter_of(data: Data) -> Chapter:
    command, remarks = command_of(data)
    if isinstance(data, MatrixData):
        parts = _matrix(data)
    elif data.benchmark == "compare":
        parts = _comparison(data)
    else:
        parts = _other(data)
    title, compared, blocks, findings, published = parts
    return Chapter(
        title=title,
        file=data.name,
        compared=compared,
        software=software_line(data),
        labels=labels_of(data),
        blocks=blocks,
        findings=findings,
        command=command,
        remarks=remarks,
        published=[published] if published else [],
    )


def _matrix(
    data: MatrixData,
) -> _Parts:
    name = "runs" if data.header is None else f"matrix {data.header['matrix']}"
    configurations = {matrices.configuration_text(row) for row in data.rows}
    compared = (
        f"{len(configurations)} configurations of 4 KiB random reads of a clone, "
        f"{len(data.rows)} runs"
    )
    title = name[:1].upper() + name[1:]
    return title, compared, matrices.blocks(data), matrices.findings(data), "matrix"


def _comparison(
    data: DocumentData,
) -> _Parts:
    parameters = data.document["parameters"]
    suite = parameters.get("suite")
    peers = dict.fromkeys(
        str(peer) for each in parameters["comparisons"] for peer in each["peers"]
    )
    workloads = dict.fromkeys(
        str(name) for each in parameters["comparisons"] for name in each["workloads"]
    )
    compared = f"{', '.join(peers)}; {_some(list(workloads))}"
    title = f"Suite {suite}" if suite else "Comparison"
    scale = (parameters.get("scale") or {}).get("factor", 1)
    if scale != 1:
        compared += f"; scaled down to {scale:g} of what was published"
    contests = list(comparisons.contests(data))
    judgements = comparisons.judgements(contests)
    table = comparisons.ratio_table(judgements)
    blocks = comparisons.blocks(contests)
    if table is not None:
        blocks.insert(0, Block("Ratios", tables=[table]))
    if data.tables:
        blocks.append(Block("All figures", tables=data.tables))
    findings = comparisons.findings(judgements)
    return title, compared, blocks, findings, str(suite or "")


def _some(names: Sequence[str], most: int = 6) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"


def _other(
    data: DocumentData,
) -> _Parts:
    name = data.benchmark.replace("_", " ")
    module = import_module(f"btrfs_ublk.bench.{data.benchmark}")
    tell: Callable[[Document], Sequence[Highlight]] | None
    tell = getattr(module, "highlights", None)
    findings = [
        Finding(each.figure, "", each.headline, each.sentence, _WEIGHT_OF_HIGHLIGHTS)
        for each in (tell(data.document) if tell else ())
    ]
    compared = f"{data.name}, {len(data.document['results'])} results"
    title = name[:1].upper() + name[1:]
    blocks = [Block("", tables=data.tables)]
    return title, compared, blocks, findings, ""
