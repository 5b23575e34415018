"""Every page of docs/operations has a picture that its script draws, and an example that prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from documentation.operation_pages import FOLDER, Example, examples, play
from documentation.page_programs import ROOT, blocks
from world import free_port, run, run_command

PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "index.md")


def test_examples_print_what_the_pages_show() -> None:
    by_ranks: dict[int, list[Example]] = defaultdict(list)
    for example in examples():
        by_ranks[example.ranks].append(example)
    wrong = []
    for ranks, group in by_ranks.items():
        programs = [example.program for example in group]
        printed = run(play, ranks or 1, args=(programs, [free_port() for _ in programs]), timeout=250)
        for number, example in enumerate(group):
            lines = {
                line if ranks else line.split("] ", 1)[1] for rank in printed for line in rank[number].splitlines()
            }
            missing = [line for line in example.expected if line not in lines]
            if missing:
                wrong.append(f"{example.page} does not print {missing}, but {sorted(lines)}")
    assert not wrong, "\n".join(wrong)


def test_an_example_prints_the_same_under_the_launcher(tmp_path: Path, sampled: bool) -> None:
    chosen = [example for example in examples() if example.page == "all_gather.md" or (example.ranks and not sampled)]
    assert chosen
    for example in chosen:
        (tmp_path / "example.py").write_text(example.program)
        launcher = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", str(example.ranks), "example.py"]
        done = run_command(launcher, directory=tmp_path)
        assert done.returncode == 0, done.stderr
        assert set(example.expected) <= set(done.stdout.splitlines()), example.page


def test_the_pictures_are_what_the_script_draws() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "draw_operations.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_has_its_picture_an_example_and_a_place_in_the_index(page: Path) -> None:
    text = page.read_text()
    assert f"({page.stem}.svg)" in text and (FOLDER / f"{page.stem}.svg").exists()
    title = re.search(r"<title>(.*?)</title>", (FOLDER / f"{page.stem}.svg").read_text())
    assert title and f"![{title[1].replace('&#x27;', chr(39))}]" in text, "the picture's text is its title"
    assert {"python", "console"} == {block.language for block in blocks(page)}
    assert f"({page.name})" in (FOLDER / "index.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_picture_has_its_page() -> None:
    assert {picture.stem for picture in FOLDER.glob("*.svg")} == {page.stem for page in PAGES}
