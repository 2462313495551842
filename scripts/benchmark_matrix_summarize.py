#!/usr/bin/env python3
"""The tables of a matrix, from a checkout: btrfs-ublk bench summarize; see --help."""

import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

from venv_command import execute  # noqa: E402

execute("bench", "summarize")
