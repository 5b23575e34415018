"""Key-value stores, through which processes find each other.

``HashStore`` (threads of one process), ``FileStore`` (processes that share a file), ``TCPStore`` (any
processes), ``PrefixStore`` (a part of another store). They are imported on first use, so that only
TCPStore loads the native module.
"""

from procgroup.lazy_names import bound_on_first_use

_MODULE_OF_NAME = {
    "FileStore": "file",
    "HashStore": "hash",
    "PrefixStore": "prefix",
    "Store": "store",
    "TCPStore": "tcp",
}

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]

__getattr__, __dir__ = bound_on_first_use(__name__, _MODULE_OF_NAME)
