"""Products with packed weights, which stay packed.

block, legacy, kquants, codebooks, decode   every scheme as f32 numbers, to the bit
gather                                      rows of tables and weights of experts, decoded
decoded                                     products that decode on the way: any scheme
rows, row_tiles, repack                     operands of integer products, laid out
dot, tile, formats, supers                  integer dot products: targets, and blocks of schemes
unpacked, many                              the same of many rows, weights unpacked once for all
product, grouped                            integer products, and those of routed rows
"""
