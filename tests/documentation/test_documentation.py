"""Every Python and console block of the documentation is executed, page by page, from top to bottom.

A Python block that opens with a comment ``# name.py`` becomes that file; another is run as a program. In a
console block each line that starts with ``$`` is a command; the lines under it must be lines of its output, in
any order, where ``...`` stands for anything. ``make`` commands are only checked to be targets of the Makefile, and
``pip`` is not started. A bash block with a comment ``# name`` becomes that file. What needs a library or a command that
procgroup itself does not is run where it is installed, and what needs a cluster or several hosts by tests of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import world
from documentation.operation_pages import FOR_MPI4PY
from documentation.page_programs import ROOT, blocks

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guide/*.md")])
PATIENCE = f'"{sys.executable}" "{Path(__file__).with_name("patience.py")}"'
_NOT_OURS = ("torchrun", "taskset")
_NOT_STARTED = ("pip ", "sbatch ")
_LIBRARIES = {"procgroup metrics": "prometheus_client"}


def is_installed(program: str) -> bool:
    """Return whether what a program imports of torch and jax is there. Programs of MPI run in tests of their own."""
    libraries = re.findall(r"^(?:import|from) (torch|jax|mpi4py)\b", program, re.MULTILINE)
    return "mpi4py" not in libraries and all(map(find_spec, libraries))


def can_run(command: str, directory: Path) -> bool:
    """Return whether a command is there, and the libraries of the programs that it starts."""
    programs = [directory / name for name in re.findall(r"\b\w+\.py\b", command)]
    name = command.split()[0]
    is_there = name not in _NOT_OURS or shutil.which(name, path=f"{directory}/bin:{os.environ['PATH']}") is not None
    has_library = all(find_spec(library) for command_of_it, library in _LIBRARIES.items() if command_of_it in command)
    return is_there and has_library and all(is_installed(one.read_text()) for one in programs if one.exists())


def run_python(text: str, directory: Path) -> None:
    if name := re.match(r"# (\w+\.py)\n", text):
        (directory / name[1]).write_text(text)
        return
    if not is_installed(text):
        return
    done = world.run_command([sys.executable, "-c", text], directory=directory)
    assert done.returncode == 0, f"{text}\n{done.stderr}"


def run_console(text: str, directory: Path) -> None:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *expected = part.strip().splitlines()
        if command.startswith(_NOT_STARTED):
            continue
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            continue
        if can_run(command, directory):
            command = command.replace("29500", str(world.free_port()))
            command = re.sub(r"& (sleep \d+;)", rf"& {PATIENCE} job && \1", command)
            command = command.replace("timeout -s INT 2 ", f"{PATIENCE} interrupt ")
            check_output(command, expected, directory)


def check_output(command: str, expected: list[str], directory: Path) -> None:
    # Where procgroup is installed in place, pytest warns of the module by which it is found.
    quiet = "-W 'ignore:Module already imported so cannot be rewritten'"
    environment = {
        "PATH": f"{directory}/bin:{os.environ['PATH']}",
        "PYTEST_ADDOPTS": quiet,
        "PROCGROUP_RECORD_DIR": f"{directory}/records",  # other tests run jobs, too
    }
    done = world.run_command(["bash", "-c", command], directory=directory, environment=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    for line in expected:
        pattern = ".*".join(re.escape(piece) for piece in line.split("..."))
        assert re.search(f"^{pattern}$", done.stdout, re.MULTILINE), f"{line!r} is not in:\n{done.stdout}"


def provide_commands(directory: Path) -> None:
    """Put this interpreter's python, procgroup and, with PyTorch, torchrun on the path of the commands."""
    (directory / "bin").mkdir()
    commands = {"python": "", "procgroup": "-m procgroup"}
    if find_spec("torch"):
        commands["torchrun"] = "-m torch.distributed.run"
    for name, arguments in commands.items():
        file = directory / "bin" / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        file.chmod(0o755)


def provide_entry_point(directory: Path) -> None:
    """Let torch find procgroup from programs in this folder, also where procgroup is on the path, not installed."""
    facts = directory / "procgroup_entry-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: procgroup-entry\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\nprocgroup = procgroup.torch_plugin:register\n")


@pytest.mark.timeout(400)  # up to ten programs, each of which has a limit of its own
# Many programs, which test_operation_pages.py plays in one world, because each start of the launcher takes a second.
@pytest.mark.parametrize("page", [page for page in PAGES if page != FOR_MPI4PY], ids=lambda page: page.name)
def test_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    provide_commands(tmp_path)
    provide_entry_point(tmp_path)
    for block in blocks(page):
        if block.language == "python":
            run_python(block.text, tmp_path)
        elif block.language == "console":
            run_console(block.text, tmp_path)
        elif name := re.search(r"^# ([\w.]+)$", block.text, re.MULTILINE):
            (tmp_path / name[1]).write_text(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_of_a_kind_that_is_executed(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= {"python", "console", "bash"}


@pytest.mark.parametrize(
    "page", ["README.md", "docs/gpus.md", "docs/pytorch.md", "docs/data_parallel.md", "docs/jax.md", "docs/clients.md"]
)
def test_one_page_says_what_has_run_on_a_gpu_and_others_refer_to_it(page: str) -> None:
    assert "nccl.md#what-has-run-on-a-gpu" in (ROOT / page).read_text()
    assert "\n## What has run on a GPU\n" in (ROOT / "docs/nccl.md").read_text()


def test_what_is_not_released_is_not_installed_by_its_name() -> None:
    for page in PAGES:
        commands = re.findall(r"^(?:\$ )?pip install ([^#\n]*)", page.read_text(), re.MULTILINE)
        assert not [command for command in commands if re.search(r"\bprocgroup(?!-\d)", command)], page
