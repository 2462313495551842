#!/usr/bin/env python3
"""The benchmarks from a checkout, whose .venv is set up first where it is not there:
benchmark.py is btrfs-ublk bench run; and links to it, benchmark_matrix.py and
benchmark_matrix_summarize.py, are bench matrix and summarize. See --help.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NOUNS = {"benchmark": "run", "benchmark_matrix": "matrix"}
SCRIPTS = Path(__file__).resolve().parent

command = SCRIPTS.parent / ".venv/bin/btrfs-ublk"
if not command.exists() or shutil.which("fio") is None:
    # What it says belongs to stderr: stdout is for results.
    setup = [str(SCRIPTS / "setup"), "--bench"]
    if status := subprocess.run(setup, stdout=sys.stderr, check=False).returncode:
        sys.exit(status)
noun = NOUNS.get(Path(__file__).stem, "summarize")
os.execv(command, [str(command), "bench", noun, *sys.argv[1:]])
