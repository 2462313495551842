"""Where the project and its tests are."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PROJECT = TESTS.parent
CAMPAIGNS = TESTS / "campaigns"
CHILDREN = TESTS / "support" / "children"
#: Of programs that import `support`.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(TESTS)}
