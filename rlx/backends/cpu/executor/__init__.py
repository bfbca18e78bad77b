"""The native executor: a thread pool that runs programs (tables of kernel launches) without Python.

- `control_block`  the memory layout that native code and Python share, and its version
- `emit`           the executor: workers, epochs, the loop over steps, profiling, early return
- `barrier`        how workers wait for each other: spin, yield, futex
- `decode_loop`    many runs in one call, each fed by the last: one per generated token
- `select`         the executor in use: stored in an artifact, or compiled for this machine
"""
