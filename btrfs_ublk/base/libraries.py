"""Find out which shared library a program lacks, and what to install."""

from __future__ import annotations

import re

from btrfs_ublk.errors import CapabilityError

#: The status with which ld.so(8) exits, before the program runs.
EXIT_STATUS = 127
_COMPLAINT = re.compile(r"error while loading shared libraries: ([^:\s]+): cannot open")
#: The packages of the libraries that our helpers use, in Debian 12 and 13 (where others
#: "provide" some). The key is the name before ".so."; {} is the number behind it.
_PACKAGES = {
    "libarchive": "libarchive{}",
    "libb2": "libb2-{}",
    "libcrypto": "libssl{}",
    "libcurl": "libcurl{}",
    "libfuse3": "libfuse3-{}",
    "libisal": "libisal{}",
    "libjansson": "libjansson{}",
    "libsqlite3": "libsqlite3-{}",
    "libssl": "libssl{}",
    "liburing": "liburing{}",
    "libuuid": "libuuid{}",
    "libuv": "libuv{}",
    "libxxhash": "libxxhash{}",
    "libz": "zlib{}g",
    "libzstd": "libzstd{}",
}


def library_error(program: str, stderr: str) -> CapabilityError | None:
    """Return the error for a program that ended with EXIT_STATUS; None if it ended for
    another reason. It names one library, because the loader stops at the first."""
    complaint = _COMPLAINT.search(stderr)
    if complaint is None:
        return None
    library = complaint[1]
    return CapabilityError(
        f"{program} needs the library {library}, which is not on this machine",
        hint=f"install it ({_package(library)}); or, where the machine has another "
        "version of it, build there: pip install . in the project's sources",
    )


def _package(library: str) -> str:
    name, _, number = library.partition(".so.")
    if name not in _PACKAGES:
        return "apt-file search finds the package"
    return f"Debian: apt-get install {_PACKAGES[name].format(number)}"
