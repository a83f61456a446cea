"""Anonymous shared memory: it lives exactly as long as a process holds it, kill -9 included.

Named segments (``shm_open``, ``multiprocessing.shared_memory``) outlive a killed owner; these have
no name in any file system. A descriptor is the only way in, and it travels from process to process
by inheritance or over a Unix socket.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import numpy.typing as npt


class Segment:
    """A mapping of shared memory; ``memory`` [size] uint8 is writable wherever it is mapped.

    The memory is returned to the system when the last process has dropped the last array made of
    it and closed its descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        """Maps what ``descriptor`` stands for, and owns it from now on."""
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(
            mmap.mmap(descriptor, self.size), np.uint8
        )

    @classmethod
    def create(cls, size: int) -> Segment:
        """New memory of ``size`` bytes, all zero.

        Raises ValueError for sizes below 1 and OSError where the system has no room.
        """
        if size < 1:
            raise ValueError(f"{size} bytes of shared memory cannot hold anything")
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("lexshard", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
        else:
            descriptor = _unlinked_file(size)
        return cls(descriptor)

    def close(self) -> None:
        """Closes the descriptor. Arrays made of ``memory`` stay valid; they keep it alive."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self.memory = np.empty(0, np.uint8)


def _unlinked_file(size: int) -> int:
    """A descriptor of a file that no longer has a name.

    Its blocks are allocated here: a full disk would otherwise be a bus error at the first write.
    """
    with tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            os.truncate(file.fileno(), size)
        return os.dup(file.fileno())
