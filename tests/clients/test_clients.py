"""Libraries that are built on torch.distributed compute on procgroup what they compute on Gloo."""

from __future__ import annotations

import pytest
from clients.client_programs import Program, clients, play, programs, wrong_in
from clients.measure import PAGE, page

PROGRAMS = [program for client in clients() for program in programs(client)]
INSTALLATION = 900
"""Seconds that the first test of a client may take longer: it makes the environment."""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=pytest.mark.timeout(INSTALLATION + 4 * program.seconds), id=str(program))
        for program in PROGRAMS
    ],
)
def test_a_client_computes_on_procgroup_what_it_computes_on_gloo(program: Program) -> None:
    on_gloo = play(program, "gloo")
    assert not (wrong := wrong_in(program, on_gloo)), f"gloo: {wrong}"
    for way in program.ways[1:]:
        wrong = wrong_in(program, play(program, way), on_gloo)
        assert not wrong, f"{way}: {wrong}"


def test_the_page_says_what_the_results_say() -> None:
    assert PAGE.read_text() == page(), "write it again: python tests/clients/measure.py --page"
