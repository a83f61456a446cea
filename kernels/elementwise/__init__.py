"""Scalar functions that numba can vectorise inside a caller's loop (see ``cpu``)."""
