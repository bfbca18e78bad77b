"""Memory that the native driver and Python share: flags and byte offsets, see `driver`.

Apart from the driver's code, so that a program from disk runs without what emits code.
"""

from __future__ import annotations

ABI = 4
"""Counts the changes of what is below: code on disk fits only a driver of its own number."""

BARRIER, ALONE, JUMP, HOST = 1, 2, 4, 8

# The pool's state: byte offsets. What different workers write lies on different cache lines.
EPOCH, SLEEPERS, ARRIVED, GENERATION, BARRIER_SLEEPERS = 0, 64, 128, 192, 256
FINISHED, PROGRAM, FIRST, LAST, YIELD_AT = 320, 384, 392, 400, 408
STOP, WORKERS, WAKE = 448, 452, 456
SPIN, IDLE_YIELD, BARRIER_YIELD, BUDGET = 464, 472, 480, 488
CROWDED = 496  # whether workers may have shared a core at the end of the last run
CPUS = 512  # an i32 for each worker: the core it was on when its last run ended
STATE_BYTES = CPUS + 4 * 256

# A program: byte offsets of its header, and of one step.
STEPS, PATCHES, PATCH_COUNT, ARGS, LIVE, PROFILE, STEP_COUNT, USE_WORKERS = range(0, 64, 8)
HEADER_BYTES = 64
STEP_BYTES = 24
STEP_FN, STEP_ARGS, STEP_FLAGS, STEP_PHASE = 0, 8, 16, 20

# A profile has a record of three words for each worker and step.
BEGIN, END, ROUNDS = 0, 8, 16
STAMP_BYTES = 24

# A chain, runs that feed each other: byte offsets of its header, and of one move.
CHAIN_COUNT, CHAIN_DONE, CHAIN_AT, CHAIN_SIZE, CHAIN_BASE, CHAIN_SLOPE = range(0, 48, 8)
CHAIN_LIVE_COUNT, CHAIN_STATUS, CHAIN_KEPT, CHAIN_LOG = range(48, 80, 8)
CHAIN_ENDS, CHAIN_END_COUNT, CHAIN_MOVES, CHAIN_MOVE_COUNT = range(80, 112, 8)
CHAIN_BYTES = 112
MOVE_TO, MOVE_FROM = 0, 8
MOVE_BYTES = 16
