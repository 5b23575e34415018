from procgroup.stores.file import FileStore as FileStore
from procgroup.stores.hash import HashStore as HashStore
from procgroup.stores.prefix import PrefixStore as PrefixStore
from procgroup.stores.store import Store as Store
from procgroup.stores.tcp import TCPStore as TCPStore
