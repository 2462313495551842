"""The simulation of fleets against arithmetic, and against what fleet.py has measured
(docs/design/hosts.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("simpy", reason="simpy simulates fleets: scripts/setup --test")

from fleet_simulation import UNIT, Fleet, simulate  # noqa: E402

MEASURED_DIRECT_S = {8: 28.1, 32: 112.5}
SMALL = Fleet(hosts=60, nodes=6)


@pytest.mark.parametrize("hosts", MEASURED_DIRECT_S)
def test_direct_is_what_was_measured(hosts: int) -> None:
    """20 MiB, 50 Mbit/s, in namespaces."""
    measured = Fleet(
        hosts=hosts,
        nodes=0,
        read_bytes=20 << 20,
        origin_rate=50e6 / 8,
        origin_rtt_s=0.0,
    )
    found = simulate(measured)
    assert found.most_s == pytest.approx(MEASURED_DIRECT_S[hosts], rel=0.1)
    assert found.origin_times == pytest.approx(hosts)


def test_a_ring_fetches_each_unit_once() -> None:
    cold = simulate(SMALL)
    assert cold.origin_times == pytest.approx(1)
    assert simulate(replace(SMALL, warm=True)).origin_times == 0
    direct = simulate(replace(SMALL, nodes=0))
    assert direct.origin_times == pytest.approx(60) and direct.fronts == 0


def test_one_front_takes_as_long_as_its_link() -> None:
    """All of a small object is one part, for which all hosts ask one front."""
    small = replace(
        SMALL, warm=True, read_bytes=16 * UNIT, object_bytes=16 * UNIT, node_rate=1e8
    )
    found = simulate(small)
    assert found.fronts == 1
    link_s = 60 * 16 * UNIT / 1e8
    assert link_s <= found.most_s < 1.2 * link_s
    # With fronts of their own, hosts use the whole ring.
    own = simulate(replace(small, choice="host"))
    assert own.fronts == 6 and own.most_s < found.most_s / 2
