"""Loop nests on the CPU: vector code for elementwise, reduction, layout and gather ops.

Lowerings: `lower_region` (fused regions and single ops), `lower_copies` (concat, pad, states),
`lower_indexing` (scatter, cumsum). `nest_kernel` chooses the emitter of a nest by its schedule:

- `rows`             vectorised along the row; `row_loops` has the loops of a long row
- `split_rows`       few long rows, split over the workers
- `column_tiles`     vectorised across rows, states in registers or, for tall nests, on the stack
- `transpose_tiles`  square tiles, transposed in registers

All use `vector_body` (one vector of one pass), `instructions` (instructions of a nest as vector
code), `reductions` (accumulators) and `elements` (one op, with `complex_numbers` and `integers`) on
the types of `registers`. `softmax_weights` recognises softmax. `scan` and `scatter` are kernels of
their own.
"""
