"""What Python imports before a program does its own work, as its sources say: modules
that functions import are left out."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress

from btrfs_ublk.image.start.tree import Entry, Tree

_PROGRAM = re.compile(r"(python|pypy)(\d+(\.\d+)?)?")
_HOME = re.compile(r"python(\d)\.(\d+)")
#: What each start imports (PyConfig and Py_InitializeFromConfig in the C API).
_ALWAYS = ("encodings", "encodings.aliases", "encodings.utf_8", "site")
#: What the interpreter has in itself, from Python 3.11 on (Python/frozen.c).
_FROZEN = frozenset(
    "_collections_abc _sitebuiltins abc codecs genericpath importlib._bootstrap "
    "importlib._bootstrap_external importlib.machinery importlib.util io ntpath os "
    "posixpath runpy site stat zipimport".split()
)
#: What UTF-8 mode and PEP 538 have the C library read.
_LOCALE = ("usr/lib/locale/C.utf8/LC_CTYPE", "usr/lib/locale/C.UTF-8/LC_CTYPE")
_MAX_MODULES = 4096

Find = Callable[[str], Entry | None]


def is_python(program: Entry) -> bool:
    """Whether a program is an interpreter of Python, by its name."""
    return bool(program.elf and _PROGRAM.fullmatch(program.path.rpartition("/")[2]))


class PythonStart:
    """The modules of an interpreter of a tree. ``path`` is its path as it is given: in
    a virtual environment, a link to the program."""

    def __init__(
        self, tree: Tree, path: str, program: Entry, environment: Mapping[str, str]
    ) -> None:
        self._tree = tree
        self._environment = path.rpartition("/")[0].rpartition("/")[0]
        self._prefix = program.path.rpartition("/")[0].rpartition("/")[0]
        given = environment.get("PYTHONPATH", "").split(":")
        self._given = [each.strip("/") for each in given if each]
        self._path: list[str] = []
        self._tag = ""
        self._frozen: Collection[str] = ()
        #: Of a module, the directories of what it has in it; None if it is no package.
        self._modules: dict[str, tuple[str, ...] | None] = {}
        self._files: dict[str, Entry] = {}

    def files(self, words: list[str], find: Find) -> Iterator[Entry]:
        """Yield what a start with these arguments reads, in that order. ``find``
        returns the file of a path in the working directory."""
        home = self._home()
        if home is None:
            return
        self._path = [*self._given, *self._directories(home)]
        for path in _LOCALE:
            if (entry := self._tree.find(path)) is not None:
                yield entry
                break
        for module in _ALWAYS:
            self._import(module)
        self._run(words, find)
        yield from self._files.values()

    def _home(self) -> str | None:
        """Return the directory of the standard library, and learn the tag of files."""
        library = f"{self._prefix}/lib".lstrip("/")
        found = []
        for name in self._tree.names[library]:
            if match := _HOME.fullmatch(name):
                found.append((int(match[1]), int(match[2]), f"{library}/{name}"))
        if not found:
            return None
        major, minor, home = max(found)
        self._tag = f"cpython-{major}{minor}"
        self._frozen = _FROZEN if (major, minor) >= (3, 11) else ()
        return home

    def _directories(self, home: str) -> Iterator[str]:
        yield from (home, f"{home}/lib-dynload")
        if self._tree.find(f"{self._environment}/pyvenv.cfg") is not None:
            version = home.rpartition("/")[2]
            yield f"{self._environment}/lib/{version}/site-packages"
        local = home.replace(self._prefix, f"{self._prefix}/local".lstrip("/"), 1)
        for directory in (f"{local}/dist-packages", f"{home}/site-packages"):
            yield directory
        yield f"{home.rpartition('/')[0]}/python3/dist-packages"

    def _run(self, words: list[str], find: Find) -> None:
        """Go through the program that the arguments name."""
        words = list(words)
        while words:
            word = words.pop(0)
            if word == "-c" and words:
                self._scan(words[0].encode(), "")
                return
            if word == "-m" and words:
                self._import(words[0])
                self._import(f"{words[0]}.__main__")
                return
            if word in ("-W", "-X"):
                words[:1] = []
            elif not word.startswith("-"):
                entry = find(word)
                if entry is None:
                    return
                self._path.insert(0, entry.path.rpartition("/")[0])
                self._scan(self._tree.read(entry) or b"", "")
                return

    def _import(self, name: str) -> bool:
        """Take a module and what it imports; return whether there is one."""
        if name in self._modules:
            return True
        package, _, last = name.rpartition(".")
        if package and not self._import(package):
            return False
        where = self._modules[package] if package else self._path
        if where is None or len(self._modules) >= _MAX_MODULES:
            return False
        spaces = []
        for directory in where:
            path = self._tree.resolve(f"{directory}/{last}")
            if path is not None and path in self._tree.names:
                self._modules[name] = (path,)
                if self._take_module(path, "__init__", name):
                    return True
                # A directory of no package counts if nothing else has the name.
                del self._modules[name]
                spaces.append(path)
            if self._take_module(directory, last, name):
                return True
        if spaces:
            self._modules[name] = tuple(spaces)
        return bool(spaces)

    def _take_module(self, directory: str, last: str, name: str) -> bool:
        """Take a file of a directory; importlib prefers what is compiled to C."""
        names = self._tree.names.get(self._tree.resolve(directory) or "", ())
        for ending in (f".{self._tag}-", ".abi3.so", ".so"):
            for each in names:
                if each.startswith(f"{last}{ending}") and each.endswith(".so"):
                    if (entry := self._tree.find(f"{directory}/{each}")) is not None:
                        self._modules.setdefault(name, None)
                        self._files[entry.path] = entry
                        return True
        return self._take_source(directory, last, name)

    def _take_source(self, directory: str, last: str, name: str) -> bool:
        source = self._tree.find(f"{directory}/{last}.py")
        if source is None:
            return False
        self._modules.setdefault(name, None)
        compiled = f"{directory}/__pycache__/{last}.{self._tag}.pyc"
        entry = self._tree.find(compiled) or source
        if name not in self._frozen:
            self._files[entry.path] = entry
        package = name if last == "__init__" else name.rpartition(".")[0]
        self._scan(self._tree.read(source) or b"", package)
        return True

    def _scan(self, source: bytes, package: str) -> None:
        # NB: what nests too deep for the parser is a MemoryError.
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "\d" in an old source, say
                body = ast.parse(source).body
            for name in (*_imported(body, package), *_attributes(body)):
                self._import(name)


def _imported(statements: list[ast.stmt], package: str) -> Iterator[str]:
    """Yield what these statements import when they run, and what it may have in it."""
    for one in statements:
        match one:
            case ast.Import():
                yield from (each.name for each in one.names)
            case ast.ImportFrom():
                above = package.split(".")[: len(package.split(".")) - one.level + 1]
                start = [*above] if one.level else []
                base = ".".join([*start, *([one.module] if one.module else [])])
                yield base
                yield from (f"{base}.{each.name}" for each in one.names)
            case ast.If(
                test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")
            ):
                yield from _imported(one.orelse, package)
            case ast.If(test=ast.Compare(left=ast.Name("__name__"))):
                pass
            case ast.If() | ast.For() | ast.While():
                yield from _imported([*one.body, *one.orelse], package)
            case ast.Try():
                # NB: a handler imports a substitute for a module that is not there.
                yield from _imported([*one.body, *one.orelse, *one.finalbody], package)
            case ast.With() | ast.ClassDef():
                yield from _imported(one.body, package)


def _attributes(statements: list[ast.stmt]) -> Iterator[str]:
    """Yield what these statements use of modules that they import by name: a package
    may import what is in it only then (PEP 562)."""
    modules: dict[str, str] = {}
    for one in statements:
        match one:
            case ast.Import():
                modules |= {x.asname or x.name: x.name for x in one.names}
            case ast.Assign() | ast.AnnAssign() if one.value is not None:
                for each in ast.walk(one.value):
                    match each:
                        case ast.Attribute(value=ast.Name(name)) if name in modules:
                            yield f"{modules[name]}.{each.attr}"
