"""Key-value stores, through which processes find each other.

``HashStore`` (threads of one process), ``FileStore`` (processes that share a file), ``TCPStore`` (any
processes), ``EtcdStore`` and ``RedisStore`` (any processes, on a server that outlives them), ``PrefixStore``
(a part of another store). They are imported on first use, so that only the first three load the native module,
and only RedisStore loads the client library of Redis.
"""

from procgroup import bound_on_first_use

_MODULE_OF_NAME = {
    "EtcdStore": "etcd",
    "FileStore": "file",
    "HashStore": "hash",
    "PrefixStore": "prefix",
    "RedisStore": "redis",
    "Store": "store",
    "TCPStore": "tcp",
}

__all__ = ["EtcdStore", "FileStore", "HashStore", "PrefixStore", "RedisStore", "Store", "TCPStore"]

__getattr__, __dir__ = bound_on_first_use(__name__, _MODULE_OF_NAME)
