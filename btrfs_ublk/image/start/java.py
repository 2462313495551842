"""What a Java virtual machine reads before it runs a program: itself, the archive of
its own classes, the head of its image of modules, and the jars of the class path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from btrfs_ublk.image.start.tree import Entry, Tree

#: Below the home. The library loads the others by dlopen(3).
_LIBRARY = "lib/server/libjvm.so"
_OTHERS = (
    *("lib/jvm.cfg", _LIBRARY, "lib/libjimage.so", "lib/libjava.so", "lib/libzip.so"),
    *("lib/libnio.so", "lib/libnet.so", "lib/server/classes.jsa", "lib/modules"),
)
#: A start reads nearly all of them, whatever they are large.
_WHOLE = ("/libjvm.so", "/classes.jsa")
_PATHS = ("-cp", "-classpath", "--class-path")


def is_java(program: Entry) -> bool:
    return bool(program.elf and program.path.rpartition("/")[2] == "java")


def is_whole(path: str) -> bool:
    """Whether a start reads all of such a file."""
    return path.endswith(_WHOLE)


def java_files(
    tree: Tree, program: Entry, words: Sequence[str], directory: str
) -> Iterator[Entry]:
    """Yield what a start with these arguments reads, in that order."""
    home = program.path.rpartition("/")[0].rpartition("/")[0]
    if tree.find(f"{home}/{_LIBRARY}") is None:
        return
    jars: list[str] = []
    for option, value in zip(words, words[1:], strict=False):
        if option in _PATHS:
            for each in value.split(":"):
                jars += _jars(tree, each, directory)
    for path in (*(f"/{home}/{name}" for name in _OTHERS), *jars):
        if (entry := tree.find(path, directory)) is not None:
            yield entry


def _jars(tree: Tree, path: str, directory: str) -> list[str]:
    if not path.endswith("/*"):
        return [path]
    where = path.removesuffix("*")
    names = tree.names.get(tree.resolve(where, directory) or "", ())
    return [f"{where}{name}" for name in sorted(names) if name.endswith(".jar")]
