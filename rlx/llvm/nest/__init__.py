"""LLVM code for the bodies of loop nests, whatever the target.

registers      element types in registers, loads and stores of elements
arithmetic     integer and complex arithmetic on elements
elements       one table of vector code for elementwise ops
reductions     accumulators: identity, update, combination, result
instructions   the instructions of a nest at one point of its iteration space

A vector of one lane is a scalar, so that a GPU thread runs the same code as a CPU lane.
"""
