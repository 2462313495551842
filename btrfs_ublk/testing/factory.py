"""The base of all the plugin's factories, and the fixtures that provide them.

Each thing has six fixtures. For one test, ``btrfs_ublk_THING`` is one of the default
kind, and ``btrfs_ublk_THING_factory`` makes as many as wanted. The same names with
``_module`` and ``_session`` appended have these scopes.
"""

from __future__ import annotations

import gc
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pytest

from btrfs_ublk.testing.lifetime import closed, opened
from btrfs_ublk.testing.requirements import do_without, front_end_of, need
from btrfs_ublk.testing.settings import settings_of

if TYPE_CHECKING:
    from btrfs_ublk.base.capabilities import Capability

T = TypeVar("T")
Held = TypeVar("Held")


class Factory(ABC, Generic[T]):
    """Makes things of one kind when called. All are removed at the end of the fixture's
    scope, the youngest first.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._config = request.config
        self._stack = ExitStack()
        self.settings = settings_of(request.config)
        #: The front end of what it serves: of the closest marker, else of the settings.
        self.front_end = front_end_of(request.node)
        opened(self._config, self)

    @abstractmethod
    def default(self) -> T:
        """Make what a fixture without ``_factory`` provides."""

    def need(self, *capabilities: Capability) -> None:
        """Skip the test where one is missing; fail it under --btrfs-ublk-require."""
        need(self._config, *capabilities)

    @contextmanager
    def capabilities(self) -> Iterator[None]:
        """Skip the test also when the block raises CapabilityError."""
        from btrfs_ublk.errors import CapabilityError

        try:
            yield
        except CapabilityError as error:
            hint = f" ({error.hint})" if error.hint else ""
            do_without(self._config, f"{error.message}{hint}")

    def hold(self, context: AbstractContextManager[Held]) -> Held:
        """Enter a context, and exit it at the end of the scope."""
        from btrfs_ublk.base.signals import deferred

        # NB: signals are deferred, as one between entering and noting would lose it.
        with self.capabilities(), deferred():
            return self._stack.enter_context(context)

    def directory(self) -> Path:
        """Make a directory that is removed at the end of the scope."""
        from tempfile import TemporaryDirectory

        from btrfs_ublk.kernel.temporary import tempdir

        parent = self.settings.images
        if os.geteuid() == 0:
            return self.hold(tempdir(parent=parent))
        # Users other than root have no ledger, and need none: they only make files.
        return Path(self.hold(TemporaryDirectory(prefix="btrfs-ublk-", dir=parent)))

    def close(self) -> None:
        """Remove everything; idempotent. Raises LeftoverError for what is in use."""
        from btrfs_ublk.base.signals import deferred

        _let_go_of_failures()
        with deferred():
            closed(self._config, self)
            self._stack.close()


def _let_go_of_failures() -> None:
    """Close the files that a failed test had open: the traceback that Python keeps
    would keep a volume busy.
    """
    failure = getattr(sys, "last_value", None)
    if failure is not None:
        from btrfs_ublk.base.ledger import release_frames

        release_frames(failure)
        gc.collect()  # and those in cycles, as pytest.raises() makes them


#: What pytest.fixture() returns; the type's name depends on pytest's version.
Fixture = Any


def one_for_each_scope(factory: type[Factory[T]]) -> tuple[Fixture, Fixture, Fixture]:
    """Make fixtures of scope function, module and session for a factory's default."""

    def one(request: pytest.FixtureRequest) -> Iterator[T]:
        with closing(factory(request)) as make:
            yield make.default()

    one.__doc__ = factory.default.__doc__
    return _in_each_scope(one)


def factory_for_each_scope(
    factory: type[Factory[T]],
) -> tuple[Fixture, Fixture, Fixture]:
    """Make fixtures of scope function, module and session for a factory."""

    def many(request: pytest.FixtureRequest) -> Iterator[Factory[T]]:
        with closing(factory(request)) as make:
            yield make

    many.__doc__ = factory.__doc__
    return _in_each_scope(many)


def _in_each_scope(function: Callable[..., Any]) -> tuple[Fixture, Fixture, Fixture]:
    return (
        pytest.fixture(scope="function")(function),
        pytest.fixture(scope="module")(function),
        pytest.fixture(scope="session")(function),
    )
