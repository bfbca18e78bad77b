"""Token sampling and top-k: `sample` (temperature, top_k, top_p, min_p), `nucleus` (the top_p
filter), `top_k` (sort keys, heaps, the top-k kernel), `lower_sampling`."""
