"""How many kernels a captured graph holds, asked of the driver itself: torch tells from 2.13 on, and not everywhere."""

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


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
