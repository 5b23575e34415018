"""The programs whose types are checked run, and overloads are what the functions are."""

from __future__ import annotations

import inspect
import typing

import pytest
from annotations import idioms

import procgroup
from procgroup.groups.group import ProcessGroup

NAMES = {
    **{f"procgroup.{name}": getattr(procgroup, name) for name in procgroup._MODULE_OF_NAME},
    **{f"ProcessGroup.{name}": value for name, value in inspect.getmembers(ProcessGroup, inspect.isfunction)},
}
OVERLOADED = sorted(name for name, value in NAMES.items() if inspect.isfunction(value) and typing.get_overloads(value))


def test_the_programs_whose_types_are_checked_run() -> None:
    idioms.main()


def test_every_operation_that_can_be_asynchronous_is_overloaded() -> None:
    asynchronous = {
        name
        for name, value in NAMES.items()
        if inspect.isfunction(value) and "._" not in name and "async_op" in inspect.signature(value).parameters
    }
    assert asynchronous - {"ProcessGroup.issue_queued"} <= set(OVERLOADED)
    assert len(asynchronous) > 30


@pytest.mark.parametrize("name", OVERLOADED)
def test_overloads_have_the_parameters_of_the_function(name: str) -> None:
    function = NAMES[name]
    expected = inspect.signature(function).parameters
    for overload in typing.get_overloads(function):
        parameters = inspect.signature(overload).parameters
        assert set(parameters) <= set(expected), "none has another name"
        kept = [parameter for parameter in expected if parameter in parameters]
        assert list(parameters) == kept, "in the same order"
        for parameter, seen in parameters.items():
            assert seen.kind == expected[parameter].kind
            if seen.default is not ...:
                assert seen.default in (expected[parameter].default, inspect.Parameter.empty)
