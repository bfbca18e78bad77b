"""Loop nests: fused groups of elementwise, reduction, layout and gather ops, for any target.

A region (one op, or the subgraph of an `elementwise_region`) goes through these files in order:

- `decompose`       composite ops such as softmax as the primitive ops that a nest can hold
- `index_map`       affine index expressions over loop axes; delinearisation for reshapes
- `trace`           a graph to instructions on scalar elements, loads and stores by index map; how
                    each layout op and reduction maps an index of its result to its operands
- `partition`       which values one kernel computes, which are materialised between kernels
- `schedule`        axis coalescing, choice of the vector axis, tiling; kernel arguments
- `nest`            the result: iteration spaces, strides, element instructions (pure data)
- `stages`          passes over a row and what they spill or rematerialise between them
- `strided_copies`  nests that copy or fill strided views: concat, pad, writes to states

Nothing here knows a target. The CPU emits nests as vector loops (`backends/cpu/kernels/loops`). A
GPU backend reuses everything up to `partition`, and either gives the same `Nest` a thread mapping
(row axes to blocks, spaces to the threads of a block) or writes a schedule of its own next to
`schedule`.
"""
