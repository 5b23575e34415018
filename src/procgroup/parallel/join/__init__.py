"""Join: train on ranks with different numbers of inputs."""

from procgroup.parallel.join.join import Join as Join
from procgroup.parallel.join.join import Joinable as Joinable
from procgroup.parallel.join.join import JoinHook as JoinHook
