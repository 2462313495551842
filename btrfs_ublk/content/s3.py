"""What the environment says of S3 stores, by the variables that other clients read."""

from __future__ import annotations

import os
from collections.abc import Mapping

from btrfs_ublk.content.source import SourceKeys

#: The first that is set counts, for each key of a source of the kind s3.
_VARIABLES = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "credentials_file": ("AWS_SHARED_CREDENTIALS_FILE",),
    "profile": ("AWS_PROFILE",),
}


def s3_keys(environment: Mapping[str, str] = os.environ) -> SourceKeys:
    """Return the keys of a source that the environment says. Keys to sign with are not
    among them: the file that has them is."""
    keys: SourceKeys = {}
    for key, variables in _VARIABLES.items():
        found = next(filter(None, map(environment.get, variables)), None)
        if found:
            # The server has another working directory.
            if key == "credentials_file":
                found = os.path.abspath(os.path.expanduser(found))
            keys[key] = found
    return keys
