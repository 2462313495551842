"""The whole page: chapters in sections by machine, pictures, the summary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from btrfs_ublk.bench.page.documents import chapter_of, naming
from btrfs_ublk.bench.page.drawing import draw
from btrfs_ublk.bench.page.inputs import Data, MatrixData
from btrfs_ublk.bench.page.labels import (
    BUSY,
    INCOMPLETE,
    Label,
    labels_of,
    machine_details,
    machine_key,
    machine_title,
)
from btrfs_ublk.bench.page.published import PUBLISHED, Published
from btrfs_ublk.bench.page.shapes import Block, Chapter, Finding, Plot
from btrfs_ublk.bench.page.sheet import settings
from btrfs_ublk.bench.page.svg import Picture, picture
from btrfs_ublk.bench.stats import grouped

#: Of the summary, and of any one file in it.
_MOST_FINDINGS, _MOST_OF_ONE = 12, 2
#: Below minus this, the weight of a finding says that others are to be told first.
_MINOR = 50.0


@dataclass(frozen=True)
class ShownPlot:
    plot: Plot
    picture: Picture


@dataclass(frozen=True)
class ShownBlock:
    block: Block
    plots: Sequence[ShownPlot]


@dataclass(frozen=True)
class ShownChapter:
    chapter: Chapter
    anchor: str
    blocks: Sequence[ShownBlock]


@dataclass(frozen=True)
class Section:
    """One machine."""

    title: str
    anchor: str
    labels: Sequence[Label]
    details: Sequence[tuple[str, str]]
    chapters: Sequence[ShownChapter]


@dataclass(frozen=True)
class Page:
    sections: Sequence[Section]
    findings: Sequence[Finding]
    published: Sequence[Published]

    @property
    def pictures(self) -> list[Picture]:
        return [
            plot.picture
            for section in self.sections
            for chapter in section.chapters
            for block in chapter.blocks
            for plot in block.plots
        ]

    @property
    def count_text(self) -> str:
        """ "3 sets of results from 2 environments" """
        sets = sum(len(section.chapters) for section in self.sections)
        places = len(self.sections)
        return (
            f"{sets} {'set' if sets == 1 else 'sets'} of results from "
            f"{places} {'environment' if places == 1 else 'environments'}"
        )

    @property
    def labels(self) -> list[Label]:
        """All that are used, once each."""
        of_all = (
            label
            for section in self.sections
            for shown in section.chapters
            for label in shown.chapter.labels
        )
        return list(dict.fromkeys(of_all))


def build(inputs: Sequence[Data], *, png: bool = False) -> Page:
    """Pure, and slow: a tenth of a second for each plot, twice that with PNG.

    Raises UsageError.
    """
    sections = []
    findings: list[list[Finding]] = []
    taken: set[str] = set()
    with settings():
        for number, its in enumerate(grouped(inputs, _machine).values(), start=1):
            first = min(its, key=_rank)
            chapters = []
            for data in sorted(its, key=_rank):
                with naming(data):
                    shown = _shown_chapter(data, taken, png)
                chapters.append(shown)
                findings.append(_told(shown.chapter, shown.anchor))
            with naming(first):
                details = () if first.record is None else machine_details(first.record)
            sections.append(
                Section(
                    title=machine_title(first.record),
                    anchor=f"machine-{number}",
                    labels=[x for x in labels_of(first) if x is not INCOMPLETE],
                    details=details,
                    chapters=chapters,
                )
            )
    return Page(sections, _chosen(findings), _published(sections))


def _machine(data: Data) -> tuple[object, ...]:
    with naming(data):
        return machine_key(data)


def _shown_chapter(data: Data, taken: set[str], png: bool) -> ShownChapter:
    chapter = chapter_of(data)
    anchor = _anchor(chapter.file, taken)
    return ShownChapter(chapter, anchor, _shown(chapter, anchor, png))


def _rank(data: Data) -> int:
    """What compares comes before what tells of us alone."""
    if isinstance(data, MatrixData):
        return 1
    return 0 if data.benchmark == "compare" else 2


def _anchor(file: str, taken: set[str]) -> str:
    """A word that is nobody else's, also as the name of a file."""
    stem = file.rpartition(".")[0] or file
    word = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "results"
    if not word[0].isalpha():
        word = f"r-{word}"
    found, number = word, 2
    while found in taken:
        found, number = f"{word}-{number}", number + 1
    taken.add(found)
    return found


def _shown(chapter: Chapter, anchor: str, png: bool) -> list[ShownBlock]:
    made = []
    number = 0
    for block in chapter.blocks:
        plots = []
        for plot in block.plots:
            number += 1
            name = f"{anchor}-{number:02}"
            drawn = picture(
                draw(plot),
                name=name,
                title=plot.title,
                description=plot.description,
                png=png,
            )
            plots.append(ShownPlot(plot, drawn))
        made.append(ShownBlock(block, plots))
    return made


def _told(chapter: Chapter, anchor: str) -> list[Finding]:
    ordered = sorted(chapter.findings, key=lambda each: -each.weight)
    return [
        replace(each, anchor=anchor, labels=tuple(chapter.labels))
        for each in ordered[:_MOST_OF_ONE]
    ]


def _chosen(by_file: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Of each kind (see _kind) the first of each file, then the seconds, while there is
    room. A highlight that several files have is told of the first.
    """
    ranked = [
        (_kind(found), rank, file, found)
        for file, its in enumerate(by_file)
        for rank, found in enumerate(its)
    ]
    chosen: list[tuple[int, int, int, Finding]] = []
    told = set()
    for kind, rank, file, found in sorted(ranked, key=lambda each: each[:3]):
        about = (found.headline, found.labels) if kind == 1 else (file, rank)
        if about not in told and len(chosen) < _MOST_FINDINGS:
            told.add(about)
            chosen.append((kind, file, rank, found))
    return [each[3] for each in sorted(chosen, key=lambda each: each[:3])]


def _kind(found: Finding) -> int:
    """What compares us with others is told before what tells of us alone; what a busy
    machine found, and what is not about us, comes last.
    """
    if BUSY in found.labels:
        return 3
    if found.weight < -_MINOR:
        return 2
    return int(found.weight < 0)


def _published(sections: Sequence[Section]) -> list[Published]:
    names = dict.fromkeys(
        name
        for section in sections
        for each in section.chapters
        for name in each.chapter.published
    )
    found = [PUBLISHED[name] for name in names if name in PUBLISHED]
    return list({id(each): each for each in found}.values())
