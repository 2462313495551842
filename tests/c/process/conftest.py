"""Fixtures of tests of the fetch process."""

from __future__ import annotations

from support.fetchers import server

__all__ = ["server"]
