"""Lazy data-block materialisation for btrfs.

What other programs use of it stands in ``btrfs_ublk.api``, and is taken from here:
``from btrfs_ublk import kept_volume``.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

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
