"""Language models: a page per architecture on shared blocks, and what runs them."""
