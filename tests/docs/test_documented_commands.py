"""Every command that a document tells of makes sense, and sessions are replayed."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support.documents import (
    CONTEXTS,
    PROGRAM,
    WrongLine,
    check_command,
    documents,
    lines_of,
)

#: Documents whose blocks of ``console`` are run: test_quick_start.py has the first two,
#: test_transcripts.py the others.
_REPLAYED = ("README.md", "docs/quick-start.md", "docs/how-to/*.md")


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_commands_are_as_the_program_has_them(document: Path) -> None:
    wrong = []
    for line in lines_of(document):
        try:
            check_command(line.words)
        except WrongLine as error:
            wrong.append(f"{line.place}\n  {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_commands_in_sentences_are_known(document: Path) -> None:
    """`btrfs-ublk NOUN VERB …` between backticks: that there are such."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    for text in re.findall(rf"`{PROGRAM} ([^`]+)`", prose):
        if "\\n" in text:
            continue  # that is what a file begins with
        words = re.match(r"[a-z -]*", text.replace("\n", " "))
        assert words is not None
        path = PROGRAM
        for word in words[0].split():
            if word.startswith("-") or f"{path} {word}" not in CONTEXTS:
                break
            path = f"{path} {word}"
        known = path != PROGRAM or not words[0].strip() or text.startswith("-")
        assert known, f"{document.name}: there is no `{PROGRAM} {text}`"


def test_sessions_are_replayed() -> None:
    """A block of ``console`` shows what is printed: a test has to hold it to that."""
    loose = {
        line.document
        for document in documents()
        for line in lines_of(document)
        if line.replayed and not any(fnmatch(line.document, x) for x in _REPLAYED)
    }
    assert not loose
