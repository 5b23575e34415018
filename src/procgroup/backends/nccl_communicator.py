"""NCCL on this process, by nccl4py: the library, its options, and communicators with the stream of their work.

nccl4py (https://docs.nvidia.com/deeplearning/nccl/nccl4py) finds libnccl. Its bindings are called with addresses, since
its own classes would import torch, and read arrays that have been read already.

Communicators are non-blocking (NCCL's documentation, "Fault Tolerance"): a function of NCCL returns at once, and the
communicator is *in progress* until a thread of NCCL has done it. So no call waits inside of NCCL for a rank that is
lost, and the communicator can be aborted at any time, which ends its work on the GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from procgroup.backends import cuda
from procgroup.cluster.in_thread import InThread
from procgroup.errors import DistBackendError
from procgroup.groups.backend import Awaited
from procgroup.stores.store import Store

_SUCCESS, _IN_PROGRESS = 0, 7
_OLDEST = 22304
"""The first version with ncclCommInitRankScalable, by which nccl4py makes communicators."""
_CLOSE_SECONDS = 2.0
"""How long a communicator may take to end in order: it waits for its ranks' last work."""
_PAUSE_SECONDS = 0.0005
_INSTALL = "pip install 'procgroup[nccl-cu13]' (or, for CUDA 12, 'procgroup[nccl-cu12]')"


def is_installed() -> bool:
    """Return whether nccl4py and cuda-bindings are installed. They may still find no library and no GPU."""
    return all(map(_is_installed, ("nccl.core", "cuda.bindings")))


def load() -> None:
    """Load NCCL and CUDA's driver.

    Raises DistBackendError where one of them, or every GPU, is missing, and where NCCL is too old.
    """
    if not is_installed():
        raise DistBackendError(f"The backend 'nccl' needs nccl4py and cuda-bindings. Install them: {_INSTALL}.")
    try:
        gpus = cuda.count()
    except DistBackendError as error:
        raise DistBackendError(f"The backend 'nccl' needs a GPU, but {error}") from error
    if gpus == 0:
        raise DistBackendError(
            "The backend 'nccl' needs a GPU, and this process has none: is CUDA_VISIBLE_DEVICES set? Without GPUs, use "
            "the backend 'gloo'."
        )
    try:
        version = bindings().get_version()
    except (ImportError, RuntimeError, OSError) as error:
        raise DistBackendError(f"nccl4py finds no libnccl.so.2 ({error}). Install it: {_INSTALL}.") from error
    if version < _OLDEST:
        raise DistBackendError(
            f"The backend 'nccl' needs NCCL {_text_of(_OLDEST)} or later, and this process has loaded "
            f"{_text_of(version)}. Install a later one: {_INSTALL}."
        )


def read_options(options: Any) -> Mapping[str, Any]:
    """Return fields of nccl.core.NCCLConfig, given as such an object or as a dict.

    Raises TypeError for another type, ValueError for an unknown name.
    """
    names = option_names()
    if is_configuration(options):
        options = {name: value for name in names if (value := getattr(options, name)) is not None}
    if not isinstance(options, Mapping):
        raise TypeError(f"Expected the options of NCCL to be a dict or an NCCLConfig, got {options!r}")
    unknown = sorted(str(name) for name in options if name not in names)
    if unknown:
        raise ValueError(f"NCCL has no options {unknown}; expected {', '.join(names)}")
    if options.get("blocking"):
        raise ValueError("NCCL's communicators are non-blocking here, so that they can be aborted: blocking=True")
    for name, value in options.items():
        expected = str if name in ("net_name", "comm_name") else int
        if not isinstance(value, expected):
            raise TypeError(f"Expected the option {name!r} of NCCL to be of type {expected.__name__}, got {value!r}")
    return options


def option_names() -> Sequence[str]:
    """Return the names of NCCL's options; none where nccl4py is missing."""
    if not is_installed():
        return ()
    from nccl.core import NCCLConfig

    return [field.name for field in dataclasses.fields(NCCLConfig)]


def is_configuration(options: Any) -> bool:
    """Return whether these are options in nccl4py's own class."""
    known: Any = getattr(sys.modules.get("nccl.core"), "NCCLConfig", ())
    return isinstance(options, known)


def bindings() -> Any:
    """Return the functions of NCCL's library."""
    import nccl.bindings.nccl

    return nccl.bindings.nccl


class Communicator:
    """A communicator on one GPU, and the stream on which its work is queued.

    ``connect`` makes it together with the other ranks.
    """

    def __init__(self, gpu: cuda.Gpu, rank: int, size: int, options: Mapping[str, Any]) -> None:
        self.gpu = gpu
        self.stream: int = 0
        self.is_aborted: bool = False
        self._rank, self._size = rank, size
        self._options = options
        self._communicator: Any = None
        self._end: InThread | None = None

    @property
    def handle(self) -> Any:
        """The ncclComm_t, as the bindings take it."""
        return self._communicator._comm

    def connect(self, store: Store) -> Iterator[Awaited]:
        """Connect the ranks, which meet at the store; a generator as that of DeviceBackend.move.

        Raises DistBackendError on all ranks where two of them use one GPU, and for NCCL's errors.
        """
        from nccl.core import Communicator as NcclCommunicator
        from nccl.core import NCCLConfig, UniqueId

        if self._rank == 0:
            store.set("id", bytes(_unique_id()))
        store.set(f"gpu/{self._rank}", f"{_host()} {self.gpu.uuid()}")
        gpus = []
        for rank in range(self._size):
            while not store.check([f"gpu/{rank}", "id"]):
                yield rank
            gpus.append(store.get(f"gpu/{rank}").decode())
        _require_own_gpus(gpus)
        unique_id = UniqueId.from_bytes(store.get("id"))
        config = NCCLConfig(**{**self._options, "blocking": False})

        def init() -> None:
            with self.gpu.current():
                self._communicator = NcclCommunicator.init(self._size, self._rank, unique_id, config=config)
            if self.is_aborted:  # the group has failed meanwhile
                bindings().comm_abort(self.handle)

        with self.gpu.current():
            self.stream = self.gpu.make_stream()
        thread = InThread(init, "pg-nccl-init")
        while thread.is_alive():
            yield None
        with _nccl_errors(None):
            thread.result()
        yield from self.settle()

    def settle(self) -> Iterator[Awaited]:
        """Yield until NCCL has done what it was last called for. Raises DistBackendError for its error."""
        while self.check() == _IN_PROGRESS:
            yield None

    def check(self) -> int:
        """Return the communicator's state. Raises DistBackendError for an error, and when it was aborted."""
        if self.is_aborted:
            raise DistBackendError("NCCL's communicator was aborted, because the group has failed")
        state = int(bindings().comm_get_async_error(self.handle))
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise DistBackendError(_error_text(state, self.handle))
        return state

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Turn what NCCL's functions raise inside into DistBackendError."""
        return _nccl_errors(self.handle)

    def abort(self) -> None:
        """Begin to end all work, whatever it waits for, in a thread."""
        if self.is_aborted:
            return
        self.is_aborted = True
        if self._communicator is not None:
            self._end = InThread(lambda: bindings().comm_abort(self.handle), "pg-nccl-abort")

    def close(self, failed: bool) -> None:
        """End in order; after a failure, and when that takes too long, abort. Waits for some seconds at most."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        if not failed and not self.is_aborted and self._communicator is not None:
            with contextlib.suppress(DistBackendError), self.errors():
                bindings().comm_finalize(self.handle)
                while self.check() == _IN_PROGRESS and time.monotonic() < deadline:
                    time.sleep(_PAUSE_SECONDS)
                if self.check() == _SUCCESS:
                    self.is_aborted = True
                    self._end = InThread(lambda: bindings().comm_destroy(self.handle), "pg-nccl-destroy")
        self.abort()
        if self._end is not None:
            self._end.join(max(deadline - time.monotonic(), 0.1))
            if not self._end.is_alive() and self.stream:
                cuda.destroy_stream(self.stream)
                self.stream = 0


def _unique_id() -> Any:
    from nccl.core import get_unique_id

    with _nccl_errors(None):
        return get_unique_id()


def _host() -> str:
    """Return what tells this host apart from others; NCCL reads the same variable."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def _require_own_gpus(gpus: list[str]) -> None:
    """Raise DistBackendError where two ranks use one GPU. All ranks find the same."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0"):
        return
    for rank, gpu in enumerate(gpus):
        if (other := gpus.index(gpu)) != rank:
            raise DistBackendError(
                f"NCCL needs a GPU for each rank, but ranks {other} and {rank} use the same one of host "
                f"{gpu.split()[0]}: use arrays on the GPU of this rank, or pass device_id to init_process_group. "
                f"NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU, from NCCL 2.30 on."
            )


@contextlib.contextmanager
def _nccl_errors(handle: Any) -> Iterator[None]:
    error_type = bindings().NCCLError
    try:
        yield
    except error_type as error:
        raise DistBackendError(_error_text(int(error.status), handle)) from error


def _error_text(state: int, handle: Any) -> str:
    name = bindings().get_error_string(state)
    reason = bindings().get_last_error(bindings().Comm() if handle is None else handle)
    return f"NCCL: {name}" + (f" ({reason.strip()})" if reason and reason.strip() else "")


def _text_of(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
