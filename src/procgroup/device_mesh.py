"""torch.distributed.device_mesh's names: ranks as an n-dimensional array, with process groups along its dimensions."""

from procgroup.parallel.device_mesh import DeviceMesh, current_mesh
from procgroup.parallel.mesh_creation import init_device_mesh

__all__ = ["DeviceMesh", "current_mesh", "init_device_mesh"]
