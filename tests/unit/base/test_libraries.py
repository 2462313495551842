"""A library that is missing is named, with what to install: no raw word of a loader."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import needs

from btrfs_ublk.base.capabilities import Helper
from btrfs_ublk.base.helpers import (
    CHECKSEED,
    MKSEED,
    check_helper,
)
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.seed import make_seed

of_another_machine = needs.of_another_machine  # a fixture


@pytest.mark.usefixtures("of_another_machine")
def test_a_helper_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError) as caught:
        make_seed(tmp_path / "seed", virtual_data_size=1 << 30)
    assert f"{MKSEED} needs the library libjansson.so.7" in caught.value.message
    assert "apt-get install libjansson7" in (caught.value.hint or "")
    assert not (tmp_path / "seed").exists()
    helper = Helper(MKSEED)
    assert "libjansson.so.7" in (helper.probe() or "") and "libjansson7" in helper.hint
    assert Helper(CHECKSEED).probe() is None
    assert check_helper(CHECKSEED) == tmp_path / CHECKSEED
