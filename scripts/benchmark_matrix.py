#!/usr/bin/env python3
"""A matrix of benchmark runs, from a checkout: btrfs-ublk bench matrix; see --help."""

import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

from venv_command import execute  # noqa: E402

execute("bench", "matrix")
