"""A random fault in the middle of random calls: every survivor ends and names the rank at fault.

No result is wrong, and no barrier ends without the rank at fault. The name of a test has what it takes to play its
world again: seed, fault and layout.
"""

from __future__ import annotations

import pytest
from failures.faults import FAULTS, LAYOUTS, Plan, defects, play

pytestmark = pytest.mark.timeout(60)

layouts = pytest.mark.parametrize("layout", LAYOUTS)
faults = pytest.mark.parametrize("fault", FAULTS)


def play_one(layout: str, fault: str, seed: int) -> None:
    plan = Plan.of(seed, layout, fault)
    found = defects(plan, *play(plan))
    assert not found, "\n".join([str(plan), *found])


@layouts
@faults
def test_survivors_of_a_fault_name_the_rank_at_fault(layout: str, fault: str) -> None:
    play_one(layout, fault, 0)


@pytest.mark.slow
@layouts
@faults
@pytest.mark.parametrize("seed", range(1, 30))
def test_survivors_of_any_fault_name_the_rank_at_fault(layout: str, fault: str, seed: int) -> None:
    play_one(layout, fault, seed)
