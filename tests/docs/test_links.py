"""The Markdown files: their links lead somewhere, and they are of one spelling."""

import functools
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.paths import PROJECT

_FENCED = re.compile(r"^(```|~~~).*?^\1[`~]*$", re.M | re.S)
_LINK = re.compile(
    r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\)"
)
#: `<a href>`, `<img src>` and `<source srcset>` of the few places with HTML.
_ATTRIBUTE = re.compile(r"\b(?:href|src|srcset)=\"([^\"]+)\"")
#: Parts of words as they are not spelt here.
_NOT_BRITISH = re.compile(
    r"\w*(?:materializ|behavior|\bcolor|optimiz|organiz|initializ|serializ|randomiz|"
    r"recogniz|synchroniz|summariz|virtualiz|minimiz|maximiz|\bcenter|normaliz|"
    r"neighbor|favor|honor|catalog\b|labeled|canceled)\w*",
    re.I,
)


@functools.cache
def _documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    names = listed.stdout.splitlines()
    if listed.returncode:  # unpacked from an archive
        names = [str(x.relative_to(PROJECT)) for x in PROJECT.glob("docs/**/*.md")]
        names += ["README.md", "HACKING.md"]
    return [PROJECT / name for name in names if (PROJECT / name).exists()]


def _name(path: Path) -> str:
    return str(path.relative_to(PROJECT))


def _links(text: str) -> list[str]:
    plain = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", text))
    return _LINK.findall(plain) + _ATTRIBUTE.findall(plain)


@functools.cache
def _anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, words joined by hyphens."""
    text = path.read_text()
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", _FENCED.sub("", text), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        base = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        name, count = base, 0
        while name in found:
            count += 1
            name = f"{base}-{count}"
        found.add(name)
    return found


@pytest.mark.parametrize("document", _documents(), ids=_name)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in _links(document.read_text()):
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or PROJECT not in target.parents:
            broken.append(f"{link}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in _anchors(target):
            broken.append(f"{link}: no such heading; there are {_anchors(target)}")
    assert not broken


@pytest.mark.parametrize("document", _documents(), ids=_name)
def test_it_is_spelt_as_the_rest(document: Path) -> None:
    prose = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", _FENCED.sub("", document.read_text()))
    assert not _NOT_BRITISH.findall(prose)


def test_all_name_one_version() -> None:
    """The package, its metadata, the build, and the newest release of the changelog."""
    places = {
        "btrfs_ublk/__init__.py": r'^__version__ = "(.+)"$',
        "pyproject.toml": r'^version = "(.+)"$',
        "meson.build": r"^  version: '(.+)',$",
        "CHANGELOG.md": r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$",
    }
    found = {
        name: re.findall(pattern, (PROJECT / name).read_text(), re.M)[:1]
        for name, pattern in places.items()
    }
    assert len({*map(tuple, found.values())}) == 1, found


def test_every_document_is_in_the_index() -> None:
    """docs/README.md is the map: what it does not name is not found."""
    index = PROJECT / "docs" / "README.md"
    named = {
        (index.parent / link.partition("#")[0]).resolve()
        for link in _links(index.read_text())
        if "://" not in link
    }
    missing = [
        _name(path)
        for path in _documents()
        if path.is_relative_to(index.parent) and path != index and path not in named
    ]
    assert not missing


def test_code_that_is_named_exists() -> None:
    """`tests/…`, `csrc/…`: paths in the text are of files that there are."""
    missing = []
    for document in _documents():
        prose = _FENCED.sub("", document.read_text())
        for path in re.findall(
            r"`((?:csrc|btrfs_ublk|tests|scripts)/[\w/.-]+)`", prose
        ):
            if not (PROJECT / path).exists():
                missing.append(f"{_name(document)}: {path}")
    assert not missing


def test_tests_that_are_named_exist() -> None:
    """Claims name their tests: these must not have gone, or changed their names."""
    tests = "".join(x.read_text() for x in (PROJECT / "tests").rglob("*.py"))
    missing = [
        f"{_name(document)}: {name}"
        for document in _documents()
        for name in re.findall(r"`(test_\w+)`", document.read_text())
        if f"def {name}(" not in tests
    ]
    assert not missing


@pytest.mark.parametrize("document", _documents(), ids=_name)
def test_no_conflict_is_left(document: Path) -> None:
    """What a merge leaves reads as text."""
    assert not re.findall(r"^(?:<{7} |>{7} |={7}$)", document.read_text(), re.M)


def test_all_variables_of_the_environment_are_told_of() -> None:
    told = (PROJECT / "docs/reference/environment.md").read_text()
    read = set()
    for path in (*PROJECT.glob("btrfs_ublk/**/*.py"), *PROJECT.glob("csrc/**/*.c")):
        read |= set(re.findall(r'"(BTRFS_UBLK_[A-Z_]+)["=]', path.read_text()))
    assert read and not [name for name in sorted(read) if f"`{name}`" not in told]
