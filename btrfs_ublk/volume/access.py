"""The options of one command line that apply to the sources of all its files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from btrfs_ublk.content import SourceKeys
from btrfs_ublk.content.s3 import s3_keys
from btrfs_ublk.errors import UsageError
from btrfs_ublk.volume.entry import VolumeFile

#: The kinds of sources that each key applies to.
_KINDS = {
    "endpoint": ("s3",),
    "credentials_file": ("s3",),
    "basic_auth_file": ("http",),
    "ca_file": ("http", "s3", "oci"),
}


_File = TypeVar("_File", bound=VolumeFile)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Keys for sources; None where not given. A key that a source has itself wins."""

    endpoint: str | None = None
    credentials_file: Path | None = None
    basic_auth_file: Path | None = None
    ca_file: Path | None = None

    def given_to(
        self,
        files: Sequence[_File],
        environment: Mapping[str, str] = os.environ,
    ) -> list[_File]:
        """Return the files with these keys, and with the environment's endpoint. Raises
        UsageError for a key that applies to none of the files.
        """
        kinds = {file.source.get("kind") for file in files}
        keys: SourceKeys = {}
        for key, of in _KINDS.items():
            value = getattr(self, key)
            if value is None:
                continue
            if not kinds.intersection(of):
                adding = "--add-file, or --url-file," if "http" in of else "--add-file"
                raise UsageError(
                    f"--{key.replace('_', '-')} is about files from {' or '.join(of)}, "
                    "and no such file is added",
                    hint=f"give it together with the {adding} that needs it",
                )
            # The server has another working directory.
            keys[key] = str(value.absolute()) if isinstance(value, Path) else value
        if "endpoint" not in keys and (found := s3_keys(environment).get("endpoint")):
            keys["endpoint"] = found
        return [
            replace(file, source=self._of(file.source, keys) | file.source)
            for file in files
        ]

    def _of(self, source: SourceKeys, keys: SourceKeys) -> SourceKeys:
        kind = source.get("kind")
        return {key: value for key, value in keys.items() if kind in _KINDS[key]}
