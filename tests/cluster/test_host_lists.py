"""Slurm's lists of hosts mean what `scontrol show hostnames` says."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

import pytest

from procgroup.cluster.slurm import expand_hosts

LISTS = {
    "login": ["login"],
    "n[1-3,07-09],login": ["n1", "n2", "n3", "n07", "n08", "n09", "login"],
    "a[1-2]b[01-02],c": ["a1b01", "a1b02", "a2b01", "a2b02", "c"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[08-11]": ["n08", "n09", "n10", "n11"],
    "n[1-3]-ib[0,2]": ["n1-ib0", "n1-ib2", "n2-ib0", "n2-ib2", "n3-ib0", "n3-ib2"],
    "n[5,1]": ["n5", "n1"],
}


@pytest.mark.parametrize("text", LISTS)
def test_a_list_names_its_hosts_in_order(text: str) -> None:
    assert expand_hosts(text) == LISTS[text]


def test_scontrol_names_the_same_hosts(slurm: Mapping[str, str]) -> None:
    for text, hosts in LISTS.items():
        shown = subprocess.run(["scontrol", "show", "hostnames", text], env=slurm, capture_output=True, text=True)
        assert shown.stdout.split() == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n]1[", "n[2-1]", "n[a]", "n[]", "a,,b", "a b", "n[1-9999999999]"])
def test_what_is_no_list_of_hosts_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        expand_hosts(text)
    assert repr(text) in str(caught.value)
