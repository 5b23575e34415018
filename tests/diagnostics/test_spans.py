"""``procgroup explain --otlp`` sends the calls of a job as spans of OpenTelemetry."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from procgroup.diagnostics.recorded_job import reading
from procgroup.diagnostics.recorded_job.job import Job
from world import free_port, run_command

pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from procgroup.diagnostics.explain.spans import spans

PROGRAM = """
import numpy as np
import procgroup as dist

dist.init_process_group()
for step in range(300):
    dist.all_reduce(np.ones(1000))
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("a bad batch")
dist.all_reduce(np.ones(3))
"""


@pytest.fixture(name="recorded", scope="module")
def fixture_recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of a job of two ranks, of which rank 1 failed."""
    directory = tmp_path_factory.mktemp("records")
    (directory / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "2", "--rdzv-id", "digits", "train.py"]
    environment = {"PROCGROUP_RECORD_DIR": str(directory / "jobs")}
    assert run_command(command, timeout=50, directory=directory, environment=environment).returncode == 1
    return next((directory / "jobs").iterdir())


@pytest.fixture(name="job")
def fixture_job(recorded: Path) -> Job:
    return reading.load(recorded, with_stacks=False)


class Receiver(HTTPServer):
    """Keeps what it is sent, as a collector of OpenTelemetry."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.received: list[Any] = []


class Request(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(ExportTraceServiceRequest.FromString(content))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        pass


@pytest.fixture(name="receiver")
def fixture_receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, daemon=True)
        thread.start()
        yield receiver
        receiver.shutdown()
        thread.join()


def explain(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "procgroup", "explain", "--otlp", str(directory)]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=50, check=False
    )


def test_a_trace_of_the_job_has_a_span_for_each_rank_and_in_it_one_for_each_call(job: Job) -> None:
    root, *others = spans(job)
    assert root.name == "job digits" and root.parent is None
    ranks = {span.name: span for span in others if span.parent == root.context}
    assert [*ranks] == ["rank 0", "rank 1"]
    for rank in job.ranks:
        of_rank = ranks[f"rank {rank.rank}"]
        calls = [span for span in others if span.parent == of_rank.context]
        assert len(calls) == len(rank.calls) >= 301
        for span, call in zip(calls, rank.calls, strict=True):
            assert (span.name, span.attributes["procgroup.sequence"]) == (call.op, call.sequence)
            assert span.start_time == pytest.approx(call.started * 1e9) and span.end_time >= span.start_time
            assert span.resource.attributes["procgroup.rank"] == rank.rank
            assert span.resource.attributes["host.name"] == rank.host
    assert {span.context.trace_id for span in others} == {root.context.trace_id}
    assert len({span.context.span_id for span in others}) == len(others)


def test_a_call_has_its_group_size_and_line(job: Job) -> None:
    span = next(span for span in spans(job) if span.name == "all_reduce")
    attributes = dict(span.attributes)
    assert attributes["procgroup.group"] == "0" and attributes["procgroup.group_size"] == 2
    assert attributes["procgroup.bytes"] == 8000
    assert attributes["procgroup.call"] == "all_reduce(SUM) of 1000 float64"
    assert attributes["code.file.path"].endswith("train.py") and attributes["code.line.number"] > 1


def test_what_failed_is_an_error(job: Job) -> None:
    failed = {span.name: span.status for span in spans(job) if not span.status.is_unset}
    assert "a bad batch" in failed["rank 1"].description and not failed["rank 1"].is_ok


def test_spans_that_are_sent_again_have_the_same_numbers(recorded: Path, job: Job) -> None:
    again = reading.load(recorded, with_stacks=False)
    assert [span.context for span in spans(job)] == [span.context for span in spans(again)]


def test_all_spans_arrive_at_the_receiver(recorded: Path, job: Job, receiver: Receiver) -> None:
    done = explain(recorded, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{receiver.server_port}")
    assert done.returncode == 1 and done.stdout.startswith("rank 1 failed: ValueError: a bad batch"), done.stderr
    parts = [part for request in receiver.received for part in request.resource_spans]
    received = [span for part in parts for scope in part.scope_spans for span in scope.spans]
    sent = [span.context.span_id.to_bytes(8, "big") for span in spans(job)]
    assert len(receiver.received) > 1 and sorted(span.span_id for span in received) == sorted(sent)
    named = {one.key: one.value for one in parts[-1].resource.attributes}
    assert named["service.name"].string_value == "procgroup" and named["procgroup.rank"].int_value == 1


def test_a_receiver_that_is_not_there_is_an_error(recorded: Path) -> None:
    where = f"http://127.0.0.1:{free_port()}"
    done = explain(recorded, OTEL_EXPORTER_OTLP_ENDPOINT=where, OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert done.returncode == 2 and done.stdout == ""
    assert "procgroup explain: the receiver took 0 of " in done.stderr and "OTEL_EXPORTER_OTLP_ENDPOINT" in done.stderr


def test_what_to_install_is_said(recorded: Path) -> None:
    program = "import sys; sys.modules['opentelemetry'] = None; from procgroup.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "explain", "--otlp", str(recorded)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2 and "pip install opentelemetry-sdk" in done.stderr
