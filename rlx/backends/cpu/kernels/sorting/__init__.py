"""Sorting along an axis, and searching in sorted tables."""
