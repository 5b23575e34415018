"""Measure calls on arrays of a GPU: procgroup, torch with NCCL, CuPy's NCCL, and a bare loop of C++, in one run.

    python benchmarks/gpu.py --json gpu.json
    LD_PRELOAD=/path/of/libnccl.so.2 python benchmarks/gpu.py --ranks 2 --peers procgroup bare --sizes 8 1M

All ranks use GPU 0. Two ranks on one GPU need NCCL 2.30 or later, and take turns of some 4.5 ms on it: compare their
host times. Each rank is one process with the groups of all peers, which thus share NCCL's library, the arrays, the
stream and the GPU's context, and take turns every few calls. The threads of all peers exist during all turns.

    host    the time of some calls in a row without a wait for the GPU, per call
    done    the time of one call and the wait for the stream; of Python's call also for the bare loop

Each is that of the slowest rank. A size is that of one rank's array or block of float32. send_recv goes one way.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, timedelta
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from procgroup.diagnostics.bench.report import parse_size, size_text
from procgroup.diagnostics.bench.rounds import rotating_order

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv")
SIZES = ("8", "1K", "64K", "1M", "16M", "256M")
PEERS = ("procgroup", "torch", "cupy", "bare")
PACKAGES = {"torch": "PyTorch", "cupy": "CuPy"}
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8", "NCCL_SOCKET_IFNAME": "lo"}
OLDEST_ON_A_SHARED_GPU = 23000
FEWEST, MOST = (5, 3), (100, 20)
"""The calls of a turn: those in a row, and those that are waited for."""
ANSWER_SECONDS = 60
GRACE_SECONDS, LAST_SECONDS = 20, 35
"""After the time for measuring: when the ranks are killed, and this process where that did not end it."""
FLOAT, SUM, ROOT = 7, 0, 0
"""Of NCCL: ncclFloat32, ncclSum; and the rank that broadcasts."""

Repeat = Callable[[int], object]
"""Makes some calls in a row."""
Calls = Callable[[str, int], Repeat]
"""What a peer does for an operation and a number of elements."""


# --- a rank ---


class Cuda:
    """CUDA's driver. Its symbols name old signatures of some functions, cuGetProcAddress gives the new ones."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def function(self, name: str) -> Callable[..., int]:
        address = ctypes.c_void_p()
        self._library.cuGetProcAddress_v2(name.encode(), ctypes.byref(address), 12000, ctypes.c_uint64(0), None)
        return ctypes.CFUNCTYPE(ctypes.c_int)(address.value or 0)

    def call(self, name: str, *arguments: Any) -> None:
        require(self.function(name)(*arguments), name)

    def allocate(self, count: int) -> CudaArray:
        address = ctypes.c_void_p()
        self.call("cuMemAlloc", ctypes.byref(address), ctypes.c_size_t(4 * count))
        return CudaArray(address.value or 0, count)


class CudaArray:
    """An array in memory of the driver, on the legacy default stream."""

    def __init__(self, address: int, count: int) -> None:
        fixed = {"typestr": "<f4", "strides": None, "stream": 1, "version": 3}
        self.__cuda_array_interface__ = {"shape": (count,), "data": (address, False), **fixed}

    def __getitem__(self, part: slice) -> CudaArray:
        return CudaArray(address_of(self), part.stop)


def address_of(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


def length_of(array: Any) -> int:
    return int(array.__cuda_array_interface__["shape"][0])


def new_arrays(cuda: Cuda, peers: Sequence[str], count: int) -> tuple[str, int, list[Any]]:
    """Return two arrays of the first library that takes part, with the library's name and its current stream."""
    if "torch" in peers:
        import torch

        if torch.cuda.is_available():
            stream = torch.cuda.current_stream().cuda_stream
            return "torch", stream, [torch.zeros(count, device="cuda") for _ in range(2)]
    if "cupy" in peers:
        import cupy

        return "CuPy", cupy.cuda.get_current_stream().ptr, [cupy.zeros(count, "float32") for _ in range(2)]
    return "the driver", 0, [cuda.allocate(count) for _ in range(2)]


class UniqueId(ctypes.Structure):
    _fields_: ClassVar[Any] = [("internal", ctypes.c_byte * 128)]


class Rank:
    """One process of a measurement, whose methods the driver calls."""

    def __init__(self, rank: int, ranks: int, peers: Sequence[str], most_bytes: int, folder: str) -> None:
        self._rank, self._ranks, self._folder = rank, ranks, folder
        self._peers: dict[str, Calls] = {}
        self._modules: list[Any] = []
        self._cuda = Cuda()
        if "torch" in peers:
            import torch  # noqa: F401 - first, since procgroup takes the NCCL that is loaded
        from procgroup.backends import nccl_library

        nccl_library.load()
        self._nccl = ctypes.CDLL("libnccl.so.2")  # the loaded one has this name
        self._library, stream, arrays = new_arrays(self._cuda, peers, most_bytes // 4 * ranks)
        self._stream = ctypes.c_void_p(stream)
        self._send, self._receive = arrays
        self._wait_for_stream = partial(self._cuda.function("cuStreamSynchronize"), self._stream)

    def describe(self) -> tuple[int, str]:
        """Return NCCL's version, and what the times depend on."""
        nccl, cuda, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(100)
        self._nccl.ncclGetVersion(ctypes.byref(nccl))
        self._cuda.call("cuDriverGetVersion", ctypes.byref(cuda))
        self._cuda.call("cuDeviceGetName", name, 100, 0)
        texts = [name.value.decode(), f"CUDA {cuda.value // 1000}.{cuda.value // 10 % 100}"]
        with suppress(OSError):  # the stand-ins have no driver in the kernel
            found = re.search(r"NVRM.* (\d+\.[\d.]+) ", Path("/proc/driver/nvidia/version").read_text())
            texts += [f"driver {found[1]}"] if found else []
        texts += [f"NCCL {text_of(nccl.value)}"]
        modules = [sys.modules[module] for module in ("procgroup", "torch", "cupy") if module in sys.modules]
        texts += [f"{module.__name__} {module.__version__}" for module in modules]
        return nccl.value, ", ".join([*texts, f"arrays of {self._library}"])

    def unique_id(self) -> bytes:
        made = UniqueId()
        require(self._nccl.ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def open(self, peer: str, unique_id: bytes) -> None:
        """Join the group of a peer."""
        self._peers[peer] = getattr(self, f"_{peer}")(unique_id)

    def measure(self, peer: str, operation: str, count: int, calls: tuple[int, int], checks: bool) -> Any:
        """Return the time of a call in a row, and those of calls that are waited for."""
        repeat = self._peers[peer](operation, count)
        if checks:
            self._require_right(repeat, operation, count)
        self._time_until_done(repeat)  # the ranks begin together
        begin = time.perf_counter()
        repeat(calls[0])
        host = (time.perf_counter() - begin) / calls[0]
        self._synchronize()
        return host, [self._time_until_done(repeat) for _ in range(calls[1])]

    def close(self) -> None:
        for module in self._modules:
            module.destroy_process_group()

    def _synchronize(self) -> None:
        require(self._wait_for_stream(), "cuStreamSynchronize")

    def _time_until_done(self, repeat: Repeat) -> float:
        begin = time.perf_counter()
        repeat(1)
        self._synchronize()
        return time.perf_counter() - begin

    def _require_right(self, repeat: Repeat, operation: str, count: int) -> None:
        """Compare the first and the last element of a result; then let all be 0, so that no sum overflows."""
        send, receive = self._views(operation, count)
        total = self._ranks * (self._ranks + 1) / 2
        wanted = {"all_gather": (1, self._ranks), "broadcast": (1, 1), "send_recv": (1, 1)}
        self._fill(receive, 0)
        self._fill(send, self._rank + 1)
        self._time_until_done(repeat)
        first, last = ctypes.c_float(), ctypes.c_float()
        for element, place in ((first, 0), (last, length_of(receive) - 1)):
            address = ctypes.c_void_p(address_of(receive) + 4 * place)
            self._cuda.call("cuMemcpyDtoH", ctypes.byref(element), address, ctypes.c_size_t(4))
        if (first.value, last.value) != wanted.get(operation, (total, total)):
            raise RuntimeError(f"a wrong result, {first.value:g} to {last.value:g}")
        self._fill(send, 0)

    def _fill(self, array: Any, value: float) -> None:
        (bits,) = struct.unpack("I", struct.pack("f", value))
        where, count = ctypes.c_void_p(address_of(array)), ctypes.c_size_t(length_of(array))
        self._cuda.call("cuMemsetD32Async", where, ctypes.c_uint(bits), count, self._stream)

    def _views(self, operation: str, count: int) -> tuple[Any, Any]:
        """Return what a call reads and what it writes: the same where the operation has one array."""
        array = self._send[:count]
        if operation == "all_gather":
            return array, self._receive[: count * self._ranks]
        if operation == "reduce_scatter":
            return self._send[: count * self._ranks], self._receive[:count]
        return array, array

    # The peers.

    def _procgroup(self, _: bytes) -> Calls:
        import procgroup

        return self._joined(procgroup, device_id=0, timeout=30)

    def _torch(self, _: bytes) -> Calls:
        import torch
        from torch import distributed

        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} finds no GPU")
        return self._joined(distributed, device_id=torch.device("cuda:0"), timeout=timedelta(seconds=30))

    def _joined(self, module: Any, **how: Any) -> Calls:
        """Join a group of torch.distributed or procgroup, whose calls have the same names."""
        where = f"file://{self._folder}/{module.__name__}-{self._ranks}"
        module.init_process_group("nccl", init_method=where, rank=self._rank, world_size=self._ranks, **how)
        self._modules.append(module)
        old_names = not hasattr(module, "all_gather_single")  # torch before 2.13; from then on they warn in each call
        all_gather = module.all_gather_into_tensor if old_names else module.all_gather_single
        reduce_scatter = module.reduce_scatter_tensor if old_names else module.reduce_scatter_single

        def calls(operation: str, count: int) -> Repeat:
            send, receive = self._views(operation, count)
            made = {
                "all_reduce": partial(module.all_reduce, send),
                "all_gather": partial(all_gather, receive, send),
                "reduce_scatter": partial(reduce_scatter, receive, send),
                "broadcast": partial(module.broadcast, send, ROOT),
                "send_recv": partial(module.recv, send, 0) if self._rank else partial(module.send, send, 1),
            }
            return in_a_row(made[operation])

        return calls

    def _cupy(self, unique_id: bytes) -> Calls:
        from cupy.cuda import nccl

        made = nccl.NcclCommunicator(self._ranks, struct.unpack("128b", unique_id), self._rank)
        stream = self._stream.value or 0

        def calls(operation: str, count: int) -> Repeat:
            send, receive = map(address_of, self._views(operation, count))
            message = made.recv if self._rank else made.send
            return in_a_row(
                {
                    "all_reduce": partial(made.allReduce, send, receive, count, FLOAT, SUM, stream),
                    "all_gather": partial(made.allGather, send, receive, count, FLOAT, stream),
                    "reduce_scatter": partial(made.reduceScatter, send, receive, count, FLOAT, SUM, stream),
                    "broadcast": partial(made.broadcast, send, receive, count, FLOAT, ROOT, stream),
                    "send_recv": partial(message, send, count, FLOAT, 1 - self._rank, stream),
                }[operation]
            )

        return calls

    def _bare(self, unique_id: bytes) -> Calls:
        made, shared = ctypes.c_void_p(), UniqueId.from_buffer_copy(unique_id)
        require(self._nccl.ncclCommInitRank(ctypes.byref(made), self._ranks, shared, self._rank), "ncclCommInitRank")
        repeat = ctypes.CDLL(f"{self._folder}/gpu_loop.so").repeat
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        repeat.argtypes = [integer, integer, *[pointer] * 3, ctypes.c_size_t, integer, integer, pointer, pointer]
        message = "ncclRecv" if self._rank else "ncclSend"
        functions = ("ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclBroadcast", message)

        def calls(operation: str, count: int) -> Repeat:
            number, views = OPERATIONS.index(operation), map(address_of, self._views(operation, count))
            function = ctypes.cast(self._nccl[functions[number]], pointer)
            last = 1 - self._rank if operation == "send_recv" else 0  # SUM or ROOT, where it is not the peer
            arguments = number, function, *views, count, FLOAT, last, made, self._stream
            return lambda times: require(repeat(times, *arguments), functions[number])

        return calls


def in_a_row(call: Callable[[], object]) -> Repeat:
    def repeat(times: int) -> None:
        for _ in range(times):
            call()

    return repeat


def require(status: int, function: str) -> None:
    if status:
        raise RuntimeError(f"{function} returns the error {status}")


def text_of(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def serve(connection: Connection, number: int, ranks: int, *arguments: Any) -> None:
    """Answer requests with (True, the result) or (False, the error), until the driver ends or kills this process."""
    os.environ.update({**SHARED_GPU, **os.environ} if ranks > 1 else {})
    rank: Rank | None = None
    with suppress(EOFError, OSError):
        while True:
            name, values = connection.recv()
            try:
                rank = rank or Rank(number, ranks, *arguments)
                connection.send((True, getattr(rank, name)(*values)))
            except Exception as error:
                connection.send((False, f"{type(error).__name__}: {error}"))


# --- the driver ---


class Stopped(Exception):
    """The run cannot go on; the text says why."""


class Refused(Stopped):
    """All ranks have answered, some with an error. Without the peer that they were asked about the run can go on."""


class Ranks:
    """The processes of a measurement. Leaving the context kills them."""

    def __init__(self, ranks: int, killed_at: float, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._killed_at = killed_at
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, ranks, *arguments), daemon=True)
            process.start()
            theirs.close()  # the end of the process then ends the connection
            self._processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)

    def ask(self, what: str, name: str, *values: Any, of: int | None = None) -> list[Any]:
        """Call a method of all ranks, or of the first ones; return the results. Raises Stopped for any failure."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections[:of])}
        for connection in waiting:
            with suppress(OSError):  # a rank that has ended is found below
                connection.send((name, values))
        answers: dict[int, tuple[bool, Any]] = {}
        until = min(time.monotonic() + ANSWER_SECONDS, self._killed_at)
        while waiting:
            ready = wait(list(waiting), max(0, until - time.monotonic()))
            if not ready:
                late = [f"rank {rank} has not answered" for rank in waiting.values()]
                raise Stopped(f"{what}: {'; '.join([*late, *errors_in(answers)])}")
            for rank in [waiting.pop(connection) for connection in list(waiting) if connection in ready]:
                answers[rank] = self._answer(rank, what)
        if errors := errors_in(answers):
            raise Refused(f"{what}: {'; '.join(errors)}")
        return [answers[rank][1] for rank in sorted(answers)]

    def _answer(self, rank: int, what: str) -> Any:
        try:
            return self._connections[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(5)
            status = self._processes[rank].exitcode
            raise Stopped(f"{what}: rank {rank} has ended, exit status {status}") from None


def errors_in(answers: Mapping[int, tuple[bool, Any]]) -> list[str]:
    return [f"rank {rank}: {text}" for rank, (is_right, text) in sorted(answers.items()) if not is_right]


class Times:
    """The times of a peer with an operation and size, of the slowest rank in each."""

    def __init__(self) -> None:
        self.host: list[float] = []
        self.done: list[float] = []
        self.calls = 0

    def add(self, of_ranks: Sequence[tuple[float, Sequence[float]]], calls: tuple[int, int]) -> None:
        self.host.append(max(host for host, _ in of_ranks))
        self.done += map(max, zip(*(done for _, done in of_ranks), strict=True))
        self.calls += sum(calls)


class Measurement:
    """What one run measures: printed row by row, and kept as records. ``failure`` is the latest, or ""."""

    def __init__(self, sizes: Sequence[int], turns: int, folder: str, killed_at: float) -> None:
        self._sizes, self._turns, self._folder, self._killed_at = sizes, turns, folder, killed_at
        self.records: list[dict[str, Any]] = []
        self.failure = ""

    def run(self, number: int, peers: Sequence[str], until: float) -> None:
        """Start so many ranks, and measure until that time."""
        with Ranks(number, self._killed_at, peers, max(self._sizes), self._folder) as ranks:
            (version, description), *_ = ranks.ask("the start", "describe")
            if number > 1 and version < OLDEST_ON_A_SHARED_GPU:
                print(f"{number} ranks were left out: on one GPU they need NCCL 2.30, this is {text_of(version)}")
                return
            opened = [peer for peer in peers if is_open(ranks, peer)]
            print(f"\n{number} rank{'s' * (number > 1)}, {date.today()}: {description}")
            print("operation      bytes  peer         host µs    minimum    done µs    minimum")
            operations = OPERATIONS if number > 1 else OPERATIONS[:-1]
            rows = [(size, operation) for size in self._sizes for operation in operations]
            for place, (size, operation) in enumerate(rows):
                left = until - time.monotonic()
                if left <= 0:
                    names = ", ".join(f"{operation} of {size_text(size)}" for size, operation in rows[place:])
                    print(f"Left out, as the time is used up: {names}")
                    break
                times = self._take_turns(ranks, opened, operation, size, left / (len(rows) - place))
                for peer in times:
                    self._add({"operation": operation, "bytes": size, "ranks": number, "peer": peer}, times[peer])
            ranks.ask("the end", "close")

    def _take_turns(
        self, ranks: Ranks, peers: list[str], operation: str, size: int, seconds: float
    ) -> dict[str, Times]:
        """Let the peers measure in turn: a first, short turn of each, then as many and as long ones as time allows."""
        if not peers:
            raise Stopped("no peer is left")
        times = {peer: Times() for peer in peers}
        calls, turn_seconds, until = FEWEST, 0.0, time.monotonic() + seconds
        for turn in range(self._turns):
            begin = time.monotonic()
            if turn > 0 and begin + turn_seconds > until:
                break
            for peer in rotating_order(peers, turn):
                try:
                    what = f"{peer}, {operation} of {size_text(size)}"
                    times[peer].add(ranks.ask(what, "measure", peer, operation, size // 4, calls, turn == 0), calls)
                except Refused as refused:
                    self.failure = f"{refused}; {peer} is left out from here on"
                    print(self.failure)
                    peers.remove(peer)
                    del times[peer]
            turn_seconds = time.monotonic() - begin
            if turn == 0:
                growth = max(1, (until - time.monotonic()) / turn_seconds / self._turns)
                calls = (min(int(growth * FEWEST[0]), MOST[0]), min(int(growth * FEWEST[1]), MOST[1]))
                turn_seconds *= calls[0] / FEWEST[0]
        return times

    def _add(self, row: dict[str, Any], times: Times) -> None:
        figures = {"host_us": summary(times.host), "done_us": summary(times.done)}
        self.records.append({**row, **figures, "calls": times.calls})
        cells = "".join(f" {value:10,.1f}" for both in figures.values() for value in both.values())
        print(f"{row['operation']:14} {size_text(row['bytes']):>5}  {row['peer']:9}{cells}")


def summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": median(seconds) * 1e6, "minimum": min(seconds) * 1e6}


def is_open(ranks: Ranks, peer: str) -> bool:
    """Let the ranks join the group of a peer; print why they cannot."""
    try:
        (unique_id,) = ranks.ask(f"the id of {peer}", "unique_id", of=1)
        ranks.ask("the start", "open", peer, unique_id)
    except Refused as refused:
        print(f"{peer} was left out: {refused}")
        return False
    return True


def installed(peers: Sequence[str], folder: str) -> Iterator[str]:
    """Yield the peers that are there, and print why others are not; compile the bare loop."""
    for peer in peers:
        reason = ""
        if peer in PACKAGES and find_spec(peer) is None:
            reason = f"{PACKAGES[peer]} is not installed"
        elif peer == "bare":
            reason = compile_loop(folder)
        if reason:
            print(f"{peer} was left out: {reason}")
        else:
            yield peer


def compile_loop(folder: str) -> str:
    """Compile gpu_loop.cpp; return why that cannot be done, or ""."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return "no C++ compiler; install g++ or name one in CXX"
    source = Path(__file__).with_name("gpu_loop.cpp")
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", str(source), "-o", f"{folder}/gpu_loop.so"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=ANSWER_SECONDS)
    return f"gpu_loop.cpp does not compile:\n{done.stderr}" if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--seconds", type=float, default=200, help=f"to measure; all ends {LAST_SECONDS} s later")
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=[parse_size(size) for size in SIZES])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--turns", type=int, default=10, help="of each peer with an operation and size, at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.setitimer(signal.ITIMER_REAL, options.seconds + LAST_SECONDS)  # not caught, it ends the process
    end = time.monotonic() + options.seconds
    with TemporaryDirectory() as folder:
        measurement = Measurement(options.sizes, options.turns, folder, end + GRACE_SECONDS)
        try:
            peers = list(installed(options.peers, folder))
            for place, number in enumerate(options.ranks):
                now = time.monotonic()
                measurement.run(number, peers, now + (end - now) / (len(options.ranks) - place))
        except Stopped as stopped:
            measurement.failure = f"Stopped; the rows above are what was measured. {stopped}"
    if options.json:
        options.json.write_text(json.dumps(measurement.records, indent=1) + "\n")
    if measurement.failure:
        print(measurement.failure, file=sys.stderr)
    return 1 if measurement.failure else 0


if __name__ == "__main__":
    sys.exit(main())
