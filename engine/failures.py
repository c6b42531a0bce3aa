"""What a user is told about an error that they can mend, in one line."""

import errno

_WHAT_TO_DO = (
    ((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room there"),
    ((errno.EROFS, errno.EACCES, errno.EPERM), "Make it readable and writable"),
    ((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "Move away what has that name"),
    ((errno.EIO, errno.ESTALE, errno.ENODEV), "See after the disk or network behind it"),
)
_LESS_MEMORY = (
    "Lower buckets.token_budget, buckets.num_anchors or model.head_chunk, or free memory that other processes hold."
)
# Not torch's allocator says so but the driver or cuBLAS: there is no room for a context, a graph, a handle or a work space.
_NO_ROOM_ON_THE_GPU = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "`cublasCreate(handle)`")


def leaves_steps_whole(error: BaseException | None) -> bool:
    """Whether what came to grief in the middle of a run is data, a disk, memory or the graphs, so that the steps before it are
    what they would have been and are worth a checkpoint."""
    from engine.checking import CheckFailed

    return isinstance(error, Exception) and not isinstance(error, CheckFailed) and message_of(error) is not None


def message_of(error: Exception) -> str | None:
    """The line for ValueError, OSError, MemoryError and what is derived from them, a failed capture, a failed check and a full
    GPU; None for a fault of ours."""
    if isinstance(error, OSError) and error.strerror:
        # A write that fails knows no name: the file was opened long before.
        name = error.filename2 or error.filename  # of a rename where it would have gone
        where = "could not write" if name is None else str(name)
        hint = next(
            (f" {words}; the same command goes on." for codes, words in _WHAT_TO_DO if error.errno in codes), ""
        )
        return f"{where}: {error.strerror}.{hint}"
    if isinstance(error, MemoryError):
        return f"{str(error) or 'the memory of this machine is full'}. {_LESS_MEMORY}"
    if isinstance(error, ValueError | OSError):
        return str(error)
    if isinstance(error, RuntimeError):
        # Whoever raised these has loaded torch already.
        from torch import OutOfMemoryError

        from buffers.staging import LoaderEnded
        from engine.checking import CheckFailed
        from graphs.executor import CaptureError

        if isinstance(error, CaptureError | CheckFailed | LoaderEnded):
            return str(error)
        if any(words in str(error) for words in _NO_ROOM_ON_THE_GPU):
            from engine.gpu_holders import all_holders

            return f"the GPU's memory is full ({all_holders()}). End what should not run there, or take another GPU."
        # The CPU's allocator has no type of its own for a full memory.
        full = ("can't allocate memory", "Storage size calculation overflowed")
        if isinstance(error, OutOfMemoryError) or any(words in str(error) for words in full):
            return f"{str(error).splitlines()[0]} {_LESS_MEMORY}"
    return None
