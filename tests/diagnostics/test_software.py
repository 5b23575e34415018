"""Versions of Python, procgroup and its libraries: what is missing and needed is a problem, the rest a note."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from diagnostics.made_up_system import one, texts
from procgroup.diagnostics.doctor import software
from procgroup.diagnostics.doctor.findings import Level


def installed(**versions: str) -> Callable[[str], str]:
    return lambda name: versions.get(name.replace("-", "_"), "")


def test_installed_libraries_have_their_versions_and_missing_ones_their_use() -> None:
    found = list(software.check(installed(numpy="2.1", torch="2.13", cupy_cuda12x="13.4")))
    assert "installed: numpy 2.1, torch 2.13, cupy 13.4" in texts(found, Level.OK)
    assert one(found, Level.NOTE).text.startswith("not installed: jax (for JAX's arrays")
    assert not texts(found, Level.PROBLEM)


def test_a_missing_numpy_is_a_problem() -> None:
    assert one(software.check(installed(torch="2.13")), Level.PROBLEM).advice == "Install it: pip install numpy"


def test_a_native_module_that_cannot_be_loaded_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "procgroup._native", None)
    monkeypatch.delattr("procgroup._native", raising=False)
    found = one(software.check(installed(numpy="2.1")), Level.PROBLEM)
    assert "native module cannot be loaded" in found.text and "pip install" in found.advice
