"""Recurrent layers: `cells` (LSTM, GRU), `selective_scan` (Mamba), `delta_net` (gated delta)."""
