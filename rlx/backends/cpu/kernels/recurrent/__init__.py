"""Recurrent layers: `selective_scan` (Mamba), `delta_net` (gated delta rule, one token) and
`delta_chunks` (the same over many tokens), `lower_recurrent`."""
