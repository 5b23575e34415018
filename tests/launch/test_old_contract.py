"""``python -m procgroup.launch``: a local rank as the first argument, or only in the environment."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from world import run_command

SHOW = "import os, sys; print(os.environ['LOCAL_RANK'], sys.argv[1:])"


def launch(launcher: Any, *arguments: str) -> Any:
    return run_command([sys.executable, "-m", "procgroup.launch", *arguments])


def test_each_rank_gets_its_local_rank_before_the_user_s_arguments(launcher: Any) -> None:
    script = str(launcher.script(SHOW))
    done = launch(launcher, "--nproc_per_node=2", script, "--epochs", "3")
    assert sorted(done.stdout.splitlines()) == [
        "[rank 0] 0 ['--local-rank=0', '--epochs', '3']",
        "[rank 1] 1 ['--local-rank=1', '--epochs', '3']",
    ]


@pytest.mark.parametrize("flag", ["--use-env", "--use_env"])
def test_with_use_env_it_gets_none(launcher: Any, flag: str) -> None:
    done = launch(launcher, "--nproc-per-node", "2", flag, str(launcher.script(SHOW)), "x")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 ['x']", "[rank 1] 1 ['x']"]


def test_no_python_needs_use_env(launcher: Any) -> None:
    done = launch(launcher, "--no-python", "sh", "-c", "true")
    assert done.returncode == 2
    assert "--no-python needs --use-env" in done.stderr
    done = launch(launcher, "--no-python", "--use-env", "sh", "-c", "echo $LOCAL_RANK")
    assert done.stdout == "[rank 0] 0\n"


def test_it_is_a_command_too_and_passes_the_exit_code_on(launcher: Any) -> None:
    done = launcher.run("import sys; sys.exit(17)", command="launch")
    assert done.returncode == 17
