"""Token sampling and top-k: `sample` (temperature, top_k, top_p, min_p), `top_k` (sort keys, heaps,
the top-k kernel, the top_p filter), `lower_sampling`."""
