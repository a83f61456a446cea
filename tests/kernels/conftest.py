"""No example has a deadline: the first one may compile a kernel."""

from hypothesis import settings

settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")
