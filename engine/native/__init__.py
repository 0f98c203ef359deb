"""Compiled kernels of the runtime: their C source, how it is built at set-up, and how it is called."""
