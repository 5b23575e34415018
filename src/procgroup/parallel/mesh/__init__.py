"""DeviceMesh: arrange the ranks as an n-dimensional array, with a process group along each dimension."""

from procgroup.parallel.mesh.device_mesh import DeviceMesh as DeviceMesh
from procgroup.parallel.mesh.device_mesh import current_mesh as current_mesh
from procgroup.parallel.mesh.device_mesh import init_device_mesh as init_device_mesh
