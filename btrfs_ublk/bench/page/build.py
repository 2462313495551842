"""The whole page: chapters in sections by machine, the summary, and the HTML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

import btrfs_ublk
from btrfs_ublk.bench.config import configuration_of
from btrfs_ublk.bench.environment import QUIET_CORES
from btrfs_ublk.bench.page.comparisons import Block, comparison_blocks
from btrfs_ublk.bench.page.inputs import (
    BUSY_LOAD,
    Data,
    DocumentData,
    MatrixData,
    how_real,
    labels_of,
    machine_key,
    naming,
)
from btrfs_ublk.bench.page.lead import Question, questions
from btrfs_ublk.bench.page.matrices import matrix_blocks
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.new_file import write_new
from btrfs_ublk.units import format_size

#: Keys of a matrix' first line that are not options.
_NOT_ASKED = ("kind", "version", "fingerprint", "configurations")


@dataclass(frozen=True)
class Chapter:
    """Everything of one file in one environment."""

    data: Data
    anchor: str
    title: str
    compared: str
    labels: Sequence[str]
    #: The program that made the file, and its parameters.
    made_by: tuple[str, str]
    blocks: Sequence[Block]


class Section(NamedTuple):
    """A section of one machine."""

    anchor: str
    labels: Sequence[str]
    record: Any
    chapters: Sequence[Chapter]


class Page(NamedTuple):
    """What is asked first, and all results by machine."""

    questions: Sequence[Question]
    sections: Sequence[Section]

    @property
    def winners(self) -> set[str]:
        return {
            panel.verdict.winner for each in self.questions for panel in each.panels
        }

    @property
    def chapters(self) -> list[Chapter]:
        return [chapter for section in self.sections for chapter in section.chapters]


def _made_by(data: Data) -> tuple[str, str]:
    """Return the program that made a file, and its parameters."""
    guest = (data.record or {}).get("guest")
    where = f"scripts/vm {'--icount ' * (guest == 'icount')}-- " if guest else ""
    program = f"btrfs-ublk bench {data.benchmark}"
    if isinstance(data, MatrixData):
        asked = data.header or {}
    else:
        asked = data.document["parameters"]
        if data.benchmark != "compare":
            module = f"btrfs_ublk.bench.{data.benchmark}"
            known = data.benchmark.isidentifier() and find_spec(module) is not None
            kept = f"python -m {module}" if known else "a program that is not kept"
            program = str(data.document.get("script", kept))
    told = []
    for key, value in asked.items():
        values = [x for x in (value if isinstance(value, list) else [value]) if x]
        if key not in _NOT_ASKED and not any(
            isinstance(x, dict | list) for x in values
        ):
            told += [f"{key} {' '.join(map(str, values))}"] * bool(values)
    return f"{where}{program}", ", ".join(told)


def build(inputs: Sequence[Data]) -> Page:
    """Build the page; a pure function. Raises UsageError."""
    taken = {"short", "contents", "repeat"}
    machines = grouped(inputs, _key).values()
    sections: list[Section] = []
    for its in sorted(machines, key=lambda each: how_real(each[0])):
        chapters = [_chapter(data, taken) for data in sorted(its, key=_rank)]
        first = chapters[0]
        labels = [label for label in first.labels if label != "interrupted"]
        anchor = f"machine-{len(sections) + 1}"
        sections.append(Section(anchor, labels, first.data.record, chapters))
    found = [
        (chapter.data, chapter.anchor)
        for section in sections
        for chapter in section.chapters
        if isinstance(chapter.data, DocumentData)
    ]
    return Page(questions(found), sections)


def _key(data: Data) -> object:
    with naming(data.name):
        return machine_key(data)


def _rank(data: Data) -> int:
    """Order files: comparisons with others come first."""
    return {"compare": 0, "matrix": 1}.get(data.benchmark, 2)


def _chapter(data: Data, taken: set[str]) -> Chapter:
    word = re.sub(r"[^a-z0-9]+", "-", Path(data.name).stem.lower()).strip("-")[:40]
    word = word if word[:1].isalpha() else f"r-{word}"
    others = (f"{word}-{number}" for number in count(2))
    anchor = next(each for each in chain([word], others) if each not in taken)
    taken.add(anchor)
    with naming(data.name):
        title, compared, blocks = _content(data)
        return Chapter(
            data, anchor, title, compared, labels_of(data), _made_by(data), blocks
        )


def _content(data: Data) -> tuple[str, str, list[Block]]:
    """Return the title, what was compared, and blocks."""
    if isinstance(data, MatrixData):
        title = f"Matrix {data.header['matrix']}" if data.header else "Runs"
        count = len({configuration_of(row) for row in data.rows})
        told = f"{count} configurations, {len(data.rows)} runs"
        return title, told, matrix_blocks(data)
    if data.benchmark == "compare":
        parameters = data.document["parameters"]
        peers, workloads = (
            dict.fromkeys(
                str(x) for each in parameters["comparisons"] for x in each[key]
            )
            for key in ("peers", "workloads")
        )
        told = f"{', '.join(peers)}; {', '.join(list(workloads)[:6])}"
        told += f" and {len(workloads) - 6} more" if len(workloads) > 6 else ""
        scale = (parameters.get("scale") or {}).get("factor", 1)
        told += f"; scaled down to {scale:g} of what was published" * (scale != 1)
        suite = parameters.get("suite")
        title = f"Suite {suite}" if suite else "Comparison"
        return title, told, comparison_blocks(data)
    title = re.sub("[-_]", " ", data.benchmark).capitalize()
    told = f"{data.name}, {len(data.document['results'])} results"
    return title, told, [Block("", tables=data.tables)]


def render(page: Page, *, command: str) -> str:
    """Render HTML. All text from files is escaped, and a policy in the page forbids it
    to run or fetch anything.
    """
    environment = Environment(
        autoescape=True, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["size"] = lambda value: format_size(int(value))
    source = files(__package__)
    return environment.from_string((source / "page.html").read_text("utf-8")).render(
        page=page,
        command=command,
        version=btrfs_ublk.__version__,
        style=Markup((source / "page.css").read_text("utf-8")),
        busy={"cores": QUIET_CORES, "load": f"{BUSY_LOAD:g}"},
    )


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely, or leave the old one. Raises BtrfsUblkError."""
    try:
        write_new(path, content, replace=True, synced=True)
    except OSError as error:
        raise BtrfsUblkError(f"{path} cannot be written: {error.strerror}") from error
