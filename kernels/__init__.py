"""Pure functions on tensors: for every kernel a reference, a CPU and (where it pays) a GPU form."""

from kernels.compile_cache import choose_cache_folder, keep_writers_apart

choose_cache_folder()
keep_writers_apart()
