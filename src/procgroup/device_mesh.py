"""torch.distributed.device_mesh's names: ranks as an n-dimensional array, with process groups along its dimensions."""

from procgroup.parallel.mesh import DeviceMesh, current_mesh, init_device_mesh

__all__ = ["DeviceMesh", "current_mesh", "init_device_mesh"]
