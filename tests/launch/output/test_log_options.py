"""The values of the flags about output: torchrun's forms, local ranks of several digits, clear refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from procgroup.launch.output import log_options
from procgroup.launch.output.log_options import (
    STDERR,
    STDOUT,
    LogOptions,
    Streams,
    fill_prefix,
    format_ranks,
    parse_ranks,
    prefix_template,
)


@pytest.mark.parametrize(("text", "stdout", "stderr"), [("0", 0, 0), ("1", 1, 0), ("2", 0, 1), ("3", 1, 1)])
def test_one_number_is_for_all_ranks(text: str, stdout: int, stderr: int) -> None:
    chosen = log_options.streams(text)
    assert [chosen.has(7, STDOUT), chosen.has(7, STDERR)] == [stdout, stderr]


def test_a_map_is_by_local_rank_of_any_number_of_digits() -> None:
    chosen = log_options.streams("0:1,10:3, 123:2")
    assert chosen == Streams(0, {0: 1, 10: 3, 123: 2})
    assert [chosen.has(10, STDOUT), chosen.has(1, STDOUT), chosen.has(123, STDOUT)] == [True, False, False]
    assert not log_options.streams("0:0")


def test_filters_are_words_and_two_commas_are_one() -> None:
    assert log_options.filters("loss") == ("loss",)
    assert log_options.filters("a b,,c,d") == ("a b,c", "d")
    assert log_options.filters("") == ()


def test_ranks_are_numbers_and_ranges() -> None:
    assert parse_ranks("0,3-5, 9") == {0, 3, 4, 5, 9}
    assert format_ranks([5, 3, 4, 0, 9, 10]) == "0, 3-5, 9, 10"
    assert parse_ranks(format_ranks(range(64))) == set(range(64))


@pytest.mark.parametrize(
    ("read", "text", "sentence"),
    [
        (log_options.streams, "4", "expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or 0:1,10:3, got '4'"),
        (log_options.streams, "", "got ''"),
        (log_options.streams, "0:1,", "got '0:1,'"),
        (log_options.streams, "²:1", "got '²:1'"),
        (log_options.streams, "0:1,00:2", "local rank 0 is given twice"),
        (log_options.filters, "a,,,", "got an empty one in 'a,,,'"),
        (parse_ranks, "", "expected ranks such as 0,3-5, got ''"),
        (parse_ranks, "-1", "got '-1'"),
        (parse_ranks, "5-3", "expected the smaller rank first, got '5-3'"),
        (parse_ranks, "0-99999999999", "expected ranks such as 0,3-5"),
        (log_options.prefix, "[{rnak}]", "expected {rank}, {local_rank}, {node_rank}, {host}, {role} in the template"),
        (log_options.prefix, "a\nb", "expected one line of printable text"),
        (log_options.collapse, "yes", "expected auto, always or never, got 'yes'"),
    ],
)
def test_an_unusable_value_is_shown_with_what_was_expected(
    read: Callable[[str], object], text: str, sentence: str
) -> None:
    with pytest.raises(ValueError) as refused:
        read(text)
    assert sentence in str(refused.value)


def test_a_prefix_gets_a_space_unless_it_is_empty_or_has_one() -> None:
    assert log_options.prefix("[r{rank} {host}]") == "[r{rank} {host}] "
    assert log_options.prefix("{rank}> ") == "{rank}> "
    assert log_options.prefix("") == ""
    assert fill_prefix("[r{rank} {host}] ", rank=3, host="{role}", role="x") == "[r3 {role}] "


def test_the_default_prefix_names_the_host_where_there_are_several() -> None:
    assert prefix_template(None, 1) == "[rank {rank}] "
    assert prefix_template(None, 2) == "[rank {rank} {host}] "
    assert prefix_template("", 2) == ""


def test_torch_s_template_is_used_as_it_is_unless_the_flag_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}-${local_rank}:${rank}]:")
    assert fill_prefix(prefix_template(None, 1), role="trainer", local_rank=1, rank=9) == "[trainer-1:9]:"
    assert prefix_template("mine ", 1) == "mine "
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${host}")
    with pytest.raises(ValueError, match=r"PREFIX_TEMPLATE: expected \$\{role_name\}.*got \$\{host\}"):
        prefix_template(None, 1)


def test_redirected_streams_are_kept_and_not_shown_unless_tee_says_so() -> None:
    options = LogOptions(redirects=log_options.streams("3"), tee=log_options.streams("1:2"))
    assert not options.shows(0, 0, STDOUT) and options.keeps(0, STDOUT)
    assert not options.shows(1, 1, STDOUT)
    assert options.shows(1, 1, STDERR) and options.keeps(1, STDERR)


def test_a_directory_keeps_all_and_hides_nothing() -> None:
    options = LogOptions(directory="logs")
    assert options.shows(0, 0, STDOUT) and options.keeps(0, STDOUT)
    assert not LogOptions().keeps(0, STDOUT)


def test_ranks_are_chosen_by_their_global_or_their_local_number() -> None:
    options = LogOptions(shown_ranks=parse_ranks("4-6"), shown_local_ranks=parse_ranks("0"))
    assert [options.shows(rank, rank - 4, STDOUT) for rank in (4, 5, 8)] == [True, False, False]
