"""The changes of a job's state: who is in a round, when it begins and ends, what counts as a restart, who may go on."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procgroup.errors import JobConflict, JobEnded
from procgroup.launch.hosted_store import WorkerStore
from procgroup.launch.nodes import job_changes as change
from procgroup.launch.nodes.job_state import JobState, Node, Settings, can_begin


def node(name: str, **more: object) -> Node:
    return Node(id=name, agent=name, host=f"host-{name}", pid=1, **{"processes": 1, **more})  # type: ignore[arg-type]


def forming(names: str, least: int, most: int, restarts: int = 0, policy: str = "") -> JobState:
    state = JobState(Settings(least, most, restarts, policy))
    for name in names:
        state = change.join(state, node(name), state.settings) or state
    return state


def running(names: str, least: int, most: int, restarts: int = 0, policy: str = "") -> JobState:
    state = forming(names, least, most, restarts, policy)
    if state.phase == "forming":
        state = change.begin(state, 0) or state
    assert state.phase == "running"
    return state


def all_stopped(state: JobState) -> JobState:
    for member in state.members:
        state = change.stopped(state, state.round, member.id) or state
    return state


def names(nodes: Sequence[Node]) -> str:
    return "".join(member.id for member in nodes)


def test_a_round_begins_at_once_with_the_largest_number_of_nodes() -> None:
    assert forming("ab", 2, 2).phase == "running"
    assert forming("ab", 1, 3).phase == "forming"


def test_a_round_begins_with_the_smallest_number_only_when_an_agent_says_so() -> None:
    assert change.begin(forming("a", 2, 3), 0) is None
    begun = change.begin(forming("ab", 2, 3), 0)
    assert begun is not None
    assert begun.phase == "running"


def test_ranks_are_contiguous_in_the_order_of_the_nodes() -> None:
    state = JobState(Settings(2, 2))
    for name, processes in (("a", 3), ("b", 2)):
        state = change.join(state, node(name, processes=processes), state.settings) or state
    rounds = [state.round_of(index, WorkerStore("h", 1, 2, "")) for index in range(2)]
    assert [round_.first_rank for round_ in rounds] == [0, 3]
    assert sum(rounds[0].processes) == 5


def test_a_node_rank_that_was_fixed_wins_over_the_order_of_coming() -> None:
    state = JobState(Settings(2, 2))
    for name, rank in (("a", 1), ("b", 0)):
        state = change.join(state, node(name, rank=rank), state.settings) or state
    assert names(state.members) == "ba"


def test_two_nodes_with_one_rank_are_a_conflict_that_names_both() -> None:
    state = change.join(JobState(Settings(3, 3)), node("a", rank=1), Settings(3, 3))
    assert state is not None
    with pytest.raises(JobConflict, match="--node-rank 1: host-a .* and host-b"):
        change.join(state, node("b", rank=1), state.settings)


def test_other_settings_are_a_conflict_that_names_both_values() -> None:
    with pytest.raises(JobConflict, match="max_restarts is 1 here and 0 on host-a"):
        change.join(forming("a", 1, 2), node("b"), Settings(1, 2, 1))


def test_a_node_that_comes_to_a_job_that_has_ended_is_refused() -> None:
    state = all_stopped(change.end(running("a", 1, 1), "enough", 1) or JobState(Settings()))
    with pytest.raises(JobEnded, match="enough"):
        change.join(state, node("b"), Settings())


def test_the_job_ends_when_every_member_has_finished() -> None:
    state = running("ab", 2, 2)
    state = change.finish(state, 0, "a") or state
    assert state.phase == "running"
    assert change.finish(state, 0, "a") is None
    state = change.finish(state, 0, "b") or state
    assert (state.phase, state.exit_status) == ("ended", 0)


def test_a_failure_without_restarts_ends_the_job_when_all_ranks_have_ended() -> None:
    state = change.fail(running("ab", 2, 2), 0, "rank 1 failed", ["{}"], 17)
    assert state is not None
    assert (state.phase, state.is_last) == ("stopping", True)
    state = all_stopped(state)
    assert (state.phase, state.exit_status, state.reason) == ("ended", 17, "rank 1 failed")


def test_a_failure_with_a_restart_left_begins_the_next_round_and_counts_one() -> None:
    state = all_stopped(change.fail(running("ab", 2, 2, restarts=1), 0, "rank 1 failed") or JobState(Settings()))
    assert (state.phase, state.round, state.restarts, names(state.members)) == ("running", 1, 1, "ab")
    assert state.store is None


def test_failures_of_several_nodes_in_one_round_count_one_restart() -> None:
    state = change.fail(running("abc", 3, 3, restarts=2), 0, "rank 0 failed", ["first"])
    assert state is not None
    state = change.fail(state, 0, "rank 2 failed", ["second"]) or state
    assert (state.restarts, state.failures, state.reason) == (1, ("first", "second"), "rank 0 failed")


def test_what_belongs_to_an_earlier_round_changes_nothing() -> None:
    state = all_stopped(change.fail(running("ab", 2, 2, restarts=1), 0, "failed") or JobState(Settings()))
    assert change.fail(state, 0, "late") is None
    assert change.finish(state, 0, "a") is None
    assert change.stopped(state, 0, "a") is None
    assert change.publish(state, 0, WorkerStore("h", 1, 2, "")) is None


def test_a_node_that_joins_below_the_largest_number_restarts_all_and_is_not_counted() -> None:
    state = change.join(running("a", 1, 2), node("b"), Settings(1, 2))
    assert state is not None
    assert (state.phase, names(state.waiting)) == ("stopping", "b")
    state = all_stopped(state)
    assert (state.phase, names(state.members), state.restarts) == ("running", "ab", 0)


def test_a_spare_node_restarts_nobody_and_takes_the_place_of_a_lost_one() -> None:
    state = change.join(running("ab", 2, 2, restarts=1), node("c"), Settings(2, 2, 1))
    assert state is not None
    assert state.phase == "running"
    state = all_stopped(change.lose(state, {"a": "killed"}, silent=False) or state)
    assert (state.phase, names(state.members), state.waiting) == ("running", "bc", ())


def test_a_lost_member_counts_one_restart_and_the_order_of_the_others_is_kept() -> None:
    state = all_stopped(change.lose(running("abc", 1, 3, 1), {"b": "killed"}, silent=False) or JobState(Settings()))
    assert (state.phase, names(state.members), state.restarts) == ("running", "ac", 1)


def test_a_lost_member_without_restarts_ends_the_job_and_is_named() -> None:
    state = all_stopped(change.lose(running("ab", 1, 2), {"b": "killed"}, silent=False) or JobState(Settings()))
    assert (state.phase, state.exit_status, state.reason) == ("ended", 1, "host-b was lost: killed")


def test_too_few_survivors_wait_for_another_node() -> None:
    state = all_stopped(change.lose(running("ab", 2, 2, 1), {"b": "killed"}, silent=False) or JobState(Settings()))
    assert state.phase == "forming"
    state = change.join(state, node("c"), state.settings) or state
    assert (state.phase, names(state.members)) == ("running", "ac")


def test_a_member_that_has_finished_is_not_missed() -> None:
    state = change.finish(running("ab", 2, 2), 0, "a") or JobState(Settings())
    assert change.lose(state, {"a": "killed"}, silent=False) is None


@pytest.mark.parametrize(("lost", "phase"), [("c", "running"), ("bc", "forming")])
def test_only_more_than_half_goes_on_after_a_silent_loss(lost: str, phase: str) -> None:
    state = change.lose(running("abc", 1, 3, 1), dict.fromkeys(lost, "silent"), silent=True)
    assert all_stopped(state or JobState(Settings())).phase == phase


def test_those_that_are_known_to_be_dead_are_no_half_of_anything() -> None:
    state = change.lose(running("abc", 1, 3, 1), dict.fromkeys("bc", "killed"), silent=False)
    assert all_stopped(state or JobState(Settings())).phase == "running"


@pytest.mark.parametrize(("policy", "phase"), [("", "running"), ("continue", "running"), ("stop", "forming")])
def test_half_of_two_goes_on_with_the_store_unless_told_to_stop(policy: str, phase: str) -> None:
    state = change.lose(running("ab", 1, 2, 1, policy), {"b": "silent"}, silent=True)
    assert all_stopped(state or JobState(Settings())).phase == phase


@pytest.mark.parametrize(("policy", "may"), [("", False), ("continue", True), ("stop", False)])
def test_half_of_two_that_has_lost_the_store_goes_on_only_when_told_to(policy: str, may: bool) -> None:
    memory = change.after_losing_store(running("ab", 1, 2, 1, policy), silent=True)
    state = change.recall(JobState(memory.settings), memory)
    assert state is not None
    state = change.join(state, node("b"), state.settings) or state
    assert can_begin(state) is may
    assert (state.round, state.restarts) == (1, 1)


def test_a_store_host_that_is_known_to_be_dead_is_no_half() -> None:
    state = JobState(Settings(1, 2, 1))
    for member in (node("a", hosts_store=True), node("b")):
        state = change.join(state, member, state.settings) or state
    memory = change.after_losing_store(state, silent=False)
    state = change.recall(JobState(memory.settings), memory) or state
    assert can_begin(change.join(state, node("b"), state.settings) or state)


def test_a_member_that_leaves_lets_the_others_go_on_uncounted() -> None:
    state = change.leave(running("abc", 1, 3), "b", "SIGTERM", exit_status=143, for_good=False)
    state = all_stopped(state or JobState(Settings()))
    assert (state.phase, names(state.members), state.restarts) == ("running", "ac", 0)


@pytest.mark.parametrize(
    ("restarts", "for_good", "phase"), [(0, False, "ended"), (1, True, "ended"), (1, False, "forming")]
)
def test_where_too_few_are_left_the_job_ends_or_waits_for_a_node(restarts: int, for_good: bool, phase: str) -> None:
    state = change.leave(running("ab", 2, 2, restarts), "b", "SIGTERM", exit_status=143, for_good=for_good)
    state = all_stopped(state or JobState(Settings()))
    assert state.phase == phase
    assert state.exit_status == (143 if phase == "ended" else 0)


def test_a_job_whose_members_are_all_gone_begins_anew_for_those_that_came_later() -> None:
    state = change.join(running("ab", 2, 2), node("c"), Settings(2, 2)) or JobState(Settings())
    state = change.lose(state, dict.fromkeys("ab", "silent"), silent=True) or state
    assert (state.phase, names(state.members), state.restarts, state.previous) == ("forming", "c", 0, ())


def test_agents_that_had_lost_the_store_take_the_places_that_they_had_and_it_counts_once() -> None:
    state = running("abc", 2, 3, 1)
    for name in "abc":
        again = node(name)._replace(id=f"{name} again")
        state = change.join(state, again, state.settings) or JobState(Settings())
    assert (state.phase, state.restarts) == ("running", 1)
    assert [member.id for member in state.members] == ["a again", "b again", "c again"]


def test_an_agent_that_had_lost_the_store_comes_again_while_the_others_still_run() -> None:
    state = running("abc", 2, 3, 1)
    again = state.members[1]._replace(id="b again")
    state = change.join(state, again, state.settings) or JobState(Settings())
    assert (state.phase, state.reason.endswith("was lost: its agent had lost the store")) == ("stopping", True)
    state = all_stopped(state)
    assert (state.phase, [member.id for member in state.members]) == ("running", ["a", "b again", "c"])


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"null", b'{"settings": 3}', b"\xff", b'{"members": [{}]}'])
def test_what_is_no_state_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="expected a job's state"):
        JobState.from_json(text)


@pytest.mark.parametrize(
    ("name", "value"), [("phase", "asleep"), ("restarts", "many"), ("notice", []), ("settings", {"max_nodes": "3"})]
)
def test_a_state_with_a_value_of_another_kind_is_refused(name: str, value: object) -> None:
    fields = json.loads(running("ab", 1, 2).to_json())
    with pytest.raises(ValueError, match="expected a job's state"):
        JobState.from_json(json.dumps(fields | {name: value}))


def test_names_and_reasons_from_other_nodes_cannot_steer_a_terminal() -> None:
    fields = json.loads(running("ab", 1, 2).to_json()) | {"reason": "\x1b[2Jgone"}
    fields["members"][0]["host"] = "a\x1b]0;title\x07"
    state = JobState.from_json(json.dumps(fields))
    assert (state.reason, state.members[0].host) == ("?[2Jgone", "a?]0;title?")


def test_agents_of_one_host_are_told_apart() -> None:
    twins = [node(name)._replace(host="vm", pid=pid) for name, pid in (("a", 11), ("b", 12))]
    state = JobState(Settings(1, 4), members=(*twins, node("c")))
    assert [state.name(member) for member in state.members] == ["vm (agent's pid 11)", "vm (agent's pid 12)", "host-c"]
    assert state.hosts == "vm (2 agents), host-c"


def test_a_state_survives_its_text() -> None:
    state = change.publish(running("ab", 1, 2, 3, "stop"), 0, WorkerStore("h", 1, 2, "k"))
    assert state is not None
    assert JobState.from_json(state.to_json()) == state


ACTIONS = st.sampled_from(["join", "begin", "publish", "finish", "fail", "stopped", "lose", "silent", "leave"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.sampled_from("abcdef")), max_size=60), st.integers(1, 3), st.integers(0, 2))
def test_no_order_of_events_breaks_the_rules_or_leaves_a_job_that_nobody_can_move(
    events: list[tuple[str, str]], least: int, restarts: int
) -> None:
    state = JobState(Settings(least, 4, restarts, "continue"))
    for action, name in events:
        state = apply(state, action, name) or state
        ids = [member.id for member in (*state.members, *state.waiting)]
        assert len(ids) == len(set(ids))
        assert state.restarts <= restarts
        assert len(state.members) <= 4
        assert JobState.from_json(state.to_json()) == state
    # Whatever has happened: when every member does its part, the job ends or waits for nodes only.
    for _ in range(3):
        if state.phase == "forming":
            state = change.begin(state, state.round) or state
        state = all_stopped(state)
        for member in state.members:
            state = change.finish(state, state.round, member.id) or state
    assert state.phase == "ended" or (state.phase == "forming" and not can_begin(state))


def apply(state: JobState, action: str, name: str) -> JobState | None:
    if action == "join":
        try:
            return change.join(state, node(name), state.settings)
        except JobEnded:
            return None
    if action in ("lose", "silent"):
        return change.lose(state, {name: "gone"}, silent=action == "silent")
    changes = {
        "begin": lambda: change.begin(state, state.round),
        "publish": lambda: change.publish(state, state.round, WorkerStore("h", 1, 2, "")),
        "finish": lambda: change.finish(state, state.round, name) if state.node_rank(name) is not None else None,
        "fail": lambda: change.fail(state, state.round, "failed"),
        "stopped": lambda: change.stopped(state, state.round, name) if state.node_rank(name) is not None else None,
        "leave": lambda: change.leave(state, name, "SIGTERM", exit_status=143, for_good=False),
    }
    return changes[action]()
