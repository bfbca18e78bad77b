"""Many requests at once on one model: pages of cache, one run for all of their tokens."""
