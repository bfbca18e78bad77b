"""Convolution, pooling and resize.

`lower_conv` chooses between `direct` (a GEMM over packed panels and filters) and
`depthwise`; `lower_pooling` emits `pooling` and `resize`. `windows` has the loops over sliding
windows, `row_loads` the strided and masked loads at image borders.
"""
