"""The command line's help as man pages and as one document, from the same text, and the
document of the Python API. Also the table of a volume's settings.
"""

from btrfs_ublk.ops.manual.contents import (
    Command,
    Manual,
    Option,
    Paragraph,
    read_manual,
)
from btrfs_ublk.ops.manual.man import man_pages
from btrfs_ublk.ops.manual.markdown import markdown
from btrfs_ublk.ops.manual.python import python_reference
from btrfs_ublk.ops.manual.settings import with_settings

__all__ = [
    "Command",
    "Manual",
    "Option",
    "Paragraph",
    "man_pages",
    "markdown",
    "python_reference",
    "read_manual",
    "with_settings",
]
