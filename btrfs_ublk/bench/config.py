"""The configuration of one benchmark run: nine keys, and two optional ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, cast, get_args

from btrfs_ublk.errors import UsageError
from btrfs_ublk.seed import STRATEGIES
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.units import BLOCK_BYTES, exact_size, parse_block_size

ENGINES = ("io_uring", "libaio", "mmap", "psync")
#: What virtual data consist of; see content.py.
SOURCES = ("memset", "pattern")

_MAX_RUNTIME_S = 86_400.0
_PIECES = 4  # a clone is made of quarters


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def parse(key: str, value: Any) -> str:
        if value not in choices:
            raise UsageError(f"{key} is {value!r}", hint=f"choose {', '.join(choices)}")
        return str(value)

    return parse


def _count(most: int) -> Callable[[str, Any], int]:
    def parse(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{key} is {value!r}, not a whole number")
        if not 1 <= value <= most:
            raise UsageError(f"{key} is {value}, not within 1 and {most}")
        return value

    return parse


def _size(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UsageError(f"{key} is {value!r}, not a size", hint='like "275G"')
    return parse_block_size(str(value), what=key)


def _flag(key: str, value: Any) -> bool:
    if value not in (0, 1):  # False and True are equal to these
        raise UsageError(f"{key} is {value!r}, neither 0 nor 1")
    return bool(value)


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{key} is {value!r}, not a number of seconds")
    # NB: this also rejects NaN, for which all comparisons are false.
    if not 0.5 <= value <= _MAX_RUNTIME_S:
        raise UsageError(f"{key} is {value}, not within 0.5 and {_MAX_RUNTIME_S:g} s")
    return float(value)


def _write_seconds(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _key(
    key: str,
    parse: Callable[[str, Any], Any],
    write: Callable[[Any], Any] = lambda value: value,
    **default: Any,
) -> Any:
    """Make a field that has a key in JSON. ``write`` converts to JSON: all spellings of
    one value become the same.
    """
    return field(metadata={"key": key, "parse": parse, "write": write}, **default)


@dataclass(frozen=True)
class Configuration:
    """One configuration. ``num_queues`` is the server's threads with any front end."""

    seed: str = _key("btrfs.seed", _choice(*STRATEGIES))
    virtual_data_bytes: int = _key("btrfs.virtual_data_size", _size, exact_size)
    total_clone_bytes: int = _key("btrfs.total_clone_size", _size, exact_size)
    depth: int = _key("fio.depth", _count(4096))
    direct: bool = _key("fio.direct", _flag, int)
    engine: str = _key("fio.engine", _choice(*ENGINES))
    jobs: int = _key("fio.jobs", _count(256))
    runtime_s: float = _key("fio.runtime", _seconds, _write_seconds)
    num_queues: int = _key("ublk.num_queues", _count(256))
    front_end: FrontEndName = _key(
        "front_end", _choice(*get_args(FrontEndName)), default="auto"
    )
    source: str = _key("source", _choice(*SOURCES), default="memset")

    def __post_init__(self) -> None:
        least = _PIECES * BLOCK_BYTES
        if not least <= self.total_clone_bytes <= self.virtual_data_bytes:
            raise UsageError(
                f"btrfs.total_clone_size is {exact_size(self.total_clone_bytes)}",
                hint=f"{exact_size(least)} at least, and at most the "
                f"{exact_size(self.virtual_data_bytes)} of btrfs.virtual_data_size",
            )

    @classmethod
    def from_dict(cls, values: object) -> Configuration:
        """Parse a dictionary. Raises UsageError, which names the key."""
        if not isinstance(values, dict):
            raise UsageError(f"the options are {values!r}, not a JSON object")
        unknown = [repr(key) for key in values if key not in KEYS]
        if unknown:
            raise UsageError(
                f"unknown option {', '.join(unknown)}", hint=f"known: {', '.join(KEYS)}"
            )
        missing = [key for key in REQUIRED if key not in values]
        if missing:
            raise UsageError(
                f"missing option {', '.join(missing)}", hint="none has a default"
            )
        parsed = {
            KEYS[key].name: KEYS[key].metadata["parse"](key, value)
            for key, value in values.items()
        }
        return cls(**parsed)

    @classmethod
    def from_json(
        cls, text: str, *, defaults: Mapping[str, object] | None = None
    ) -> Configuration:
        """Parse JSON as from_dict() does; ``defaults`` are for keys that it lacks."""
        try:
            values = json.loads(text, object_pairs_hook=_without_twins)
        except ValueError as error:
            raise UsageError(f"the options are no JSON: {error}") from error
        if defaults and isinstance(values, dict):
            values = {**defaults, **values}
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Return all keys. Equal configurations give equal dictionaries."""
        return {
            key: each.metadata["write"](getattr(self, each.name))
            for key, each in KEYS.items()
        }


#: The fields by key, and the keys that have no default.
KEYS = {each.metadata["key"]: each for each in fields(Configuration)}
REQUIRED = [key for key, each in KEYS.items() if each.default is MISSING]


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = {key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1}
        raise UsageError(f"option given twice: {', '.join(sorted(twice))}")
    return values


def parse_value(key: str, text: str) -> Any:
    """Return a typed value as ``to_dict()`` has it: "275GiB" is "275G". Raises
    UsageError for an unknown key or an invalid value.
    """
    if key not in KEYS:
        raise UsageError(f"there is no key {key!r}", hint=f"known: {', '.join(KEYS)}")
    how = KEYS[key].metadata
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return how["write"](how["parse"](key, value))


def configuration_of(row: Mapping[str, Any]) -> Configuration:
    """Return the configuration of a result, which has further keys."""
    return Configuration.from_dict(
        cast(dict[str, Any], {key: row[key] for key in KEYS if key in row})
    )
