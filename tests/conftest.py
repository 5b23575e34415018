"""What holds for every test: a hard time limit that shows all stacks, no core files, nothing left running."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest

import outputs
import slurm_cluster
import tiers
import world
from tiers import SAMPLED

# Ranks outnumber cores in most tests; a thread pool per rank would only make them wait for each other. OpenBLAS would
# start its threads with every interpreter that imports NumPy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Otherwise the last bit of a product depends on where MKL finds its factors in memory, on some processors.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# What the surroundings would say to every program that a test starts: of a job that the tests run in, and of colours.
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_JOB = ("TORCHELASTIC_RUN_ID", "PROCGROUP_STORE", "PROCGROUP_MASTER", "PROCGROUP_JOB_KEY", "PROCGROUP_STORE_KEY")
_AGENT = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
_METHOD = ("PROCGROUP_INIT_METHOD", "TORCH_DISTRIBUTED_INIT_METHOD")
_LAUNCHERS = ("PET_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "PALS_", "MPI_LOCAL", "JOB_COMPLETION_INDEX", "RAY_")
_COLOURS = ("FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "PYTEST_ADDOPTS")
for _name in (
    *_PLACE,
    *_JOB,
    *_AGENT,
    *_METHOD,
    *_COLOURS,
    *(name for name in os.environ if name.startswith(_LAUNCHERS)),
):
    os.environ.pop(_name, None)

# The flight records of all that the tests start, apart from those of the user's own jobs.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["PROCGROUP_RECORD_DIR"] = tempfile.mkdtemp(prefix="procgroup-tests-")
    atexit.register(shutil.rmtree, os.environ["PROCGROUP_RECORD_DIR"], ignore_errors=True)

# Without bytecode, each of the interpreters that the tests start would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Unbuffered, Python writes the words and the end of a line apart, and the lines of ranks that share a file mix.
os.environ.pop("PYTHONUNBUFFERED", None)

if "PYTHONPATH" in os.environ:  # commands run in other folders too
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every rank; nohup does the same
# with SIGHUP.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# The servers that multiprocessing keeps for the whole run, and that the bug programs are forked from.
_SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "bugs/ranks.py serve")


def pytest_configure(config: pytest.Config) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a stack dump ends with SIGABRT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if 0 <= soft < room:  # a thousand clients of one store
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # it would visit some thousand tests again and again, and take 2 of 6 s
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_name = tuple(argument for argument in config.args if "::" in argument)
    left_out = []
    for item in items:
        if tiers.is_run(first := _first_tier(item)):
            continue
        if item.nodeid.startswith(by_name):  # it was named: say why it does not run
            item.add_marker(pytest.mark.skip(reason=f"runs in make test-{first}"))
        else:  # skipping some thousand tests one by one takes ten seconds
            left_out.append(item)
    if left_out:
        without = set(left_out)
        items[:] = [item for item in items if item not in without]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: tiers.place(_file(item)))
    torch_is_missing = importlib.util.find_spec("torch") is None
    for item in items:
        if torch_is_missing and item.get_closest_marker("torch"):
            item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0].removeprefix("tests/")


def _first_tier(item: pytest.Item) -> str:
    parameters = getattr(getattr(item, "callspec", None), "id", "")
    name = getattr(item, "originalname", item.name)
    return tiers.begins_with(_file(item), name, parameters, item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def sampled() -> bool:
    return SAMPLED


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm of one node; yields the environment of its commands. Skips where there is none, and says why."""
    if lack := slurm_cluster.lacks():
        pytest.skip(lack)
    with slurm_cluster.running(tmp_path_factory.mktemp("slurm"), world.free_port(), world.free_port()) as environment:
        yield environment


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fail a test that leaves processes of its own behind, after killing them."""
    before = _children()
    yield
    left = []
    for pid in _children() - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    left = [process for process in left if not _is_server(process)]
    _, running = psutil.wait_procs(left, timeout=1)
    for process in running:
        process.kill()
    assert not running, f"the test left these running: {running}"


def _children() -> set[int]:
    """Return the pids of this process's children: psutil would look at every process of the machine, at each test."""
    children: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:  # it may have ended
            children |= set(map(int, file.read().split()))
    return children


def _is_server(process: psutil.Process) -> bool:
    try:
        return any(name in " ".join(process.cmdline()) for name in _SERVERS)
    except psutil.Error:
        return False


# --- what a failure says beside its error ---

_SAID = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    outputs.begin_test(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failure the command that runs the test again, and the files that its ranks wrote."""
    report = yield
    if report.failed and not item.stash.get(_SAID, False):
        item.stash[_SAID] = True
        report.sections.append(("To run it again", _command_of(item)))
        if files := outputs.of_this_test():
            report.sections.append(("Printed by ranks", "\n".join(map(_from_here, files))))
    if report.when == "teardown":
        outputs.end_test(has_failed=item.stash.get(_SAID, False))
    return report


def _command_of(item: pytest.Item) -> str:
    names = sorted(name for name in os.environ if name.startswith("PROCGROUP_TEST_"))
    settings = [f"{name}={shlex.quote(os.environ[name])}" for name in names]
    return " ".join([*settings, _from_here(Path(sys.executable)), "-m pytest", shlex.quote(item.nodeid)])


def _from_here(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
