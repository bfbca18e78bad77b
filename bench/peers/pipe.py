"""The peers of these benches, each a script of this folder in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlx.cli import peers

HERE = Path(__file__).resolve().parent
PeerMissing = peers.PeerMissing


class Peer(peers.Peer):
    def __init__(
        self,
        python: str,
        server: str,
        *args: object,
        requirements: str,
        option: str = "--peer-python",
        env: Mapping[str, str] | None = None,
    ) -> None:
        install = f"-m pip install -r bench/{requirements}"
        super().__init__(python, HERE / server, *args, install=install, option=option, env=env)
