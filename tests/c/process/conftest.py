"""Fixtures of tests of the fetch process."""

from support.fetchers import server

__all__ = ["server"]
