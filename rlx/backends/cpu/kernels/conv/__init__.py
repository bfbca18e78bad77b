"""Convolution, pooling and resize.

`lower_conv` chooses between `direct` (a GEMM over packed panels and filters) and `depthwise`;
`pooling` has pooling and resize with their lowering. `windows` has the loops over sliding windows
and the strided and masked loads at image borders.
"""
