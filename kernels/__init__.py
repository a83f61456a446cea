"""Pure functions on tensors: for every kernel a reference, a CPU and (where it pays) a GPU form."""

from lexshard.kernels.compile_cache import keep_compiled_kernels
from lexshard.kernels.processor import choose_processor

keep_compiled_kernels()
choose_processor()
