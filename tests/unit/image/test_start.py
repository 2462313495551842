"""What an image's start reads, derived from its command, against what programs of this
machine really load."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from support.programs import SHELL, LayerTar, add_shell, linked

from btrfs_ublk.image.start.bounded import bounded_ranges
from btrfs_ublk.image.start.elf import read_elf
from btrfs_ublk.image.start.programs import Range, command_ranges
from btrfs_ublk.units import KIB, MIB

TIMEOUT_S = 60.0


@pytest.fixture
def layer(tmp_path: Path) -> LayerTar:
    return LayerTar(tmp_path / "layer.tar.gz")


def real(path: Path) -> str:
    return str(path.resolve()).lstrip("/")


def ranges(work: Path, *layers: Path, **config: object) -> list[Range]:
    return command_ranges(layers, {"config": config}, work)


def paths(found: list[Range]) -> list[str]:
    return [each.path for each in found]


def test_a_program_comes_with_its_linker_and_libraries(
    tmp_path: Path, layer: LayerTar
) -> None:
    add_shell(layer)
    layer.file("etc/other", b"other" * 1000)
    found = ranges(tmp_path, layer.close(), Cmd=["sh", "-c", "true"])
    wanted = {SHELL, *linked(SHELL), Path("/etc/ld.so.cache")}
    assert set(paths(found)) == {real(x) for x in wanted}
    assert found[0] == Range(real(SHELL), 0, SHELL.stat().st_size)


@pytest.mark.thorough
def test_a_program_may_be_above_many_others(tmp_path: Path, layer: LayerTar) -> None:
    text = b"#" * (512 * KIB)
    for number in range(513):
        layer.file(f"lib/{number}.py", text)
    add_shell(layer)
    upper = LayerTar(tmp_path / "upper.tar.gz")
    upper.file("start", b"#!/bin/sh\necho it runs\n")
    found = paths(ranges(tmp_path, layer.close(), upper.close(), Cmd=["/start"]))
    assert {"start", real(SHELL)} <= set(found)


@pytest.mark.parametrize(
    "config",
    [
        {"Entrypoint": ["/start"]},
        {"Entrypoint": ["/bin/sh", "-c", "exec /start"]},
        {"Cmd": ["start"], "Env": ["PATH=/none:/"]},
        {"Cmd": ["./start"], "WorkingDir": "/"},
        {"Entrypoint": ["/bin/sh"], "Cmd": ["/hard"]},
    ],
)
def test_scripts_come_with_what_runs_them(
    tmp_path: Path, layer: LayerTar, config: dict[str, object]
) -> None:
    add_shell(layer)
    layer.file("start", b"#!/bin/sh\necho it runs\n")
    layer.link("hard", "start", tarfile.LNKTYPE)
    found = paths(ranges(tmp_path, layer.close(), **config))
    assert {"start", real(SHELL), *map(real, linked(SHELL))} <= set(found)


def test_a_later_layer_decides(tmp_path: Path) -> None:
    lower, upper = LayerTar(tmp_path / "lower.tar"), LayerTar(tmp_path / "upper.tar")
    for name in ("gone", "kept", "opaque/below", "opaque/again", "replaced"):
        lower.file(name, b"#!/missing\n" + name.encode())
    upper.file(".wh.gone")
    upper.file("opaque/above", b"#!/missing\n")
    upper.file("opaque/again", b"#!/missing\n")
    upper.file("opaque/.wh..wh..opq")
    upper.link("replaced", "kept")
    layers = lower.close(), upper.close()
    words = ["/gone", "/opaque/below", "/opaque/above", "/opaque/again", "/replaced"]
    assert paths(ranges(tmp_path, *layers, Cmd=words)) == [
        *("opaque/above", "opaque/again", "kept")
    ]


def test_of_large_programs_only_parts_come_first(
    tmp_path: Path, layer: LayerTar
) -> None:
    data = SHELL.read_bytes() + bytes(30 * MIB)
    layer.file("large", data)
    found = ranges(tmp_path, layer.close(), Cmd=["/large"])
    assert 0 < sum(each.length for each in found) < 8 * MIB
    elf = read_elf(data)
    assert elf is not None
    assert any(x.offset <= elf.entry < x.offset + x.length for x in found)
    for segment in (each for each in elf.segments if each.writable):
        assert Range("large", segment.offset, segment.length) in found
    assert found[0] == Range("large", 0, MIB)


def test_python_comes_with_what_it_imports(tmp_path: Path, layer: LayerTar) -> None:
    program = Path(os.path.realpath(sys.executable))
    library = Path(sysconfig.get_path("stdlib"))
    if library.parents[1] != program.parents[1]:
        pytest.skip(f"{program} has its library in {library}")
    code = "import json, ssl, sqlite3, email.message"
    shown = (
        "; import sys; found = [x.__spec__ for x in sys.modules.values()]; "
        "print(*(x.origin for x in found if x and x.has_location), sep='\\n')"
    )
    said = subprocess.run(
        [program, "-I", "-S", "-c", code + shown],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    paths_said = [Path(x) for x in said.stdout.split() if x.startswith(str(library))]
    imported = [x for x in paths_said if x.stat().st_size]
    assert len(imported) > 50
    layer.take(program, *linked(program), *library.glob("*.py"))
    layer.take(*library.glob("lib-dynload/*.so"))
    for package in ("json", "sqlite3", "email", "encodings", "re", "collections"):
        layer.take(*(library / package).glob("*.py"))
    for path in imported:
        layer.take(path)
    layer.take(*library.glob("*/__init__.py"))
    found = paths(ranges(tmp_path, layer.close(), Cmd=[str(program), "-c", code]))
    missed = {real(x) for x in imported} - set(found)
    assert not missed
    # What would do no harm if it were there, but is not what a start reads.
    assert len(found) < 2 * len(imported)
    assert not [x for x in found if x.endswith(("/smtplib.py", "/imaplib.py"))]


def test_compiled_modules_come_instead_of_their_sources(
    tmp_path: Path, layer: LayerTar, recwarn: pytest.WarningsRecorder
) -> None:
    add_shell(layer)
    layer.take(*linked(SHELL))
    layer.file("usr/bin/python3.9", SHELL.read_bytes())
    home = "usr/lib/python3.9"
    layer.file(f"{home}/site.py", b"import one\nfrom two import three\n")
    layer.file(f"{home}/one.py", b"def f():\n    import five\n")
    layer.file(f"{home}/__pycache__/one.cpython-39.pyc", b"compiled")
    layer.file(f"{home}/two/__init__.py", b"from . import four\n")
    layer.file(f"{home}/two/three.py", b"import no_such_module\nimport two.three\n")
    layer.file(f"{home}/two/four.py", b"-" * 100_000 + b"this is no Python")
    layer.file(f"{home}/five.py", b"pass")
    layer.file(f"{home}/lib-dynload/six.cpython-39-x86_64-linux-gnu.so", b"none")
    layer.file("app/main.py", b"'\\d'\nimport six, beside, deep\n")
    layer.file("app/beside.py", b"1")
    layer.file("app/deep.py", b"-" * 20_000 + b"1")
    found = ranges(
        tmp_path,
        layer.close(),
        Entrypoint=["python3.9", "-W", "ignore", "main.py"],
        WorkingDir="/app",
    )
    modules = [x for x in paths(found) if x.startswith((home, "app/"))]
    assert sorted(x.removeprefix(f"{home}/") for x in modules) == [
        "__pycache__/one.cpython-39.pyc",
        "app/beside.py",
        "app/deep.py",
        "app/main.py",
        "lib-dynload/six.cpython-39-x86_64-linux-gnu.so",
        "site.py",
        "two/__init__.py",
        "two/four.py",
        "two/three.py",
    ]
    assert not recwarn.list


def test_modules_are_those_that_python_would_take(
    tmp_path: Path, layer: LayerTar
) -> None:
    layer.file("usr/bin/python3.11", SHELL.read_bytes())
    home, there = "usr/lib/python3.11", "app"
    compiled = ".cpython-311-x86_64-linux-gnu.so"
    layer.file(f"{home}/os.py", b"import stat")  # the program has both in itself
    layer.file(f"{home}/stat.py", b"1")
    layer.file(f"{home}/site.py", b"import os")
    # A directory without __init__ is a package only where nothing else has the name.
    layer.file(f"{there}/one/__init__.py", b"def __getattr__(name): pass\n")
    layer.file(f"{there}/one/core/hint.pyi", b"1")
    layer.file(f"{there}/one/core{compiled}", b"none")
    layer.file(f"{there}/one/core.py", b"import one.source_of_core")
    layer.file(f"{there}/one/source_of_core.py", b"1")
    layer.file(f"{there}/one/lazy.py", b"1")
    layer.file(f"{there}/one/unused.py", b"1")
    layer.file(f"{there}/space/inner.py", b"1")
    layer.file(f"{there}/tested.py", b"1")
    layer.file(
        f"{there}/main.py",
        b"import one as o, one.core, space.inner\nKIND: type = int | o.lazy.Kind\n"
        b"def f(): return o.unused\nif __name__ == '__main__': import tested\n",
    )
    layer.file(f"{there}/run.py", b"import main")
    words = ["python3.11", "/app/run.py"]
    found = paths(ranges(tmp_path, layer.close(), Cmd=words))
    assert sorted(x for x in found if x.startswith((home, "app/"))) == [
        "app/main.py",
        "app/one/__init__.py",
        f"app/one/core{compiled}",
        "app/one/lazy.py",
        "app/run.py",
        "app/space/inner.py",
    ]


def test_a_virtual_environment_has_its_modules(tmp_path: Path, layer: LayerTar) -> None:
    layer.file("usr/bin/python3.9", SHELL.read_bytes())
    layer.file("usr/lib/python3.9/site.py", b"1")
    layer.link("venv/bin/python", "/usr/bin/python3.9")
    layer.file("venv/pyvenv.cfg", b"home = /usr/bin\n")
    layer.file("venv/lib/python3.9/site-packages/app/__init__.py", b"import app.more")
    layer.file("venv/lib/python3.9/site-packages/app/more.py", b"1")
    layer.file("venv/bin/app", b"#!/venv/bin/python\nfrom app import main\n")
    path = layer.close()
    found = paths(ranges(tmp_path, path, Cmd=["app"], Env=["PATH=/venv/bin"]))
    assert found == [
        "venv/bin/app",
        "usr/bin/python3.9",
        "usr/lib/python3.9/site.py",
        "venv/lib/python3.9/site-packages/app/__init__.py",
        "venv/lib/python3.9/site-packages/app/more.py",
    ]


def test_java_comes_with_its_machine_and_its_jars(
    tmp_path: Path, layer: LayerTar
) -> None:
    home, large = "opt/jvm", bytes(17 * MIB)
    add_shell(layer)
    layer.file(f"{home}/bin/java", SHELL.read_bytes())
    layer.file(f"{home}/lib/server/libjvm.so", SHELL.read_bytes() + large)
    layer.file(f"{home}/lib/server/classes.jsa", large)
    layer.file(f"{home}/lib/modules", large)
    layer.file(f"{home}/lib/libawt.so", SHELL.read_bytes())
    layer.link("usr/bin/java", f"/{home}/bin/java")
    for name in ("app/main.jar", "app/lib/one.jar", "app/lib/two.txt", "other.jar"):
        layer.file(name, large if "main" in name else b"jar")
    words = ["java", "-cp", "main.jar:lib/*", "Main"]
    found = ranges(tmp_path, layer.close(), Cmd=words, WorkingDir="/app")
    taken = {x for x in found if x.path.startswith((home, "app", "other"))}
    assert taken == {
        Range(f"{home}/bin/java", 0, SHELL.stat().st_size),
        Range(f"{home}/lib/server/libjvm.so", 0, SHELL.stat().st_size + len(large)),
        Range(f"{home}/lib/server/classes.jsa", 0, len(large)),
        Range(f"{home}/lib/modules", 0, MIB),
        Range("app/main.jar", 0, MIB),
        Range("app/main.jar", 16 * MIB, MIB),
        Range("app/lib/one.jar", 0, 3),
    }


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"config": None},
        {"config": {"Cmd": None, "Entrypoint": "sh"}},
        {"config": {"Cmd": [1, "", "-x", "/", "..", "loop", "none", "a\0b"]}},
        {"config": {"Cmd": ["loop"], "Env": [3, "PATH"], "WorkingDir": ["/"]}},
    ],
    ids=json.dumps,
)
def test_nothing_comes_of_commands_that_name_nothing(
    tmp_path: Path, layer: LayerTar, config: dict[str, object] | None
) -> None:
    layer.link("loop", "pool")
    layer.link("pool", "loop")
    layer.file("script", b"#!" + b"/script" * 10)
    assert command_ranges([layer.close()], config or {}, tmp_path) == []


def test_scripts_that_run_each_other_end(tmp_path: Path, layer: LayerTar) -> None:
    layer.file("one", b"#!/two" + b" /two" * 40 + b"\n")
    layer.file("two", b"#!/one" + b" /one" * 40 + b"\n")
    found = ranges(tmp_path, layer.close(), Cmd=["/one"])
    assert sorted(set(paths(found))) == ["one", "two"]


def test_layers_and_programs_that_are_cut_off_cost_nothing_else(
    tmp_path: Path, layer: LayerTar
) -> None:
    shell = SHELL.read_bytes()
    for length in (4, 16, 60, 100, 2000, len(shell) - 1):
        read_elf(shell[:length])
    changed = bytearray(shell)
    for at in range(16, 1024):
        changed[at] ^= 0xFF
        read_elf(bytes(changed))
        changed[at] ^= 0xFF
    add_shell(layer)
    path = layer.close()
    path.write_bytes(path.read_bytes()[:100_000])
    assert ranges(tmp_path, path, Cmd=["sh"]) == []


def test_layers_that_cost_too_much_have_nothing_come_first(
    tmp_path: Path, layer: LayerTar, caplog: pytest.LogCaptureFixture
) -> None:
    layer.file("script", b"echo")
    config = {"config": {"Cmd": ["script"], "Env": ["PATH=/"]}}
    path = layer.close()
    assert bounded_ranges([path], config, tmp_path, timeout_s=0.001) == []
    assert "did not end within 0.001 s" in caplog.text
    long = LayerTar(tmp_path / "long.tar.gz")
    for number in range(10):  # a directory for each part of a name
        long.file(f"{number}" + "/a" * 30_000)
    assert bounded_ranges([long.close()], config, tmp_path) == []
    assert "MemoryError" in caplog.text
    assert bounded_ranges([path], config, tmp_path) == [Range("script", 0, 4)]
