"""What fuzzers look at, in a short form: scripts/torture fuzz does it by the million.

Each target of tests/campaigns/fuzz.py runs with any compiler, on inputs that are made
at random from its corpus, which also has each input that has failed once.
"""

import subprocess
from pathlib import Path

import pytest
from fuzz import CORPORA, LIBFUZZER, TARGETS, unpack_corpus
from support.needs import Need
from support.paths import PROJECT
from support.sanitized_build import run_sanitized

#: They have tests of their own, on more objects.
OTHERS = {"codec": "c/codec/test_codec.py", "tar": "c/image/test_sources.py"}
OTHERS |= {"reader": "c/btrfs/test_inspect.py"}
TIMEOUT_S = 250


@pytest.mark.parametrize("name", sorted(set(TARGETS) - set(OTHERS)))
def test_random_inputs(sanitized_build: Path, tmp_path: Path, name: str) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    unpack_corpus(name, corpus)
    target = TARGETS[name]
    words: list[str | Path] = ["--iterations", str(target.quick)]
    if any(corpus.iterdir()):
        words += ["--corpus", corpus]
    if target.subjects:
        words += target.subjects(tmp_path)
    run_sanitized(sanitized_build / f"csrc/tests/fuzz-{name}", *words)


def test_all_targets_are_fuzzed() -> None:
    programs = {path.stem for path in (PROJECT / "csrc/tests").glob("fuzz-*.c")}
    assert programs == {f"fuzz-{name}" for name in TARGETS}
    assert {path.name for path in CORPORA.iterdir()} <= set(TARGETS)
    for name, test in OTHERS.items():
        assert f"fuzz-{name}" in (PROJECT / "tests" / test).read_text()


def test_with_libfuzzer(need: Need, tmp_path: Path) -> None:
    need(LIBFUZZER)
    done = subprocess.run(
        [str(PROJECT / "scripts/torture"), "fuzz", "head", "--executions=2000"]
        + ["--seed=3", f"--corpus={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "fuzz: 2000 rounds with seed 3" in done.stderr
