"""Test distributed code in milliseconds: ranks as threads of one process, with real data movement.

``run_ranks(function, 4)`` calls a function on four ranks; ``connected_groups(4)`` gives their groups to one
thread. The pytest plug-in comes with the package: a test that takes ``ranks`` gets ``run_ranks``. Authors of backends
inherit the tests of ``backend_contract.BackendContract``.
"""

from procgroup.errors import RanksFailed, RanksTimeout
from procgroup.testing.ranks import run_ranks
from procgroup.testing.world import connected_groups

__all__ = ["RanksFailed", "RanksTimeout", "connected_groups", "run_ranks"]
