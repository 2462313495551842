"""The definition of a kept volume: a small TOML document, read, checked and written.

Each key is declared once, as a field of VolumeDefinition. Made from the declarations:
reading and writing TOML, the options of ``btrfs-ublk volume up``, the refusal to change
a volume that is up, and the table in docs/volumes.md.

NB: the help of commands imports this module. What takes long to import is therefore
imported where it is used, with signals deferred: when one raises within an import,
Python turns that into other errors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from btrfs_ublk.base.paths import OptionalPath, StrPath
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import UsageError, why_unread
from btrfs_ublk.server.names import MAX_DEADLINE_S, FrontEndName
from btrfs_ublk.units import (
    GIB,
    KIB,
    MIN_VIRTUAL_DATA_BYTES,
    TIB,
    exact_size,
    parse_block_size,
    parse_size,
)
from btrfs_ublk.volume.entry import VolumeFile, VolumeTree, check_text

if TYPE_CHECKING:
    from btrfs_ublk.image.access import RegistryAccess

#: One chunk of the seed holds this; more would cost metadata, less would save none.
DEFAULT_SIZE_BYTES = 64 * TIB
DEFAULT_WRITABLE_BYTES = GIB
#: Page faults fetch a thirty-second of what they do by default in btrfs. Reading in
#: order from a source that is near is no slower: docs/limits.md has the figures.
DEFAULT_READ_AHEAD_BYTES = 128 * KIB
DEFAULT_DEADLINE_S = 30.0

_Default = TypeVar("_Default")


#: How a fork of an image is made (forks.py).
ForkMode = Literal["snapshot", "overlay"]
FORK_MODES: tuple[ForkMode, ...] = get_args(ForkMode)
#: Readers of several overlays share the page cache.
DEFAULT_FORK_MODE: ForkMode = "overlay"


class Kind:
    """How values are written in a file and as an option. This kind is any text.

    ``type`` is what the command line makes of an option before parse() gets it; None:
    there is no such option.
    """

    type: type | None = str
    #: The option may be repeated, and parse() gets all values.
    repeats = False
    choices: tuple[str, ...] = ()
    metavar: str | None = None

    def read(self, value: object, key: str) -> Any:
        """Return the value of a key of a file. Raises UsageError."""
        if not isinstance(value, str) or not value:
            raise UsageError(f"{key} is {value!r}, not a text in quotes")
        return value

    def parse(self, value: Any, option: str) -> Any:
        """Return the value of an option. Raises UsageError."""
        return value

    def write(self, value: Any) -> Any:
        """Return what read() reads; None leaves the key out."""
        return value

    def show(self, value: Any) -> object:
        """Return the value for messages."""
        return self.write(value)

    def check(self, value: Any, noun: str) -> None:
        """Raise UsageError for a value that no volume can have."""


class Choice(Kind):
    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def check(self, value: Any, noun: str) -> None:
        if value not in self.choices:
            raise UsageError(
                f"there is no {noun} {value!r}",
                hint=f"choose {', '.join(self.choices)}",
            )


class AbsolutePath(Kind):
    type = Path

    def read(self, value: object, key: str) -> Path:
        return Path(super().read(value, key))

    def parse(self, value: Any, option: str) -> Path:
        return Path(os.path.abspath(value))

    def write(self, value: Any) -> str:
        return str(value)

    def check(self, value: Any, noun: str) -> None:
        if not value.is_absolute():
            raise UsageError(f"{noun} {value} is not an absolute path")
        check_text(str(value), noun)


class Size(Kind):
    metavar = "SIZE"

    def read(self, value: object, key: str) -> int:
        # NB: a bare number is bytes, and bool is a subclass of int.
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return parse_size(super().read(value, key), what=key)

    def parse(self, value: Any, option: str) -> int:
        return parse_size(value, what=option)

    def write(self, value: Any) -> str:
        return exact_size(value)


class Rate(Kind):
    """Bytes per second, written as 50M/s, or "idle"."""

    metavar = "RATE"

    def read(self, value: object, key: str) -> int | Literal["idle"]:
        return self.parse(super().read(value, key), key)

    def parse(self, value: Any, option: str) -> int | Literal["idle"]:
        if value == "idle":
            return "idle"
        if not value.endswith("/s"):
            raise UsageError(
                f"{option} {value!r} is not a rate", hint="write 50M/s, or idle"
            )
        return parse_size(value.removesuffix("/s"), what=option)

    def write(self, value: Any) -> str:
        return value if value == "idle" else f"{exact_size(value)}/s"

    def check(self, value: Any, noun: str) -> None:
        if value != "idle" and not 0 < value < 2**63:
            raise UsageError(f"{noun} {value} is no rate", hint="write 50M/s, or idle")


class Caches(Kind):
    """URLs of caches."""

    metavar = "URL"
    repeats = True

    def read(self, value: object, key: str) -> tuple[str, ...]:
        from btrfs_ublk.base.hosts import check_cache

        if not isinstance(value, list) or not value:
            raise UsageError(f"{key} is {value!r}, not a list of URLs")
        return tuple(check_cache(each, key) for each in value)

    def parse(self, value: Any, option: str) -> tuple[str, ...] | None:
        return None if list(value) == ["none"] else self.read(list(value), option)

    def write(self, value: Any) -> list[str]:
        return list(value)

    def show(self, value: Any) -> str:
        return ", ".join(value)


class BlockSize(Size):
    """A size of one block at least."""

    def parse(self, value: Any, option: str) -> int:
        return parse_block_size(value, what=option)

    def check(self, value: Any, noun: str) -> None:
        parse_block_size(str(value), what=noun)


class Flag(Kind):
    type = bool

    def read(self, value: object, key: str) -> bool:
        if not isinstance(value, bool):
            raise UsageError(f"{key} is {value!r}, not true or false")
        return value


class Count(Kind):
    type = int

    def read(self, value: object, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{key} is {value!r}, not a whole number")
        return value


class Seconds(Kind):
    type = float
    metavar = "SECONDS"

    def read(self, value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{key} is {value!r}, not a number of seconds")
        return value

    def show(self, value: Any) -> str:
        return f"{value:.12g} s"


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class Setting:
    """The declaration of a key. ``name`` is its attribute of VolumeDefinition.

    ``help`` is the help of the option; docs/volumes.md has it, and then ``more``. An
    option says ``none`` for None. So does a file, but where None is the default, the
    key is left out; ``unset`` says what that means. ``noun`` is the key in messages.
    ``change``: what becomes of a change while the volume is up. "down" is refused, with
    ``up`` before the present value. With ``of_device``, DeviceOptions has an attribute
    of the same name, and gets the value. ``check`` raises UsageError, as the kind's.
    """

    name: str
    default: Any
    key: str
    kind: Kind
    help: str
    more: str = ""
    none: str | int | None = None
    unset: str = ""
    noun: str = ""
    change: Literal["never", "grows", "at once", "down"] = "down"
    up: str = ""
    of_device: bool = False
    check: Callable[[Any], object] | None = None

    @property
    def option(self) -> str:
        """Its option of ``btrfs-ublk volume up``."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def default_text(self) -> str:
        """The default, for help."""
        if self.default is None:
            return self.unset
        value = self.kind.write(self.default)
        return f"{value:g}" if isinstance(value, float) else str(value)

    def read(self, value: object) -> Any:
        """Return the value of the key of a file. Raises UsageError."""
        none = None if self.default is None else self.none
        return self._read(self.kind.read, value, self.key, none)

    def parse(self, value: Any) -> Any:
        """Return the value of the option. Raises UsageError."""
        return self._read(self.kind.parse, value, self.option, self.none)

    def _read(
        self,
        read: Callable[[Any, str], Any],
        value: Any,
        what: str,
        none: str | int | None,
    ) -> Any:
        if isinstance(none, str) and value == none:
            return None
        found = read(value, what)
        if found is None or found == none:
            return None
        with deferred():  # It imports what it needs.
            self._check(found, what)
        return found

    def write(self, definition: object) -> Any:
        """Return what read() reads; None leaves the key out."""
        value = getattr(definition, self.name)
        if value is not None:
            return self.kind.write(value)
        return None if self.default is None else self.none

    def check_value(self, definition: object) -> None:
        """Raise UsageError for a value that no volume can have."""
        value = getattr(definition, self.name)
        if value is not None:
            self._check(value, self.noun or self.key)

    def _check(self, value: Any, what: str) -> None:
        self.kind.check(value, what)
        if self.check is not None:
            try:
                self.check(value)
            except UsageError as error:
                if not error.message.startswith(f"{what} "):
                    error.prefix(f"{what} {self.kind.show(value)}")
                raise

    def refusal(self, is_so: object, is_to_be: object) -> str | None:
        """Say why a volume that is up cannot change; None if it can, or need not."""
        if self.change != "down" or is_so == is_to_be:
            return None
        up = self.up or f"with {self.noun or self.key}"
        return f"is up {up} {self._shown(is_so)}, not {self._shown(is_to_be)}"

    def _shown(self, value: object) -> object:
        if value is not None:
            return self.kind.show(value)
        return "the default" if self.default is None else self.none


class Files(Kind):
    type = None
    entry = VolumeFile

    def read(self, value: object, key: str) -> tuple[VolumeFile, ...]:
        if not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
            raise UsageError(f"{key} is no list of tables", hint=f"write [[{key}]]")
        return tuple(self.entry.from_keys(table) for table in value)

    def write(self, value: Any) -> Any:
        return [entry.to_keys() for entry in value]


class Trees(Files):
    entry = VolumeTree


class ImageName(Kind):
    metavar = "IMAGE"

    def parse(self, value: Any, option: str) -> str:
        # The daemon and later commands have other working directories.
        from btrfs_ublk.image.reference import parse_name

        return str(parse_name(value))

    def check(self, value: Any, noun: str) -> None:
        from btrfs_ublk.image.reference import LAYOUT_PREFIX, parse_name

        parse_name(value)
        layout = value.removeprefix(LAYOUT_PREFIX)
        if layout != value and not layout.startswith("/"):
            raise UsageError(
                f"{noun} {value} is not an absolute path", hint="write oci:/PATH:TAG"
            )


def _setting(
    default: _Default, key: str, kind: Kind, help: str, **about: Any
) -> _Default:
    """Declare a key: the field of a dataclass, with the arguments of a Setting."""
    return field(
        default=default, metadata={"key": key, "kind": kind, "help": help, **about}
    )


def _check_size(size_bytes: int) -> None:
    if size_bytes < MIN_VIRTUAL_DATA_BYTES:
        raise UsageError(f"a volume has {exact_size(MIN_VIRTUAL_DATA_BYTES)} at least")


def _check_writable(size_bytes: int) -> None:
    from btrfs_ublk.kernel.btrfs import MIN_WRITABLE_BYTES

    if size_bytes < MIN_WRITABLE_BYTES:
        raise UsageError(f"btrfs needs {exact_size(MIN_WRITABLE_BYTES)} at least")


def _check_limits(**numbers: int) -> None:
    from btrfs_ublk.device.state import check_limits

    check_limits(**numbers)


def _check_cache_max(size_bytes: int) -> None:
    if size_bytes <= 0:
        raise UsageError("such a cache holds nothing")


def _check_read_ahead(size_bytes: int) -> None:
    from btrfs_ublk.kernel.read_ahead import check_read_ahead

    check_read_ahead(size_bytes)


def _check_deadline(deadline_s: float) -> None:
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise UsageError(
            f"it is not from 0 to {MAX_DEADLINE_S} s",
            hint="with 0, reads wait for ever",
        )


@dataclass(frozen=True, kw_only=True)
class VolumeDefinition:
    """The wanted state of a kept volume. Sizes are bytes.

    Each attribute is a key of a definition, which docs/volumes.md explains. None is
    what the option calls 0 or ``kernel``, or the default of a path.
    """

    size_bytes: int = _setting(
        DEFAULT_SIZE_BYTES,
        "size",
        BlockSize(),
        "Size of the virtual data: as much can be added.",
        change="never",
        check=_check_size,
    )
    writable_bytes: int = _setting(
        DEFAULT_WRITABLE_BYTES,
        "writable",
        BlockSize(),
        "Size of the sparse image that takes what is written.",
        noun="writable size",
        change="grows",
        check=_check_writable,
    )
    image: str | None = _setting(
        None,
        "image",
        ImageName(),
        "A sealed image that it is made of: its layers, instead of virtual data.",
        more="`REGISTRY/REPOSITORY:TAG`, `@DIGEST`, `oci:DIRECTORY:TAG` of a "
        "[layout](design/images.md), or `s3://BUCKET/PREFIX:TAG` or "
        "`https://HOST/DIRECTORY:TAG` of one in a bucket or behind a web server; it "
        "stays what it was when the volume was made.",
        unset="none",
        change="never",
    )
    image_docker_config: OptionalPath = _setting(
        OptionalPath(),
        "image_docker_config",
        AbsolutePath(),
        "A config.json with the login of the image's registry.",
        unset="those of Docker and podman",
        change="never",
    )
    image_ca_file: OptionalPath = _setting(
        OptionalPath(),
        "image_ca_file",
        AbsolutePath(),
        "Certificates (PEM) to trust for the image's registry.",
        unset="the system's",
        change="never",
    )
    image_insecure: bool = _setting(
        False,
        "image_insecure",
        Flag(),
        "Ask the image's registry by http; on loopback only.",
        change="never",
    )
    mount: OptionalPath = _setting(
        OptionalPath(),
        "mount",
        AbsolutePath(),
        "The mount point.",
        more="An absolute path, and with the option also a relative one. It is made "
        "where only it itself is missing; what is there must be an empty directory. "
        "Only root gets to the default.",
        unset="/run/btrfs-ublk/volumes/NAME",
        noun="mount point",
        up="at",
    )
    front_end: FrontEndName = _setting(
        "auto",
        "front_end",
        Choice(*get_args(FrontEndName)),
        "How its blocks are served.",
        more='`"auto"`: ublk where the kernel has it, and '
        "[survives](limits.md#devices-and-mounts) the death of its server.",
        noun="front end",
        of_device=True,
    )
    queues: int | None = _setting(
        None,
        "queues",
        Count(),
        "Queues of the device, and so threads of the server; 0: the default.",
        more="From 1 to 256.",
        none=0,
        unset="the server's choice",
        of_device=True,
        check=lambda value: _check_limits(queues=value),
    )
    depth: int | None = _setting(
        None,
        "depth",
        Count(),
        "Requests in flight per queue; 0: the default.",
        more="From 1 to 1024.",
        none=0,
        unset="the server's choice",
        of_device=True,
        check=lambda value: _check_limits(depth=value),
    )
    cache: OptionalPath = _setting(
        OptionalPath(),
        "cache",
        AbsolutePath(),
        "A directory for what was fetched.",
        more="Several volumes may share one.",
        unset="one of its own",
    )
    cache_max_bytes: int | None = _setting(
        None,
        "cache_max",
        Size(),
        "A cap on the size of the cache; 0: none.",
        more="See [cache.md](cache.md).",
        none=0,
        unset="no cap",
        change="at once",
        check=_check_cache_max,
    )
    complete: int | Literal["idle"] | None = _setting(
        None,
        "complete",
        Rate(),
        "Fetch all that is in it by itself, at 50M/s or when idle; or off.",
        more="In the background, after all reads: see "
        "[prefetch.md](prefetch.md#complete-volumes).",
        none="off",
        unset="off",
    )
    read_ahead_bytes: int | None = _setting(
        DEFAULT_READ_AHEAD_BYTES,
        "read_ahead",
        Size(),
        "What one page fault fetches; or kernel: as btrfs has it.",
        more='`"kernel"` is 4 MiB, and takes effect with the next mount. Where /sys is '
        "read-only, as in containers, a warning says that it stays the kernel's, and "
        "any other size than the default is an error.",
        none="kernel",
        change="at once",
        check=_check_read_ahead,
    )
    deadline_s: float | None = _setting(
        DEFAULT_DEADLINE_S,
        "deadline",
        Seconds(),
        "Time until a read that no source answers fails; 0: it waits for ever.",
        none=0,
        up="with a deadline of",
        check=_check_deadline,
    )
    via: tuple[str, ...] | None = _setting(
        None,
        "via",
        Caches(),
        "A cache in front of its sources, http://HOST:PORT; may be repeated.",
        more="`--via none` takes them back. See [site caches](how-to/site-caches.md).",
        none="none",
        unset="none, but those of hosts.toml",
        up="with caches",
    )
    via_plain: bool = _setting(
        False, "via_plain", Flag(), "Credentials may go to those caches without TLS."
    )
    files: tuple[VolumeFile, ...] = _setting(
        (), "file", Files(), "The files in it.", change="at once"
    )
    trees: tuple[VolumeTree, ...] = _setting(
        (), "tree", Trees(), "The trees in it.", change="at once"
    )

    def __post_init__(self) -> None:
        """Raise UsageError for values that no volume can have."""
        with deferred():
            for setting in SETTINGS.values():
                setting.check_value(self)
        self._check_caches()
        entries = _merged([*self.files, *self.trees])
        trees = tuple(x for x in entries if isinstance(x, VolumeTree))
        object.__setattr__(self, "files", tuple(entries[: len(entries) - len(trees)]))
        object.__setattr__(self, "trees", trees)
        if self.image is not None and (self.files or self.trees):
            raise UsageError(
                f"files cannot be added to a volume of an image ({self.image})",
                hint="add them to another volume",
            )

    def _check_caches(self) -> None:
        # Of other sources, the server knows whether they have credentials.
        if not self.via or self.image is None or self.via_plain:
            return
        from btrfs_ublk.base.hosts import is_plain

        if plain := [url for url in self.via if is_plain(url)]:
            raise UsageError(
                f"the registry's tokens would go to {plain[0]} without TLS",
                hint="write https://, or allow it: --via-plain",
            )

    def with_files(self, more: Sequence[VolumeFile]) -> VolumeDefinition:
        """Return the definition with further files, without duplicates.

        Raises UsageError when a path has two sources.
        """
        return replace(self, files=(*self.files, *more)) if more else self

    def with_trees(self, more: Sequence[VolumeTree]) -> VolumeDefinition:
        """Do the same with trees."""
        return replace(self, trees=(*self.trees, *more)) if more else self

    def to_toml(self) -> str:
        """Return the text that parse_definition() reads."""
        settings, tables = [], []
        for key, setting in SETTINGS.items():
            value = setting.write(self)
            if setting.kind.type is None:
                tables += [f"\n[[{key}]]\n{_lines(table)}" for table in value]
            elif value is not None:
                settings.append(f"{key} = {_toml(value)}\n")
        return "".join((*settings, *tables))


def image_access(definition: VolumeDefinition) -> RegistryAccess:
    """Return how the registry of a volume's image is asked."""
    with deferred():
        from btrfs_ublk.image.access import RegistryAccess
    return RegistryAccess(
        docker_config=definition.image_docker_config,
        ca_file=definition.image_ca_file,
        insecure=definition.image_insecure,
        via=definition.via,
        via_plain=definition.via_plain,
    )


#: NB: dumps() would make one each time.
_encode = json.JSONEncoder(ensure_ascii=False).encode
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
#: All keys of a definition, in the order of help.
SETTINGS = {
    each.metadata["key"]: Setting(
        # NB: an OptionalPath is None as an attribute of the class.
        name=each.name,
        default=getattr(VolumeDefinition, each.name),
        **each.metadata,
    )
    for each in fields(VolumeDefinition)
}


def _lines(table: dict[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_toml(value)}\n" for key, value in table.items())


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml(key)


def _toml(value: object) -> str:
    """Write a value in TOML, in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(k)} = {_toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # The other escapes of JSON are those of TOML.
    return _encode(value).replace("\x7f", "\\u007f")


def _merged(entries: Sequence[VolumeFile]) -> list[VolumeFile]:
    """Return the entries without duplicates. Raises UsageError when two sources claim
    one path, or a file is also the directory of another one.
    """
    found: dict[str, VolumeFile] = {}
    for entry in entries:
        other = found.setdefault(entry.path, entry)
        if other is not entry and not (
            type(entry) is type(other) and entry.is_same_as(other)
        ):
            raise UsageError(
                f"file {entry.path!r} has two sources: {other.origin} and "
                f"{entry.origin}"
            )
    for path in found:
        parent = path
        while parent := parent.rpartition("/")[0]:
            if parent in found:
                kind = "tree" if isinstance(found[parent], VolumeTree) else "file"
                raise UsageError(f"{path!r} cannot be in {parent!r}, a {kind}")
    return list(found.values())


def parse_definition(text: str, *, where: str) -> VolumeDefinition:
    """Parse a definition from TOML; ``where`` names it in errors. Raises UsageError."""
    with deferred():
        import tomllib

    try:
        keys = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from error
    given: dict[str, Any] = {}
    try:
        for key, value in keys.items():
            setting = SETTINGS.get(key)
            if key == "realtime":
                continue  # written by version 0.2
            if setting is None:
                raise UsageError(
                    f"key {key!r} is unknown", hint=f"there are: {', '.join(SETTINGS)}"
                )
            given[setting.name] = setting.read(value)
        return VolumeDefinition(**given)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error


def read_definition(path: StrPath, *, files: bool = True) -> VolumeDefinition:
    """Read a definition from a file; without ``files``, only the keys before those of
    its files and trees: there may be thousands. Raises UsageError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"definition {path}: {why_unread(error)}") from error
    if not files and (tables := text.find("\n[[")) >= 0:
        with suppress(UsageError):  # this may be within a text of several lines
            return parse_definition(text[: tables + 1], where=str(path))
    return parse_definition(text, where=str(path))
