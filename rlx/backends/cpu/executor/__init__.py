"""The native executor: worker threads that run programs (tables of kernel launches) without Python.

- `control_block`  the memory layout that native code and Python share, and its version
- `emit`           the executor: workers, epochs, the loop over launches, profiling, decode loop
- `barrier`        how workers wait for each other: spin, yield, futex
"""
