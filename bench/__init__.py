"""What the bars ask, each measured against a peer in the same run: `python -m bench NAME`."""
