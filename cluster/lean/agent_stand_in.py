"""What runs in the place of an agent that a Ray node insists on, but that is never asked: it waits,
and ends with the node. Run by its path with next to nothing imported, in ten megabytes."""

import ctypes
import os
import signal
import sys
import time

_SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h
_LOOK_SECONDS = 2.0

if __name__ == "__main__":
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        signal.pause()
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
