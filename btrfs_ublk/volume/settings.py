"""How a setting of volumes is declared: its kind of value, its help, when it changes.

The declarations are the fields of VolumeDefinition. NB: the help of commands imports
this module, which therefore imports little.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import exact_size, parse_block_size, parse_size

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
        return value

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
        from btrfs_ublk.volume.entry import check_text

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

    def show(self, value: Any) -> str:
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

    def show(self, value: Any) -> str:
        return self.write(value)

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
