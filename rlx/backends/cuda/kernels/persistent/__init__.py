"""Decode of dense models as one kernel whose blocks stay, and hand values over to each other."""
