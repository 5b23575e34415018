"""``procgroup explain --html`` writes one page with all that is known of a job, which obeys no text of a record."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.diagnostics.explain.page import page
from procgroup.diagnostics.recorded_job import findings
from procgroup.diagnostics.recorded_job.job import Job, Rank, RecordedCall, RecordedGroup
from world import run_command, start

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
CHROMIUM = shutil.which("chromium")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="Debian's package chromium is not installed")

PROGRAM = """
import sys
import numpy as np
import procgroup as dist

dist.init_process_group()
for step in range(20):
    dist.all_reduce(np.ones(4))
dist.report(phase=sys.argv[1][:64])
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError(sys.argv[1])
dist.all_reduce(np.ones(4))
"""


class Reader(HTMLParser):
    """Collects the elements with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))


@pytest.fixture(name="written", scope="module")
def fixture_written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The page of a job of three ranks whose texts are HTML, and what explain --json prints of it."""
    directory = tmp_path_factory.mktemp("records")
    program = directory / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PROCGROUP_RECORD_DIR": str(directory / "jobs")}
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "3", str(program), EVIL]
    assert run_command(command, timeout=30, environment=environment).returncode == 1
    file = directory / "page.html"
    explain = [sys.executable, "-m", "procgroup", "explain", "--html", str(file), "--json"]
    done = run_command(explain, timeout=30, environment=environment)
    assert done.returncode == 1, done.stderr
    return file.read_text(encoding="utf-8"), json.loads(done.stdout)


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def dom(text: str, tmp_path: Path, script: str = "") -> str:
    """Return the page as a browser has it after its script and after ``script``, which its policy would forbid."""
    if script:
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        text = text.replace("</body>", f"<script>{script}</script></body>")
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--window-size=1200,900", "--virtual-time-budget=2000", "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    return done.stdout


def large_job() -> Job:
    """Return a job of 64 ranks with full records; the last call of rank 5 failed, and that of rank 7 still runs."""
    group = RecordedGroup("1", "0", 64, tuple(range(64)))
    ranks = []
    for number in range(64):
        calls = []
        for index in range(1024):
            start_at = 1000 + index * 0.002 + number * 1e-6
            state = {5: "failed", 7: "started"}.get(number, "completed") if index == 1023 else "completed"
            ended = 0.0 if state == "started" else start_at + 0.001
            text = f"all_reduce(SUM) of {index % 7} float64"
            call = (group, index + 1, "all_reduce", text, False, -1, 8, state, f"a.py:{index % 9}")
            calls.append(RecordedCall(*call, issued=start_at, started=start_at, ended=ended))
        rank = (number, 64, "host", 1, "train.py", "left", "", 1003.0, calls, [], "", 1000.0, 0.0, 1024)
        ranks.append(Rank(*rank))
    return Job("large", Path("large"), ranks)


def test_the_texts_of_records_are_escaped(written: tuple[str, dict[str, Any]]) -> None:
    text, explained = written
    reader = Reader(text)
    assert [tag for tag, _ in reader.elements].count("script") == 2
    assert not {"img", "b", "link", "iframe"} & {tag for tag, _ in reader.elements}
    assert escape(EVIL) in text and EVIL not in text
    assert explained["ranks"][0]["report"] == f"phase {EVIL[:64]}"
    assert f"reported phase {escape(EVIL[:64])}" in text


def test_the_page_allows_nothing_but_its_own_script_and_style(written: tuple[str, dict[str, Any]]) -> None:
    reader = Reader(written[0])

    def hash_of(content: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    contents = [re.findall(rf"<{tag}>(.*?)</{tag}>", written[0], re.DOTALL)[0] for tag in ("script", "style")]
    policies = [attributes["content"] for tag, attributes in reader.elements if "http-equiv" in attributes]
    script, style = (hash_of(content) for content in contents)
    assert policies == [
        f"default-src 'none'; script-src {script}; style-src {style}; base-uri 'none'; form-action 'none'"
    ]
    names = {name for _, attributes in reader.elements for name in attributes}
    assert not {name for name in names if name in ("src", "href", "style") or name.startswith("on")}
    assert not re.search(r"url\(|@import|https?://", written[0])


def test_the_sentences_and_the_ranks_are_those_of_explain(written: tuple[str, dict[str, Any]]) -> None:
    text, explained = written
    items = [unescape(item) for item in re.findall(r"<li>(.*)</li>", text)]
    assert [finding["sentence"] for finding in explained["findings"]] == items[: len(explained["findings"])]
    rows = re.findall(
        r'<tr><td class="number">(\d)</td><td>\S+</td><td class="number">(\d+)</td>'
        r'<td><span class="state failed">failed</span></td><td class="wide">.*?</td></tr>',
        text,
        re.DOTALL,
    )
    assert rows == [(str(rank["rank"]), str(rank["pid"])) for rank in explained["ranks"]]


def test_the_timeline_has_every_call_with_its_line_and_times(written: tuple[str, dict[str, Any]]) -> None:
    text, explained = written
    data = data_of(text)
    first = min(call["issued"] for rank in explained["ranks"] for call in rank["calls"])
    assert [lane["rank"] for lane in data["lanes"]] == [0, 1, 2]
    for lane, rank in zip(data["lanes"], explained["ranks"], strict=True):
        assert (lane["group"], lane["size"]) == ("0", 3) and len(lane["calls"]) == len(rank["calls"]) >= 21
        for drawn, call in zip(lane["calls"], rank["calls"], strict=True):
            began, ended, op, described, line, state, sequence, *_ = drawn
            assert began == pytest.approx((call["started"] - first) * 1e6, abs=0.2)
            assert ended == pytest.approx((call["ended"] - first) * 1e6, abs=0.2)
            assert (data["ops"][op], data["texts"][described]) == (call["op"], call["text"])
            assert (data["texts"][line], sequence) == (call["line"], call["sequence"])
            assert ("completed", "started", "failed", "issued")[state] == call["state"]


def late(rank: int, size: int) -> None:
    dist.init_process_group()
    for _ in range(20):
        dist.all_reduce(np.ones(4))
        sum(range(200_000 if rank == 1 else 0))
    dist.destroy_process_group()


def test_stragglers_are_in_a_table_and_a_job_that_ended_well_is_said_to(tmp_path: Path) -> None:
    with start(late, 2, environment={"PROCGROUP_RECORD_DIR": str(tmp_path / "jobs")}) as world:
        assert all(outcome.ok for outcome in world.wait())
    environment = os.environ | {"PROCGROUP_RECORD_DIR": str(tmp_path / "jobs")}
    file = tmp_path / "page.html"
    command = [sys.executable, "-m", "procgroup", "explain", "--html", str(file)]
    assert run_command(command, timeout=30, environment=environment).returncode == 0
    text = file.read_text()
    assert re.search(r'<ul class="findings" [^>]*>\n<li>all 2 ranks of job \w+ left in order</li>', text)
    assert re.search(r'<td class="number">1</td><td>all_reduce</td><td>\d+ of 20 calls</td>', text)
    name = Path(sys.argv[0]).name
    assert f"<title>{name}: procgroup explain</title>" in text and f"<h1>{name}</h1>" in text


@in_a_browser
def test_a_browser_runs_the_page_s_script_and_nothing_else(written: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    injected = written[0].replace("</body>", "<script>document.title='owned'</script><p onclick='1'></p></body>")
    shown = dom(injected, tmp_path)
    assert 'data-ready="3"' in shown and "<title>owned" not in shown


@in_a_browser
def test_keys_choose_calls_and_say_what_they_are(written: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    script = """
    const press = (key) => timeline.canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
    const said = [];
    for (const key of ["Home", "ArrowRight", "ArrowDown", "n", "Escape"]) {
      press(key);
      said.push(timeline.tip.hidden ? "hidden" : timeline.tip.innerText.replaceAll("\\n", "|"));
    }
    const before = timeline.span;
    press("+");
    said.push(String(timeline.span / before));
    document.body.dataset.said = JSON.stringify(said);
    """
    found = re.search(r'data-said="([^"]*)"', dom(written[0], tmp_path, script))
    assert found
    first, second, below, trouble, nothing, zoomed = json.loads(unescape(found[1]))
    assert re.match(r"rank 0: all_reduce\(SUM\) of 4 float64\|+all_reduce #1 of group 0 at \S*program.py:8", first)
    assert re.match(r"rank 0: .*all_reduce #2 of group 0 .*took \S+ (µs|ms|s)", second)
    assert re.match(r"rank 1: .*all_reduce #\d", below)
    assert re.search(r"all_reduce #21 of group 0 at \S*program.py:13\|+failed after", trouble) or "#22" in trouble
    assert nothing == "hidden" and float(zoomed) == pytest.approx(0.5)


@in_a_browser
def test_the_wheel_zooms_a_drag_moves_and_the_pointer_shows_the_call_under_it(
    written: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    script = """
    const { canvas } = timeline, corner = canvas.getBoundingClientRect();
    canvas.setPointerCapture = () => {};  // for real pointers only
    const at = (x, y) => ({ clientX: corner.left + x, clientY: corner.top + y, bubbles: true, cancelable: true });
    const pointer = (kind, x, y) => canvas.dispatchEvent(new PointerEvent(kind, { pointerType: "mouse", ...at(x, y) }));
    const call = timeline.lanes[1].calls[3];
    timeline.look(call.start - 5, call.end + 5);
    pointer("pointermove", timeline.x((call.start + call.end) / 2), AXIS + 1.5 * LANE);
    const hovered = timeline.tip.innerText, moment = timeline.time(600), span = timeline.span;
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -200, ...at(600, 100) }));
    const zoomed = timeline.span / span, drift = Math.abs(timeline.time(600) - moment) / timeline.span;
    const begin = timeline.begin, width = timeline.width - timeline.gutter;
    pointer("pointerdown", 600, 40);
    pointer("pointermove", 500, 40);
    pointer("pointerup", 500, 40);
    const moved = ((timeline.begin - begin) / timeline.span) * width;
    document.body.dataset.said = JSON.stringify({ hovered, zoomed, drift, moved });
    """
    found = re.search(r'data-said="([^"]*)"', dom(written[0], tmp_path, script))
    assert found
    said = json.loads(unescape(found[1]))
    assert said["hovered"].startswith("rank 1: all_reduce(SUM) of 4 float64") and "all_reduce #4" in said["hovered"]
    assert 0.5 < said["zoomed"] < 0.9 and said["drift"] < 0.002
    assert said["moved"] == pytest.approx(100, abs=1)


@in_a_browser
def test_the_records_of_64_ranks_are_drawn_without_delay(tmp_path: Path) -> None:
    job = large_job()
    text = page(job, findings.find(job))
    assert len(text) < 6_000_000
    script = """
    const times = [];
    for (const [begin, end] of [[0, timeline.ends], [0, timeline.ends / 2], [0, 50000]]) {
      timeline.look(begin, end);
      const began = performance.now();
      for (let number = 0; number < 5; number++) timeline.draw();
      times.push((performance.now() - began) / 5);
    }
    document.body.dataset.times = JSON.stringify(times);
    """
    shown = dom(text, tmp_path, script)
    found = re.search(r'data-times="([^"]*)"', shown)
    assert found and 'data-ready="64"' in shown
    times = json.loads(found[1])
    print("milliseconds for a frame:", times)
    assert max(times) < 250  # on a busy machine without a GPU
