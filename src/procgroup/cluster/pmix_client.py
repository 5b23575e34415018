"""A program that broadcasts a text of rank 0 to all tasks of an Open MPI job through PMIx; cluster/pmix.py runs it.

``python pmix_client.py LIBRARY`` reads the text from standard input on rank 0 and prints it on all. It is a
process of its own, because libpmix cannot be initialised twice in a process, and an MPI library in the rank may use it.
Types and constants are those of the PMIx standard, version 4, which libpmix has kept since version 2.
"""

from __future__ import annotations

import ctypes
import sys

_KEY = b"procgroup.store"
_STRING = 3
_GLOBAL = 3
_MAX_NAMESPACE = 255


class _Process(ctypes.Structure):
    _fields_ = [("namespace", ctypes.c_char * (_MAX_NAMESPACE + 1)), ("rank", ctypes.c_uint32)]


class _Data(ctypes.Union):
    _fields_ = [("string", ctypes.c_char_p), ("largest", ctypes.c_byte * 32)]


class _PmixValue(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("data", _Data)]


class _Failed(Exception):
    """A function of libpmix returned an error."""


def main() -> int:
    """Broadcast; return the exit status."""
    try:
        print(_broadcast(ctypes.CDLL(sys.argv[1])))
    except (_Failed, OSError, AttributeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _broadcast(library: ctypes.CDLL) -> str:
    library.PMIx_Error_string.restype = ctypes.c_char_p
    me = _Process()
    _call(library, "PMIx_Init", ctypes.byref(me), None, ctypes.c_size_t(0))
    try:
        if me.rank == 0:
            value = _PmixValue(_STRING, _Data(string=sys.stdin.read().strip().encode()))
            _call(library, "PMIx_Put", ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value))
            _call(library, "PMIx_Commit")
        _call(library, "PMIx_Fence", None, ctypes.c_size_t(0), None, ctypes.c_size_t(0))
        return _get(library, _Process(me.namespace, 0))
    finally:
        library.PMIx_Finalize(None, ctypes.c_size_t(0))


def _get(library: ctypes.CDLL, process: _Process) -> str:
    found = ctypes.POINTER(_PmixValue)()
    _call(library, "PMIx_Get", ctypes.byref(process), _KEY, None, ctypes.c_size_t(0), ctypes.byref(found))
    if found.contents.type != _STRING:
        raise _Failed(f"PMIx_Get returned a value of type {found.contents.type}, expected a string ({_STRING})")
    return bytes(found.contents.data.string).decode()


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(library, name)(*arguments)
    if status != 0:
        raise _Failed(f"{name} failed: {library.PMIx_Error_string(status).decode()} ({status})")


if __name__ == "__main__":
    sys.exit(main())
