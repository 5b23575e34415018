"""Every example is run with the commands that its own docstring shows, and prints what it is there to show."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import world

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# Name of the example -> what each of these patterns must match, somewhere in the output of all its commands.
EXPECTED = {
    "one_process": ["rank 0 of 1, backend gloo"],
    "keywords_win": ["rank 0 of 1"],
    "two_scripts_keywords": [r"rank 0 sent \[3\. 1\. 4\.\]", r"rank 1 received \[3\. 1\. 4\.\]"],
    "multiprocessing_template": ["rank 0 of 2 has 3", "rank 1 of 2 has 3"],
    "spawn_on_two_nodes": [
        rf"rank {rank} \(local rank {local}\) gathered \[0, 1, 4\]" for rank, local in [(0, 0), (1, 0), (2, 1)]
    ],
    "under_launch": [
        f"rank {rank} of 2: 6; local rank {rank} by {how}"
        for rank in (0, 1)
        for how in ("an argument", "the environment")
    ],
    "under_run": ["rank 0 of 2: the highest rank is 1", "rank 1 of 2: the highest rank is 1"],
    "init_methods": [
        *(f"rank {rank}: {method} works" for rank in (0, 1) for method in ("env://", "file://", "a store")),
        "rank 1: refused: .*init_method.*store",
        "rank 0: TORCH_DISTRIBUTED_INIT_METHOD works",
    ],
    "choose_a_store": ["hash: HashStore: .*never set", "file: FileStore: .*never set", "tcp: TCPStore: .*never set"],
    "timeouts_and_options": [r"after 1\.\d s: CollectiveTimeout: recv #\d+ .*rank 0 of 2.*rank 1"],
    "point_to_point": ["rank 0 has 1", "rank 1 has 1", "rank 0 has the image", "rank 1 has the image"],
    "setup_and_cleanup": [f"rank {rank} of 2 on gloo, started by the launcher" for rank in (0, 1)],
}
# Run at the same time, in "two terminals".
TOGETHER = {"two_scripts_keywords", "spawn_on_two_nodes"}
# The others: a half that its counterpart starts, what an example shows itself with, and those with tests of their own.
OTHERS = {"two_scripts_environment", "digits_view", "train_digits", "train_jax", "resume_training"}


def commands(name: str) -> list[str]:
    """Return the commands of an example's docstring: its lines that start python."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    return [line.strip() for line in docstring.splitlines() if re.match(r" *(\w+=\S+ )*python ", line)]


def run(command: str) -> str:
    words = shlex.split(command)
    environment = dict(word.split("=", 1) for word in words[: words.index("python")])
    done = world.run_command(
        [sys.executable, *words[words.index("python") + 1 :]], environment=environment, directory=ROOT, timeout=40
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED) | OTHERS


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", EXPECTED)
def test_example_prints_what_it_shows(name: str) -> None:
    port = str(world.free_port())
    lines = [command.replace("29500", port) for command in commands(name)]
    assert lines, "the docstring shows no command"
    with ThreadPoolExecutor(len(lines) if name in TOGETHER else 1) as executor:
        output = "".join(executor.map(run, reversed(lines)))  # the last first: any order will do
    for pattern in EXPECTED[name]:
        assert re.search(pattern, output), f"{pattern!r} is not in:\n{output}"
