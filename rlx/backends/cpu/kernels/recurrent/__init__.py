"""Recurrent layers: `selective_scan` (Mamba), `delta_net` (gated delta rule), `lower_recurrent`."""
