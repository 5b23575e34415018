"""Stock DDP, FSDP, DTensor, pipelines, checkpoints and calls give on procgroup what they give on Gloo."""

from __future__ import annotations

import pytest
from parity.torch_programs import GPUS, KINDS, compare, play

from tiers import SAMPLED

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]


def test_programs_give_the_same_on_gloo_and_on_procgroup() -> None:
    played = play(KINDS, ["gloo", "procgroup"], sample=12 if SAMPLED else 0)
    on_gloo, on_procgroup = ([one.program for one in played if one.backend == name] for name in ("gloo", "procgroup"))
    assert on_gloo == on_procgroup and len(on_gloo) >= 12
    wrong = compare(played)
    assert not wrong, "\n".join(wrong)


def test_programs_give_on_gpus_what_they_give_on_gloo() -> None:
    played = play(KINDS, ["gloo"], sample=8 if SAMPLED else 0) + play(KINDS, [GPUS], sample=8 if SAMPLED else 0)
    assert len(played) >= 16
    wrong = compare(played)
    assert not wrong, "\n".join(wrong)
