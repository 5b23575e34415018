"""docs/reference/compat.md is true: it lists what torch has, and each name that is present does something."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from compat import write
from compat.registry import doing_nothing, find
from compat.smoke_programs import SMOKE
from compat.torch_names import default_text

# Parameters of torch.distributed that procgroup does not have, with a reason.
LEFT_OUT = {"init_process_group": {"_ranks"}}
# Defaults that are objects of torch.
OTHER_DEFAULT = {"ranks_to_exclude", "op"}


@pytest.fixture(scope="module")
def torch_names() -> write.Names:
    pytest.importorskip("torch")
    return write.torch_names()


@pytest.fixture
def every_fourth(request: pytest.FixtureRequest, sampled: bool) -> None:
    name: str = request.node.callspec.params["name"]
    if sampled and sorted(SMOKE).index(name) % 4:
        pytest.skip("runs in make test-all")


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_the_page_lists_what_torch_has(torch_names: write.Names) -> None:
    expected = write.page(torch_names)
    assert write.PAGE.read_text() == expected, "run: python tests/compat/write.py"


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_signatures_are_torchs(torch_names: write.Names) -> None:
    different = {}
    for name, described in torch_names[write.TORCH].items():
        theirs = described["parameters"]
        if name not in SMOKE or theirs is None or inspect.isclass(getattr(*find(name))):
            continue
        wanted = [one for one in theirs if one[0] not in LEFT_OUT.get(name, ())]
        if not is_compatible(parameters_of(name), wanted):
            different[name] = (parameters_of(name), wanted)
    assert different == {}


def parameters_of(name: str) -> list[list[str]]:
    signature = inspect.signature(getattr(*find(name)))
    return [[one.name, default_text(one.default)] for one in signature.parameters.values()]


def is_compatible(ours: list[list[str]], theirs: list[list[str]]) -> bool:
    """Torch's parameters come first, with its defaults; the only others are ours alone."""
    same = all(
        our[0] == their[0] and (our[0] in OTHER_DEFAULT or our[1] == their[1])
        for our, their in zip(ours, theirs, strict=False)
    )
    return (
        same
        and len(ours) >= len(theirs)
        and {name for name, _ in ours[len(theirs) :]} <= {"timeout", "safe", "deterministic", "retain"}
    )


@pytest.mark.parametrize("name", sorted(SMOKE))
def test_a_present_name_works(name: str, every_fourth: Any) -> None:
    SMOKE[name].run()


@pytest.mark.parametrize("name", sorted(SMOKE))
@pytest.mark.filterwarnings("ignore")
def test_its_program_fails_when_the_name_does_nothing(name: str, every_fourth: Any) -> None:
    with doing_nothing(name), pytest.raises((Exception, pytest.fail.Exception)):
        SMOKE[name].run()


def test_each_name_is_put_back() -> None:
    for name in SMOKE:
        before = getattr(*find(name))
        with doing_nothing(name):
            assert getattr(*find(name)) is not before
        assert getattr(*find(name)) == before
