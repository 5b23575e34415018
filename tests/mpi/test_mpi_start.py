"""How groups on backend "mpi" start and end: under mpiexec with nothing said, beside other uses of MPI, or refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from documentation.page_programs import ROOT, blocks
from mpi_world import BACKEND, MPIS, environment_of, lacks, run_program
from world import run_command, without_reports

mpis = pytest.mark.parametrize(
    "mpi", [pytest.param(mpi, marks=pytest.mark.skipif(bool(lacks(mpi)), reason=lacks(mpi))) for mpi in MPIS]
)


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines of all ranks, in order, of a run in which nothing went wrong."""
    assert (done.returncode, without_reports(done.stderr)) == (0, ""), done.stderr + done.stdout
    return sorted(done.stdout.splitlines())


def run_lines(mpi: str, size: int, folder: Path, source: str) -> list[str]:
    (folder / "train.py").write_text(source.replace("BACKEND", repr(BACKEND)))
    return lines_of(run_program(mpi, size, folder / "train.py"))


TUTORIAL = """
import numpy as np
import procgroup as dist

def run(rank, size):
    tensor = np.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    print("Rank ", rank, " has data ", tensor[0])

def init_process(rank, size, fn, backend="tcp"):
    dist.init_process_group(backend)
    fn(dist.get_rank(), dist.get_world_size())

if __name__ == "__main__":
    init_process(0, 0, run, backend=BACKEND)
"""


@mpis
def test_the_program_of_torch_s_tutorial_prints_what_it_promises(mpi: str, tmp_path: Path) -> None:
    assert run_lines(mpi, 2, tmp_path, TUTORIAL) == [f"Rank  {rank}  has data  1.0" for rank in range(2)]


@mpis
def test_the_program_of_the_documentation_needs_nothing_but_mpiexec(mpi: str, tmp_path: Path) -> None:
    program = next(block.text for block in blocks(ROOT / "docs" / "mpi.md") if block.language == "python")
    assert run_lines(mpi, 4, tmp_path, program) == [f"rank {rank} of 4: 6.0" for rank in range(4)]


SILENT = """
import os
import numpy as np
import procgroup as dist

dist.init_process_group(BACKEND)
pair = dist.new_group([0, 1])
work = dist.all_reduce(np.ones(5), async_op=True)
dist.all_reduce(np.ones(5), group=pair)
work.wait()
dist.isend(np.ones(3), 1 - dist.get_rank())
dist.recv(np.ones(3), 1 - dist.get_rank())
"""


@mpis
def test_a_program_that_never_destroys_its_groups_ends_in_silence(mpi: str, tmp_path: Path) -> None:
    assert run_lines(mpi, 2, tmp_path, SILENT) == []


BESIDE = """
import os
from mpi4py import MPI
import numpy as np
import procgroup as dist

comm = MPI.COMM_WORLD
for method in (None, "mpi://"):
    dist.init_process_group(BACKEND, init_method=method)
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    for turn in range(20):
        mine, theirs, other = np.full(1000, turn + 1.0), np.full(1000, comm.rank + 1.0), np.zeros(1000)
        work = dist.all_reduce(mine, async_op=True)
        request = comm.Isend(theirs, (comm.rank + 1) % comm.size)  # of a tag that procgroup may use, too
        sent = dist.isend(theirs, (comm.rank + 1) % comm.size)
        comm.Recv(other, (comm.rank - 1) % comm.size)
        assert (other == (comm.rank - 1) % comm.size + 1).all()
        other[:] = 0
        dist.recv(other, (comm.rank - 1) % comm.size)
        assert (other == (comm.rank - 1) % comm.size + 1).all()
        work.wait()
        request.Wait()
        sent.wait()
        assert (mine == comm.size * (turn + 1.0)).all()
        assert comm.allreduce(1) == comm.size
    dist.destroy_process_group()
    assert not MPI.Is_finalized() and comm.allreduce(1) == comm.size
os.write(1, f"rank {comm.rank}\\n".encode())
"""


@mpis
def test_a_program_may_use_mpi_itself_before_beside_and_after_its_groups(mpi: str, tmp_path: Path) -> None:
    assert run_lines(mpi, 3, tmp_path, BESIDE) == ["rank 0", "rank 1", "rank 2"]


AGAIN = """
import os
import sys
import numpy as np
import procgroup as dist

assert dist.is_mpi_available() and "mpi4py.MPI" not in sys.modules
for backend, method in ((BACKEND, None), (BACKEND, "env://"), ("gloo", None), (BACKEND, "mpi://")):
    dist.init_process_group(backend, init_method=method)
    assert dist.get_backend() == backend
    array = np.array([dist.get_rank() + 1])
    dist.all_reduce(array)
    os.write(1, f"{backend} {method}: {array[0]}\\n".encode())
    dist.destroy_process_group()
"""


@mpis
def test_groups_can_be_made_again_by_every_method_and_gloo_still_works(mpi: str, tmp_path: Path) -> None:
    ways = [f"{BACKEND} None", f"{BACKEND} env://", "gloo None", f"{BACKEND} mpi://"]
    assert run_lines(mpi, 2, tmp_path, AGAIN) == sorted(f"{way}: 3" for way in ways * 2)


LEVEL = """
import os
import mpi4py
mpi4py.rc.thread_level = "LEVEL"
from mpi4py import MPI
import procgroup as dist

names = {getattr(MPI, name): name for name in ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED")}
try:
    dist.init_process_group(BACKEND, timeout=20)
except dist.DistBackendError as error:
    text = str(error)
    assert f"MPI_{names[MPI.Query_thread()]}" in text, text
    assert "mpi4py.rc.thread_level = 'multiple'" in text.replace('"', "'"), text
    os.write(1, b"refused\\n")
assert not dist.is_initialized()
"""


@mpis
@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_a_lower_thread_level_is_refused_by_name_and_with_the_cure(mpi: str, level: str, tmp_path: Path) -> None:
    assert run_lines(mpi, 2, tmp_path, LEVEL.replace("LEVEL", level)) == ["refused"] * 2


WITHOUT_MPIEXEC = """
import os
import procgroup as dist

try:
    dist.init_process_group(BACKEND, timeout=20)
except dist.DistBackendError as error:
    os.write(1, f"{error}\\n".encode())
assert not dist.is_initialized()
"""


@mpis
def test_ranks_that_mpiexec_has_not_started_are_refused_in_words(mpi: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_MPIEXEC.replace("BACKEND", repr(BACKEND)))
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "2", "train.py"]
    done = run_command(command, directory=tmp_path, environment=environment_of(mpi))
    assert done.returncode == 0, done.stderr
    for rank, line in enumerate(sorted(done.stdout.splitlines())):
        assert line.startswith(f"[rank {rank}] ") and "mpiexec" in line, line


def refused_alone(prelude: str, environment: dict[str, str]) -> str:
    """Return whether the backend counts as available, and the text with which a world of one rank is refused."""
    source = f"""{prelude}
import procgroup as dist
try:
    dist.init_process_group({BACKEND!r}, rank=0, world_size=1, store=dist.HashStore())
except dist.DistBackendError as error:
    print(dist.is_mpi_available(), error, end="")
"""
    done = run_command([sys.executable, "-c", source], environment=environment)
    assert (done.returncode, without_reports(done.stderr)) == (0, ""), done.stderr
    return done.stdout


WITHOUT_MPI4PY = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name == "mpi4py" else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def test_without_mpi4py_the_error_says_what_to_install() -> None:
    said = refused_alone(WITHOUT_MPI4PY, {})
    assert said.startswith("False ") and "pip install mpi4py" in said and "MPI library" in said, said


@pytest.mark.skipif(bool(lacks(MPIS[0])), reason=lacks(MPIS[0]))
def test_without_an_mpi_library_the_error_says_what_to_install() -> None:
    said = refused_alone("", {"MPI4PY_MPIABI": "", "MPI4PY_LIBMPI": "/nowhere/libmpi.so", "LD_LIBRARY_PATH": ""})
    assert said.startswith("True ") and "MPI library" in said, said
