"""Fixtures of tests of images as volumes."""

from __future__ import annotations

from support.image_forks import place

__all__ = ["place"]
