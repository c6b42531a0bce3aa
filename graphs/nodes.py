"""How many kernels a captured graph holds, and its way to the device, asked of the driver itself: torch tells from 2.13 on, and
not everywhere."""

from __future__ import annotations

import ctypes
from functools import cache

_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL, cuda.h


def count_kernels(graph: int) -> int | None:
    """Kernel nodes of a cudaGraph_t, as torch.cuda.CUDAGraph.raw_cuda_graph() gives it; None where the driver cannot be asked."""
    driver = _driver()
    if driver is None:
        return None
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        return None
    nodes = (ctypes.c_void_p * count.value)()
    if count.value and driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)):
        return None
    kernels, kind = 0, ctypes.c_int()
    for node in nodes:
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)):
            return None
        kernels += kind.value == _KERNEL
    return kernels


def upload(executable: int, stream: int) -> bool:
    """Puts a cudaGraphExec_t, as raw_cuda_graph_exec() gives it, on the device: the memory that its first replay would have
    taken is taken now. False where the driver cannot be asked or will not."""
    driver = _driver()
    return driver is not None and not driver.cuGraphUpload(ctypes.c_void_p(executable), ctypes.c_void_p(stream))


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
