"""The control block: memory that the executor and Python share, as flags and byte offsets.

Separate from the code that emits the executor, so that a stored program runs without a compiler.
"""

from __future__ import annotations

ABI = 5
"""Version of this layout: a stored program runs only with the version it was compiled for."""

# Flags of a launch: see `emit`.
BARRIER, SOLO, JUMP, HOST = 1, 2, 4, 8
LONG = 16  # for Python alone: see `interruptible`
FLUSH = 32

# The state of a thread pool. Fields that different workers write are on different cache lines.
EPOCH, SLEEPERS, ARRIVED, GENERATION, BARRIER_SLEEPERS = 0, 64, 128, 192, 256
FINISHED, PROGRAM, FIRST, LAST, YIELD_AT = 320, 384, 392, 400, 408
STOP, WORKERS, WAKE = 448, 452, 456
SPIN, IDLE_YIELD, BARRIER_YIELD, BUDGET = 464, 472, 480, 488
SHARED_CORE = 496  # whether workers may have shared a core at the end of the last run
CPUS = 512  # an i32 per worker: the core it was on at the end of its last run
STATE_BYTES = CPUS + 4 * 256

# A program: byte offsets of its header, and of one launch.
LAUNCHES, PATCHES, PATCH_COUNT, ARGS, DYNAMIC_ARGS, PROFILE, LAUNCH_COUNT, USE_WORKERS = range(
    0, 64, 8
)
HEADER_BYTES = 64
LAUNCH_BYTES = 24
LAUNCH_FN, LAUNCH_ARGS, LAUNCH_FLAGS, LAUNCH_PHASE = 0, 8, 16, 20

# A profile has a record of three i64 for each worker and launch.
BEGIN, END, ITERATIONS = 0, 8, 16
STAMP_BYTES = 24

# A decode loop: byte offsets of its header, and of one copy from an output to an input.
LOOP_COUNT, LOOP_DONE, LOOP_RESUME_AT, LOOP_SIZE, LOOP_BASE, LOOP_SLOPE = range(0, 48, 8)
LOOP_DYNAMIC_COUNT, LOOP_STATUS, LOOP_EMITTED, LOOP_LOG = range(48, 80, 8)
LOOP_STOP, LOOP_STOP_COUNT, LOOP_COPIES, LOOP_COPY_COUNT = range(80, 112, 8)
LOOP_BYTES = 112
COPY_TO, COPY_FROM = 0, 8
COPY_BYTES = 16
