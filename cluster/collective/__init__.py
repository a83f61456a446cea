"""Groups of processes that hold one output head: gloo and NCCL behind one protocol."""
