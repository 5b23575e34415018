from procgroup.stores.etcd import EtcdStore as EtcdStore
from procgroup.stores.file import FileStore as FileStore
from procgroup.stores.hash import HashStore as HashStore
from procgroup.stores.prefix import PrefixStore as PrefixStore
from procgroup.stores.redis import RedisStore as RedisStore
from procgroup.stores.store import Store as Store
from procgroup.stores.tcp import TCPStore as TCPStore
