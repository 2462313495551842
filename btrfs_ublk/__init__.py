"""Lazy data-block materialisation for btrfs.

``btrfs_ublk.api`` has the names for other programs, which import them from here: ``from
btrfs_ublk import kept_volume``.
"""

import signal
import sys

# NB: before all other imports, which take a while. If this process runs one of our
# commands (argv has its name, or "-m" while Python looks for the module), Ctrl-C kills
# it, until run_command() installs its handlers: an exception in the middle of an import
# would print a traceback, and sometimes cause a second one.
if sys.argv[:1] == ["-m"] or sys.argv and sys.argv[0].endswith("/btrfs-ublk"):
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

TYPE_CHECKING = False  # That of typing, which takes long to import.

__version__ = "0.2.0"

if TYPE_CHECKING:
    from btrfs_ublk.api import *  # noqa: F401, F403
    from btrfs_ublk.api import __all__ as __all__  # noqa: F401
else:

    def __getattr__(name: str) -> object:
        """What the API has, imported when it is first wanted."""
        from importlib import import_module
        from importlib.util import find_spec

        # NB: "from btrfs_ublk import NAME" asks here for modules of the package first.
        if name == "__all__" or (
            not name.startswith("_") and find_spec(f"{__name__}.{name}") is None
        ):
            api = import_module(f"{__name__}.api")
            if name == "__all__" or name in api.__all__:
                return globals().setdefault(name, getattr(api, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
