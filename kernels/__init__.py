"""Pure functions on tensors: for every kernel a reference, a CPU and (where it pays) a GPU form."""

from kernels.compile_cache import choose_cache_folder, keep_writers_apart
from kernels.processor import choose_processor

choose_cache_folder()
choose_processor()
keep_writers_apart()
