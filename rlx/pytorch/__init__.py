"""PyTorch's modules on RLX: `torch.compile(model, backend="rlx")` and `rlx.from_torch`.

Nothing here is imported unless one of the two is used; `torch` is an extra.
"""
