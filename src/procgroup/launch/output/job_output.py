"""The output of one agent and its ranks: the console and the log files.

::

    stream of a rank ──┬─> LinePrefixer or CollapsingPrefixer ──> Sink      unless redirected, or filtered by rank
                       ├─> LogFile                                          where there is a log directory
                       └─> LineFilter ──> LogFile shared by all ranks       --duplicate-stdout-filters
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from procgroup.launch.output.log_files import (
    JobDirectory,
    LineFilter,
    LogFile,
    TemporaryDirectory,
    make_private_directory,
)
from procgroup.launch.output.log_options import STDERR, STDOUT, LogOptions, Streams, fill_prefix, prefix_template
from procgroup.launch.output.sinks import LinePrefixer, PipeReader, Sink, flush, move_bytes, open_sinks
from procgroup.process.environ import NO_COLOR, TERM

if TYPE_CHECKING:
    from procgroup.launch.output.collapse import Collapser
    from procgroup.launch.output.status_line import ProgressInbox, StatusLine

COLLAPSED_FROM_RANKS = 9
"""The smallest number of ranks for which equal lines are printed once on a terminal. Files and pipes get every line,
because other programs count and search the lines."""

_LOG_NAMES = ("stdout.log", "stderr.log")
# The colours of prefixes, one for each rank: cyan, yellow, green, magenta, blue, and their bright forms.
# Programs use red for errors.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class OutputPlace(NamedTuple):
    """The node's values for prefixes; ``nodes`` is the largest number of nodes in the job."""

    nodes: int = 1
    node_rank: int = 0
    host: str = ""
    role: str = "default"


class StreamOutput(NamedTuple):
    """The destinations of one stream of a rank: the console, and files (None: not there)."""

    sink: Sink
    lines: LinePrefixer | None = None
    log: LogFile | None = None
    filtered: LineFilter | None = None

    def show(self, data: bytes) -> None:
        """Show data on the console."""
        if self.lines is not None:
            self.lines.feed(data)

    def keep(self, data: bytes) -> None:
        """Write data to the files."""
        if self.log is not None:
            self.log.write(data)
        if self.filtered is not None:
            self.filtered.feed(data)

    def finish(self) -> None:
        """Show and write a last line without a newline; the stream has ended."""
        if self.lines is not None:
            self.lines.finish()
        if self.filtered is not None:
            self.filtered.finish()
        if self.log is not None:
            self.log.close()


class RankOutput(NamedTuple):
    """The destinations of a rank's stdout and stderr, and its error file ("": none)."""

    streams: tuple[StreamOutput, StreamOutput]
    error_file: str


class JobOutput:
    """The console and the log files of one agent. Use as a context manager, which removes temporary files at its end.

    The owner calls ``move_bytes`` while ranks run, and ``finish`` before the report. ``progress``, which exists on a
    terminal and with ``needs_progress``, has the address for PROCGROUP_REPORT_SOCKET. ``last_reports`` is the time of
    each rank's last report in this attempt, in monotonic seconds.
    """

    def __init__(
        self, options: LogOptions, run_id: str, sinks: tuple[Sink, Sink] | None = None, *, needs_progress: bool = False
    ) -> None:
        """Raises ValueError when torch's variable for prefixes is not usable, OSError when the log directory cannot be
        made.
        """
        self.sinks: tuple[Sink, Sink] = sinks or open_sinks()
        self.status: StatusLine | None = _open_status(self.sinks[STDERR])
        self.progress: ProgressInbox | None = _open_progress() if self.status or needs_progress else None
        self.last_reports: dict[int, float] = {}
        self._options = options
        self._place = OutputPlace()
        prefix_template(options.prefix, nodes=1)
        self._collapsers: dict[Sink, Collapser] = {}
        self._filtered: list[LogFile | None] = [None, None]
        self._attempt: Path | None = None
        self._has_begun = self._log_has_failed = False
        self._temporary: TemporaryDirectory | None = None
        self._job = self._job_directory(run_id)

    def __enter__(self) -> JobOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_filtered()
        if self._temporary is not None:
            self._temporary.remove()
        if self.progress is not None:
            self.progress.close()

    @property
    def due(self) -> float | None:
        """The time of the next ``tick``, in monotonic seconds; None when nothing is held."""
        times = [collapser.due for collapser in self._collapsers.values()]
        times += [self.status.due] if self.status is not None else []
        return min((time for time in times if time is not None), default=None)

    @property
    def has_failed(self) -> bool:
        """Whether lines are lost because stdout or stderr cannot be written, as on a full disk."""
        return any(sink.has_failed for sink in self.sinks)

    def tick(self) -> None:
        """Print the held lines whose time has come."""
        now = time.monotonic()
        for collapser in self._collapsers.values():
            collapser.show_due(now)
        if self.status is not None:
            self.status.show_due(now)

    def begin_attempt(self, attempt: int, ranks: Sequence[int], place: OutputPlace) -> None:
        """Make the directories for the next start of these global ranks; print their place the first time.

        Where the directories cannot be made, a line says so, and the attempt has no logs.
        """
        self.take_progress()  # reports of the last attempt do not count for this one
        self.finish()
        self._close_filtered()
        self._place = place
        self._attempt = None
        self.last_reports.clear()
        try:
            self._attempt = self._job.begin_attempt(attempt, ranks) if self._job else None
        except OSError as error:
            self._log_failed(Path(error.filename or "the next attempt's logs"), error)
        if self._job and self._attempt and self._temporary is None and not self._has_begun:
            self.say(f"logs are kept in {self._job.path}")
        self._has_begun = True
        self._filtered = [
            self._open(Path(f"filtered_{_LOG_NAMES[stream]}")) if self._options.filters[stream] else None
            for stream in (STDOUT, STDERR)
        ]
        self._collapsers = {}
        choice = self._options.collapse
        on_terminals = choice == "auto" and len(ranks) >= COLLAPSED_FROM_RANKS
        if collapsing := [sink for sink in self.sinks if choice == "always" or (on_terminals and sink.is_terminal)]:
            from procgroup.launch.output.collapse import Collapser  # for many ranks on a terminal

            self._collapsers = {sink: Collapser(sink, len(ranks)) for sink in collapsing}

    def of_rank(self, rank: int, local_rank: int) -> RankOutput:
        """Return the destinations of a rank's output in this attempt."""
        directory = self._attempt / str(rank) if self._attempt else None
        return RankOutput(
            streams=(self._stream(rank, local_rank, STDOUT), self._stream(rank, local_rank, STDERR)),
            error_file=str(directory / "error.json") if directory else "",
        )

    def take_progress(self) -> None:
        """Take what ranks have reported with ``procgroup.report``."""
        if self.progress is not None:
            reports = self.progress.take()
            self.last_reports.update(dict.fromkeys(reports, time.monotonic()))
            if self.status is not None:
                self.status.report(reports)

    def move_bytes(self, streams: Iterable[PipeReader], wake: Iterable[int], timeout: float | None) -> None:
        """Read from the ranks and write to the outputs as soon as possible; a readable ``wake`` ends the wait."""
        reports = {} if self.progress is None else {self.progress.descriptor: self.take_progress}
        if (due := self.due) is not None:
            left = max(0.0, due - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        move_bytes(streams, self.sinks, wake, timeout, reports)
        self.tick()

    def flush(self, streams: Sequence[PipeReader], wake: int, was_interrupted: Callable[[], bool]) -> None:
        """Write all pending output; return early once a signal has come and the output is not read."""
        self.finish()
        flush(self.sinks, lambda seconds: self.move_bytes(streams, [wake], seconds), was_interrupted)

    def say(self, text: str) -> None:
        """Print one line of the launcher on stderr."""
        self.put(f"procgroup run: {text}\n")

    def put(self, text: str) -> None:
        """Print whole lines on stderr."""
        self.sinks[STDERR].put_lines(None, text.encode(errors="replace"))

    def finish(self) -> None:
        """Print all held lines and remove the status line; the ranks of this attempt have ended."""
        for collapser in self._collapsers.values():
            collapser.flush()
        if self.status is not None:
            self.status.clear()

    def _job_directory(self, run_id: str) -> JobDirectory | None:
        """Return the directory of the job's files: the log directory, or a temporary one for the error files."""
        options = self._options
        if options.directory == os.devnull:
            return None
        if options.directory:
            job = JobDirectory(Path(options.directory), run_id)
            job.path.mkdir(parents=True, exist_ok=True)
            return job
        if options.redirects or options.tee or any(options.filters):
            return JobDirectory(make_private_directory(), run_id)
        try:
            self._temporary = TemporaryDirectory()
        except OSError:
            return None
        return JobDirectory(self._temporary.path, run_id)

    def _stream(self, rank: int, local_rank: int, stream: int) -> StreamOutput:
        # Where the files of an attempt cannot be made, its redirected streams are shown rather than lost.
        has_lost_files = self._attempt is None and self._job is not None
        options = self._options._replace(redirects=Streams()) if has_lost_files else self._options
        is_shown = options.shows(rank, local_rank, stream)
        is_kept = self._attempt is not None and self._options.keeps(local_rank, stream)
        return StreamOutput(
            sink=self.sinks[stream],
            lines=self._prefixer(rank, local_rank, self.sinks[stream]) if is_shown else None,
            log=self._open(Path(str(rank), _LOG_NAMES[stream])) if is_kept else None,
            filtered=self._filter(rank, local_rank, stream),
        )

    def _prefixer(self, rank: int, local_rank: int, sink: Sink) -> LinePrefixer:
        prefix = self._prefix(rank, local_rank)
        is_coloured = sink.is_terminal and not NO_COLOR.is_set() and TERM.get() != "dumb"
        if prefix and is_coloured:
            prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        own_prefix = f"[rank{rank}]:"  # of torch's log, and with a blank of the lines of an uncaught exception
        if sink in self._collapsers:
            from procgroup.launch.output.collapse import CollapsingPrefixer

            return CollapsingPrefixer(prefix, self._collapsers[sink], rank, own_prefix)
        return LinePrefixer(prefix, sink, own_prefix)

    def _prefix(self, rank: int, local_rank: int) -> str:
        place = self._place
        return fill_prefix(
            prefix_template(self._options.prefix, place.nodes),
            rank=rank,
            local_rank=local_rank,
            node_rank=place.node_rank,
            host=place.host,
            role=place.role,
        )

    def _filter(self, rank: int, local_rank: int, stream: int) -> LineFilter | None:
        log = self._filtered[stream]
        if log is None:
            return None
        return LineFilter(self._options.filters[stream], self._prefix(rank, local_rank), log)

    def _open(self, name: Path) -> LogFile | None:
        return LogFile(self._attempt / name, self._log_failed) if self._attempt else None

    def _close_filtered(self) -> None:
        for log in self._filtered:
            if log is not None:
                log.close()

    def _log_failed(self, path: Path, error: OSError) -> None:
        """Print once that logs are incomplete; the job goes on."""
        if not self._log_has_failed:
            self._log_has_failed = True
            self.say(f"{path} is no longer written: {error.strerror}; further logs that fail are not reported")


def _open_status(sink: Sink) -> StatusLine | None:
    """Return the status line of a terminal that can erase it again; None for another sink."""
    if not sink.is_terminal or TERM.get() == "dumb":
        return None
    from procgroup.launch.output.status_line import StatusLine

    return StatusLine(sink)


def _open_progress() -> ProgressInbox | None:
    from procgroup.launch.output.status_line import ProgressInbox  # on a terminal only

    try:
        return ProgressInbox()
    except OSError:  # a system without abstract sockets: the status line does without reports
        return None
