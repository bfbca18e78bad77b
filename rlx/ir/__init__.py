"""The IR: HIR, MIR and LIR. Importing any part of it registers every op and block."""

from __future__ import annotations

import rlx.ir.blocks
import rlx.ir.graph
import rlx.ir.module
import rlx.ir.ops  # noqa: F401
