"""What the page begins with: cold starts, bytes and first writes beside those of peers.

lead.toml says which results of which benchmarks are shown, if a file has them.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from btrfs_ublk.bench.page.charts import Chart, Line, measured_line, ratio_text
from btrfs_ublk.bench.page.inputs import DocumentData, labels_of, naming
from btrfs_ublk.bench.page.measures import Measure, is_number
from btrfs_ublk.bench.stats import grouped, ratio_of

Result = Mapping[str, Any]

_LEAD = tomllib.loads((files(__package__) / "lead.toml").read_text("utf-8"))
_NAMES: Mapping[str, str] = _LEAD["names"]

#: Who wins; nobody where the interval of the ratio has 1, or where there is none.
PEER, EVEN, OURS, UNTOLD = _ORDER = ("peer", "even", "ours", "untold")


class Verdict(NamedTuple):
    """The better one of the best of ours and the best of the peers, the other, and how
    many times as much that takes.
    """

    winner: str
    better: Line
    worse: Line
    ratio: str


@dataclass(frozen=True)
class Panel:
    """One chart of a question, which has a ``name`` that is unique on the page."""

    name: str
    chart: Chart
    #: The anchor of the chapter of its file.
    source: str
    labels: Sequence[str]
    verdict: Verdict


@dataclass(frozen=True)
class Question:
    name: str
    title: str
    text: str
    panels: Sequence[Panel]


def questions(found: Sequence[tuple[DocumentData, str]]) -> list[Question]:
    """Make the questions that some of the files, given with their anchors, answer.
    Panels in which a peer wins come first.
    """
    made = []
    for told in _LEAD["question"]:
        panels = [
            panel
            for each in told["panel"]
            for data, anchor in found
            if data.benchmark == each["benchmark"] and "native" in labels_of(data)
            for panel in _panels(each, data, anchor)
        ]
        panels.sort(key=lambda x: _ORDER.index(x.verdict.winner))
        if panels:
            made.append(Question(told["name"], told["title"], told["text"], panels))
    return made


def _panels(
    told: Mapping[str, Any], data: DocumentData, anchor: str
) -> Iterator[Panel]:
    measure = Measure(told["measure"], "", told["unit"])
    with naming(data.name):
        results = [
            {**result, measure.key: result[measure.key] * told.get("scale", 1)}
            for result in data.document["results"]
            if is_number(result.get(measure.key))
            and all(result.get(k) == v for k, v in told.get("where", {}).items())
        ]
        for part, its in grouped(results, lambda x: x.get(told.get("split"))).items():
            subjects = grouped(its, lambda x: str(x.get("subject", x.get("peer"))))
            wanted = told.get("peers", list(subjects))
            if not set(wanted) <= subjects.keys():
                continue
            title = told["title"]
            if "split" in told:
                title = f"{title} {_NAMES.get(part, part)}"
            named = {_NAMES.get(x, x): subjects[x] for x in wanted}
            if not {_is_ours(name) for name in named} == {True, False}:
                continue
            against = told.get("against", "")
            against = _NAMES.get(against, against)
            chart = _chart(title, named, measure, against)
            name = f"{anchor}--{re.sub('[^a-z0-9]+', '-', title.lower())}"
            labels = labels_of(data)
            yield Panel(name, chart, anchor, labels, _judge(chart, named, measure))


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


def _chart(
    title: str,
    named: Mapping[str, Sequence[Result]],
    measure: Measure,
    against: str,
) -> Chart:
    """Draw the best first."""
    lines = [
        measured_line(
            name,
            [float(x[measure.key]) for x in its],
            measure,
            _is_ours(name),
            (
                ratio_of(its, named.get(against, ()), measure.key)
                if name != against
                else None
            ),
        )
        for name, its in named.items()
    ]
    note = f"×: of {against} in the same turns" if against in named else ""
    lines.sort(key=lambda line: line.middle)
    return Chart(title, f"in {measure.unit}, less is better", lines, note)


def _judge(
    chart: Chart, named: Mapping[str, Sequence[Result]], measure: Measure
) -> Verdict:
    """Compare the best of ours with the best peer, within turns."""
    ours = next(line for line in chart.lines if line.is_ours)
    peer = next(line for line in chart.lines if not line.is_ours)
    better, worse = (ours, peer) if ours.middle <= peer.middle else (peer, ours)
    ratio = ratio_of(named[worse.name], named[better.name], measure.key)
    winner = OURS if better is ours else PEER
    if ratio.low != ratio.low:
        winner = UNTOLD
    elif ratio.low <= 1 <= ratio.high:
        winner = EVEN
    return Verdict(winner, better, worse, ratio_text(ratio))
