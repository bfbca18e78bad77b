"""The interface of Anthropic."""
