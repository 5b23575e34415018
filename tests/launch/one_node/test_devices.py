"""--gpus and --virtual-local-rank: which GPUs each rank sees, within what the user's environment names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from procgroup.launch import flags
from procgroup.launch.ranks.placement import choose_devices

SHOW = "import os; print(os.environ['LOCAL_RANK'], os.environ.get('CUDA_VISIBLE_DEVICES'))"


def chosen(
    gpus: str, ranks: int, environment: Mapping[str, str], present: int = 8, *, one_each: bool = False
) -> list[dict[str, str]]:
    found = choose_devices(flags.gpus(gpus), ranks, environment, present, has_one_each=one_each)
    return [found.environment(rank) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        ("0,2,3", None, "0,2,3"),
        ("2-3,0", None, "2,3,0"),
        ("0,2", "4,5,6,7", "4,6"),
        ("1", "GPU-aa,GPU-bb", "GPU-bb"),
        ("GPU-cc", None, "GPU-cc"),
        ("GPU-bb", "GPU-aaaa,GPU-bbbb", "GPU-bb"),
        ("MIG-1/0", "0,1", "MIG-1/0"),
    ],
)
def test_numbers_count_within_the_user_s_variable_and_uuids_pass(gpus: str, visible: str | None, expected: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert chosen(gpus, 1, environment) == [{"CUDA_VISIBLE_DEVICES": expected}]


@pytest.mark.parametrize(("visible", "expected"), [("4,5,6", ["4", "5"]), ("GPU-a,MIG-b", ["GPU-a", "MIG-b"])])
def test_with_a_virtual_local_rank_each_rank_sees_one_gpu_as_device_0(visible: str, expected: list[str]) -> None:
    found = chosen("", 2, {"CUDA_VISIBLE_DEVICES": visible}, one_each=True)
    assert found == [{"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpu} for gpu in expected]


def test_both_flags_together_divide_the_gpus_that_are_left() -> None:
    found = chosen("0,2", 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, one_each=True)
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in found] == ["4", "6"]


def test_the_variable_of_hip_is_used_where_the_user_has_set_it() -> None:
    assert chosen("1", 1, {"HIP_VISIBLE_DEVICES": "2,3"}) == [{"HIP_VISIBLE_DEVICES": "3"}]
    both = {"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert chosen("1", 1, both) == [{"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}]


def test_without_the_flags_nothing_is_set_and_nothing_is_refused() -> None:
    assert chosen("", 9, {"CUDA_VISIBLE_DEVICES": "0"}) == [{}] * 9


@pytest.mark.parametrize(
    ("gpus", "ranks", "environment", "one_each", "sentence"),
    [
        ("0,2", 3, {}, False, "3 ranks need a GPU each, but there are 2 GPUs: --gpus is 0,2"),
        ("", 3, {"CUDA_VISIBLE_DEVICES": "7"}, True, "but there is 1 GPU: CUDA_VISIBLE_DEVICES is '7'"),
        ("", 2, {"CUDA_VISIBLE_DEVICES": ""}, True, "but there are no GPUs: CUDA_VISIBLE_DEVICES is ''"),
        ("", 9, {}, True, "but there are 8 GPUs on this host; where they are not found, name them"),
        ("8", 1, {}, False, "--gpus names GPU 8, but this host has only the numbers 0 to 7"),
        ("2", 1, {"CUDA_VISIBLE_DEVICES": "3,4"}, False, "but CUDA_VISIBLE_DEVICES=3,4 has only the numbers 0 to 1"),
        ("0", 1, {"CUDA_VISIBLE_DEVICES": "-1"}, False, "but CUDA_VISIBLE_DEVICES=-1 has none"),
        ("GPU-c", 1, {"CUDA_VISIBLE_DEVICES": "GPU-a"}, False, "--gpus names GPU-c, but CUDA_VISIBLE_DEVICES=GPU-a le"),
    ],
)
def test_gpus_that_are_not_there_are_named(
    gpus: str, ranks: int, environment: dict[str, str], one_each: bool, sentence: str
) -> None:
    with pytest.raises(ValueError) as raised:
        chosen(gpus, ranks, environment, one_each=one_each)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a", "expected GPUs by number or UUID, such as 0,2-3 or GPU-8d0b77ac, got 'a'"),
        ("3-1", "got '3-1'"),
        ("0-99999999999", "got '0-99999999999'"),
        ("1,0-1", "GPU 1 is listed twice in '1,0-1'"),
    ],
)
def test_an_unusable_list_of_gpus_says_why(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        flags.gpus(text)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("word", ["gpu", "auto"])
def test_as_many_ranks_as_gpus_means_those_that_the_flag_leaves(word: str) -> None:
    assert flags.parse("run", ["-n", word, "--gpus", "1,3,5", "a.py"]).nproc_per_node == 3


def test_ranks_see_their_gpus_and_the_replaced_variable_is_said(launcher: Any) -> None:
    given = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    done = launcher.run(SHOW, "-n", "gpu", "--gpus", "0,2", "--virtual-local-rank", environment=given)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 4", "[rank 1] 0 6"]
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7 becomes 4,6, one of them per rank (--gpus 0,2)\n" in done.stderr


def test_the_user_s_variable_stays_where_nothing_changes(launcher: Any) -> None:
    given = {"CUDA_VISIBLE_DEVICES": "4,5"}
    done = launcher.run(SHOW, "-n", "2", "--gpus", "0,1", environment=given)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 4,5", "[rank 1] 1 4,5"]
    assert "becomes" not in done.stderr


def test_more_ranks_than_gpus_are_refused_with_both_numbers_and_none_is_started(launcher: Any) -> None:
    done = launcher.run(SHOW, "-n", "3", "--virtual-local-rank", environment={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "3 ranks need a GPU each, but there are 2 GPUs: CUDA_VISIBLE_DEVICES is '0,1'" in done.stderr
    assert "(set by --nproc-per-node, --virtual-local-rank)" in done.stderr


def test_the_old_contract_s_argument_is_0_too_where_each_rank_sees_one_gpu(launcher: Any) -> None:
    source = "import sys; print(sys.argv[1:])"
    given = {"CUDA_VISIBLE_DEVICES": "0,1"}
    done = launcher.run(source, "-n", "2", "--virtual-local-rank", environment=given, command="launch")
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] ['--local-rank=0']" for rank in range(2)]
