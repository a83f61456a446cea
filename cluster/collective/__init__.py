"""Groups of processes that hold one output head: gloo, NCCL and Ray behind one protocol."""
