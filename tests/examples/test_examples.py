"""Every example is run with the commands that its own docstring shows, and prints what it is there to show."""

from __future__ import annotations

import ast
import re
import runpy
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
    "heat_on_mesh": [r"after 200 steps the warmest cell has \d+\.\d\d degrees, as on one rank"],
    "setup_and_cleanup": [f"rank {rank} of 2 on gloo, started by the launcher" for rank in (0, 1)],
}
# Those that need PyTorch.
WITH_TORCH = {
    "train_cnn": [r"epoch 8 on 2 ranks: loss 0\.\d+, test accuracy 0\.9[5-9]"],
    "torch_spawn": [f"rank {rank} of 2 has \\[\\[3.0, 3.0\\], \\[3.0, 3.0\\]\\]" for rank in (0, 1)],
    "torch_unchanged": [
        f"rank {rank}: {by}: losses {losses}"
        for rank, losses in ((0, "1.95 0.136"), (1, "2.57 0.112"))
        for by in ("gloo, moved by torch", "gloo, moved by procgroup", "procgroup, moved by procgroup")
    ],
    "torch_point_to_point": [
        *(f"rank {rank} has {what}" for rank in (0, 1) for what in ("1\n", "2 as torch.bfloat16")),
        r"rank 0 has the column \[1.0, 5.0, 9.0\], and in all 66",
        r"rank 1 has the column \[1.0, 5.0, 9.0\], and in all 15",
    ],
    "torch_collectives": [
        *(rf"rank {rank}: broadcast from 1: \[10, 11, 12\]" for rank in range(3)),
        r"rank 2: all_reduce SUM: \[33, 36, 39\]",
        r"rank 2: all_reduce PRODUCT: \[231, 528, 897\]",
        r"rank 2: all_reduce MIN: \[1, 2, 3\]",
        r"rank 2: all_reduce MAX: \[21, 22, 23\]",
        *(f"rank 2: all_reduce {op}: {bits}" for op, bits in [("BAND", 1000), ("BOR", 1111), ("BXOR", 1111)]),
        r"rank 2: all_reduce AVG: \[1.0\]",
        r"rank 0: reduce to 0: \[30, 33, 36\]",
        *(
            rf"rank 0: {call}: \[\[0, 1, 2\], \[10, 11, 12\], \[20, 21, 22\]\]"
            for call in ("all_gather", "gather to 0")
        ),
        r"rank 1: scatter from 0: \[1.5, 1.5\]",
        r"rank 1: reduce_scatter: \[33\]",
        r"rank 1: all_to_all: \[1, 11, 21\]",
        r"rank 1: in one tensor: \(\[0, 1, 2, 10, 11, 12, 20, 21, 22\], \[1, 11, 21\], \[33\]\)",
        *(rf"rank {rank}: all_reduce in a group of two: \[2.0\]" for rank in (0, 1)),
    ],
    "torch_mesh": [
        r"rank 2 is at \(1, 0\) of \[\[0, 1\], \[2, 3\]\]",
        r"rank 1 has the outputs \[12.0, 15.0, 18.0, 21.0\] and the gradient \[1.5, 1.5\]",
        r"rank 2 has the outputs \[24.0, 30.0, 36.0, 42.0\] and the gradient \[1.5, 1.5\]",
        "rank 3 is number 1 of the odd ones, which add up to 4",
    ],
    "overlap_and_batch": [
        rf"{what}: \d+\.\d\d ms"
        for what in ("200 calls", "one call for all 200", "compute after all_reduce", "all_reduce is under way")
    ],
    "compressed_gradients": [
        rf"rank {rank}: loss (0.08\d\d) in float32, 0.08\d\d in bfloat16, (?!\1)\d\.\d+ clipped" for rank in (0, 1)
    ],
    "data_parallel_against_distributed": [
        *(rf"rank {rank}: DistributedDataParallel in process \d+, 32 rows" for rank in (0, 1)),
        r"rank 0: DataParallel in this process alone, \d+ GPUs, 64 rows",
        r"the same parameters after 20 steps: largest difference \de-",
    ],
    "pipeline_in_ddp": [
        rf"rank {rank}: half {rank % 2} trained on part {rank // 2}; difference from one process \de-"
        for rank in range(4)
    ],
    "torch_restart": [
        *(rf"rank {rank}, attempt 0: begins at step 0 with \[0.0, 0.0\]" for rank in (0, 1)),
        *(rf"rank {rank}, attempt 1: begins at step 3 with \[3.0, 15.0\]" for rank in (0, 1)),
        *(rf"rank {rank}, attempt 1: ends with \[6.0, 30.0\]" for rank in (0, 1)),
    ],
    "torch_device_id": [
        *(rf"rank {rank}: procgroup with device_id=cpu: \[2.0, 2.0\], backends cpu:gloo,cuda:nccl" for rank in (0, 1)),
        *(
            rf"rank {rank}: procgroup with device_id=cuda:{rank}, where there is none: The backend 'nccl' needs"
            for rank in (0, 1)
        ),
        *(rf"rank {rank}: torch.distributed on cpu: \[2.0, 2.0\]" for rank in (0, 1)),
    ],
    "backend_table": [
        r"backend +gloo +procgroup +mpi +nccl +procgroup",
        *(rf"{operation} +yes +yes +no +no +yes" for operation in ("send, recv", "reduce_scatter", "all_to_all")),
        "procgroup, mpi: .*(needs mpi4py|finds no MPI library)",  # none is named to the example's ranks
        "procgroup, nccl: The backend 'nccl' needs",
    ],
    "train_gpu": [rf"rank {rank} of 2 on cpu: loss 0\.[0-2]\d+ after 6 epochs" for rank in (0, 1)],
    "fsdp_gpt": [
        *(rf"rank {rank} at \(\d, \d\) holds 7029 of 26570 parameters" for rank in range(4)),
        *(rf"rank {rank} at \(0, {rank}\) holds 14058 of 26570 parameters" for rank in range(2)),
        *(rf"loss of {size} ranks: (2\.5\d+) at first, (0\.0\d+) .*\none process: \1 at first, \2" for size in (2, 4)),
    ],
}
# Those whose rank 0 hosts a store of procgroup's and one of torch's: not at the one address that forked ranks have.
LAUNCHED = {"backend_table", "torch_device_id"}
# Those that show by which launcher they were started.
SHOW_LAUNCHER = {"setup_and_cleanup"}
# Run at the same time, in "two terminals".
TOGETHER = {"two_scripts_keywords", "spawn_on_two_nodes"}
# The others: a half that its counterpart starts, what an example shows itself with, and those with tests of their own.
OTHERS = {
    "two_scripts_environment",
    "digits_view",
    "train_digits",
    "train_through_epochs",
    "train_through_failures",
    "train_jax",
    "resume_training",
    "cupy_groups",
    "jax_gpu",
}


def commands(name: str) -> list[str]:
    """Return the commands of an example's docstring: its lines that start python."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    return [line.strip() for line in docstring.splitlines() if re.match(r" *(\w+=\S+ )*python ", line)]


def is_with_torch(command: str) -> bool:
    """Return whether a command of an example that does without PyTorch asks for it all the same."""
    return "torch" in command


def run(command: str) -> str:
    words = shlex.split(command)
    environment = dict(word.split("=", 1) for word in words[: words.index("python")])
    done = world.run_command(
        [sys.executable, *words[words.index("python") + 1 :]], environment=environment, directory=ROOT, timeout=250
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def be_rank(rank: int, size: int, name: str, arguments: list[str]) -> None:
    """Run an example as the program of this process."""
    sys.argv = [str(EXAMPLES / f"{name}.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_forked(name: str, command: str) -> str:
    """Run a command; fork the ranks if it just launches them: to import PyTorch takes longer than most examples."""
    launch = rf"(?:(\w+)=(\w+) )?python -m procgroup run --nproc-per-node (\d) examples/{name}.py(.*)"
    if not (match := re.fullmatch(launch, command)):
        return run(command)
    variable, value, size, arguments = match.groups()
    environment = {variable: value} if variable else {}
    with world.start(be_rank, int(size), args=(name, arguments.split()), environment=environment, torch=True) as ranks:
        outcomes = ranks.wait(150)
    if not all(outcome.ok for outcome in outcomes):
        raise world.WorldFailed(outcomes, command)
    return "".join(outcome.output for outcome in outcomes)


def assert_found(patterns: list[str], output: str) -> None:
    for pattern in patterns:
        assert re.search(pattern, output), f"{pattern!r} is not in:\n{output}"


def test_every_example_is_tested_and_listed() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == set(EXPECTED) | set(WITH_TORCH) | OTHERS
    listed = re.findall(r"^- \[(\w+)\.py\]\((\w+)\.py\): ", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((name, name) for name in files)


@pytest.mark.parametrize("name", EXPECTED)
def test_example_prints_what_it_shows(name: str) -> None:
    port = str(world.free_port())
    lines = [command.replace("29500", port) for command in commands(name) if not is_with_torch(command)]
    assert lines, "the docstring shows no command"
    with ThreadPoolExecutor(len(lines) if name in TOGETHER else 1) as executor:
        output = "".join(executor.map(run, reversed(lines)))  # the last first: any order will do
    assert_found(EXPECTED[name], output)


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name in EXPECTED if any(map(is_with_torch, commands(name)))])
def test_example_prints_the_same_with_tensors(name: str, sampled: bool) -> None:
    port = str(world.free_port())
    lines = [command.replace("29500", port) for command in commands(name) if is_with_torch(command)]
    if sampled:
        lines = lines[:2]  # a third one differs in flags of torch's launcher alone
    outputs = [run(line) if name in SHOW_LAUNCHER else run_forked(name, line) for line in lines]
    assert_found(EXPECTED[name], "".join(outputs))


@pytest.mark.torch
@pytest.mark.parametrize("name", WITH_TORCH)
def test_example_with_torch_prints_what_it_shows(name: str) -> None:
    if "sklearn" in (EXAMPLES / f"{name}.py").read_text():
        pytest.importorskip("sklearn")
    lines = commands(name)
    assert lines, "the docstring shows no command"
    outputs = [run(line) if name in LAUNCHED else run_forked(name, line) for line in lines]
    assert_found(WITH_TORCH[name], "".join(outputs))
