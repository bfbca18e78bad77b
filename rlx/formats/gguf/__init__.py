"""GGUF: metadata, a vocabulary and quantised weights in one file, or in several parts.

with GgufFile("model.gguf") as file:
    file.need("general.architecture", str)
    file.array("blk.0.attn_q.weight")    # u8 [N, row_bytes], memory-mapped
"""

from __future__ import annotations

from rlx.formats.gguf.header import ValueType
from rlx.formats.gguf.reader import GgufFile
from rlx.formats.gguf.string_array import StringArray
from rlx.formats.gguf.writer import PackedTensor, write_gguf

__all__ = ["GgufFile", "PackedTensor", "StringArray", "ValueType", "write_gguf"]
