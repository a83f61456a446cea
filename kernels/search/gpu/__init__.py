"""The search on a device: Triton kernels and the launches that join them."""
