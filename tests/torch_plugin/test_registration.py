"""How PyTorch learns of procgroup: the entry point, what it costs, and that it never breaks ``import torch``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import procgroup
from world import run_command

pytestmark = pytest.mark.torch

BREAK_THE_ENGINE = "import sys\nsys.modules['procgroup._native'] = None\n"
BREAK_ALL = "import sys\nsys.modules['procgroup.process.environ'] = None\n"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH in which procgroup is installed as far as entry points go."""
    facts = tmp_path / "procgroup_entry-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: procgroup-entry\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\nprocgroup = procgroup.torch_plugin:register\n")
    return tmp_path


def run_program(installed: Path, source: str, **variables: str) -> CompletedProcess[str]:
    package = str(Path(procgroup.__file__).parent.parent)
    paths = [str(installed), package, os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), **variables}
    (installed / "program.py").write_text(source)
    return run_command([sys.executable, str(installed / "program.py")], environment=environment)


USE = """
import torch, torch.distributed as dist
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
total = torch.ones(2)
dist.all_reduce(total)
print(dist.get_backend(), type(dist.group.WORLD).__module__, total.tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["procgroup", "cpu:procgroup", "cpu:procgroup,cuda:nccl"])
def test_import_torch_alone_makes_the_backend_known(installed: Path, backend: str) -> None:
    done = run_program(installed, USE.format(backend=backend))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "procgroup.torch_plugin" in done.stdout
    assert "[1.0, 1.0]" in done.stdout


def test_import_torch_loads_no_engine_and_no_group(installed: Path) -> None:
    source = "import torch, sys; print({name for name in sys.modules if name.partition('.')[0] == 'procgroup'})"
    done = run_program(installed, source)
    assert done.stderr == ""
    own = {f"procgroup.{name}" for name in ("process", "process.environ", "torch_plugin")}
    assert eval(done.stdout) == {"procgroup", *own}


def test_a_broken_native_module_breaks_the_group_only(installed: Path) -> None:
    (installed / "sitecustomize.py").write_text(BREAK_THE_ENGINE)
    source = """
import torch, torch.distributed as dist
print("imported")
dist.init_process_group("procgroup", store=dist.HashStore(), rank=0, world_size=2)
"""
    done = run_program(installed, source)
    assert done.stdout == "imported\n" and done.returncode == 1
    assert "DistBackendError: procgroup's native engine cannot be loaded" in done.stderr


def test_whatever_else_is_broken_is_a_warning(installed: Path) -> None:
    (installed / "sitecustomize.py").write_text(BREAK_ALL)
    done = run_program(installed, "import torch; print(torch.ones(1).item())")
    assert done.stdout == "1.0\n"
    assert "RuntimeWarning: procgroup could not register with torch.distributed" in done.stderr


def test_an_unusable_variable_is_a_warning(installed: Path) -> None:
    done = run_program(installed, "import torch; print(torch.ones(1).item())", PROCGROUP_REPLACE_GLOO="perhaps")
    assert done.stdout == "1.0\n"
    assert "PROCGROUP_REPLACE_GLOO='perhaps'" in done.stderr


def test_replace_gloo_puts_procgroup_in_gloo_s_place(installed: Path) -> None:
    done = run_program(installed, USE.format(backend="gloo"), PROCGROUP_REPLACE_GLOO="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gloo procgroup.torch_plugin.")
    assert done.stdout.endswith(" [1.0, 1.0]\n")
    done = run_program(installed, USE.format(backend="gloo"))
    assert done.stdout == "gloo torch.distributed.distributed_c10d [1.0, 1.0]\n", done.stderr


FORKED = """
import os, sys, torch, torch.distributed as dist
before = set(sys.modules)
child = os.fork()
dist.init_process_group("gloo", init_method="file://{store}", rank=int(child == 0), world_size=2)
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
if child == 0:
    os._exit(0)
print({name for name in set(sys.modules) - before if name.startswith("procgroup")})
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_ranks_that_are_forked_find_what_stands_for_gloo_loaded(installed: Path) -> None:
    source = FORKED.replace("{store}", str(installed / "store"))
    done = run_program(installed, source, PROCGROUP_REPLACE_GLOO="1")
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_a_group_of_the_plug_in_loads_nothing_that_only_errors_need(installed: Path) -> None:
    shown = "\nimport sys; print(set(sys.modules))"
    done = run_program(installed, USE.format(backend="procgroup") + shown)
    assert done.returncode == 0, done.stderr
    only_for_errors = {"procgroup.cluster.task_launcher", "procgroup.rendezvous.start_advice"}
    assert not only_for_errors & eval(done.stdout.splitlines()[-1])


UNCHANGED = """
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
pair = dist.new_group([0, 1])
total = torch.ones(1)
dist.all_reduce(total, group=pair)
dist.monitored_barrier()
dist.group.WORLD.split_group([0, 1], group_name="split").allreduce(total.clone()).wait()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
print(dist.get_backend(), type(pair).__module__, total.item(), model.module.weight.grad.tolist())
if dist.get_rank() == 1:
    store.wait(["rank 0 has given up"])
else:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.2))
    except RuntimeError as error:
        print(error)
    store.set("rank 0 has given up", "")
dist.destroy_process_group()
"""


def test_procgroup_run_replace_gloo_runs_an_unchanged_program(installed: Path) -> None:
    (installed / "unchanged.py").write_text(UNCHANGED)
    launch = f"""
import sys
from procgroup.__main__ import main
sys.exit(main(["run", "--nproc-per-node", "2", "--replace-gloo", {str(installed / "unchanged.py")!r}]))
"""
    done = run_program(installed, launch)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"gloo procgroup.torch_plugin.\w+ 2.0 \[\[1.5, 1.5\]\]", done.stdout)) == 2
    assert "Rank 1 failed to pass monitoredBarrier" in done.stdout


ASKS = """
import torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed import rpc
dist.init_process_group("gloo", timeout=timedelta(seconds=50))
rank = dist.get_rank()

tensors = [torch.zeros(2), torch.zeros(2)]
mine = torch.full((2,), float(rank))
gathers = [
    dist.all_gather(tensors, mine, async_op=True),
    dist.gather(mine, tensors if rank == 0 else None, dst=0, async_op=True),
]
for work in gathers:
    print("future", rank, [tensor.tolist() for tensor in work.get_future().wait()])

backend = dist.group.WORLD._get_backend(torch.device("cpu"))
print("timeout", rank, backend.options._timeout)

rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    print("rpc", rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist())
rpc.shutdown()
dist.destroy_process_group()
"""


def test_in_gloo_s_place_futures_options_and_rpc_are_as_on_gloo(installed: Path) -> None:
    (installed / "asks.py").write_text(ASKS)
    launch = f"""
import sys
from procgroup.__main__ import main
sys.exit(main(["run", "--nproc-per-node", "2", {str(installed / "asks.py")!r}]))
"""
    on_gloo = run_program(installed, launch, GLOO_SOCKET_IFNAME="lo")
    replaced = run_program(installed, launch, PROCGROUP_REPLACE_GLOO="1", GLOO_SOCKET_IFNAME="lo")
    assert on_gloo.returncode == 0, on_gloo.stderr
    assert replaced.returncode == 0, replaced.stderr
    assert sorted(replaced.stdout.splitlines()) == sorted(on_gloo.stdout.splitlines())


def test_other_devices_keep_the_backend_that_was_named_for_them(installed: Path) -> None:
    source = """
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
dist.init_process_group("cpu:procgroup,meta:fake", store=dist.HashStore(), rank=0, world_size=1)
world = dist.group.WORLD
print(sorted(device.type for device in world._device_types))
dist.all_reduce(torch.ones(3, device="meta"))
print(type(world._get_backend(torch.device("meta"))).__name__, world._get_backend(torch.device("cpu")) is world)
total = torch.ones(2)
dist.all_reduce(total)
print(total.tolist())
dist.destroy_process_group()
"""
    done = run_program(installed, source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['cpu', 'meta']", "FakeProcessGroup True", "[1.0, 1.0]"]
