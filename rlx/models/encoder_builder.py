"""The builder of encoders: the blocks that their pages are made of; bidirectional attention.

Texts of a batch are padded to one length. Padding has no effect: keys past a text's end are masked,
and pooling reads real tokens only, so a padded text gives the vector it gives alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import FormatError
from rlx.ir.attrs import MaskKind
from rlx.ir.module import GraphModule
from rlx.models import pooling
from rlx.models.builder import EntryPoint, ModelBuilder, Tensor, activate
from rlx.models.config import EncoderConfig
from rlx.models.rope_tables import RopeConfig, rope_tables
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.models.model_file import ModelFile
    from rlx.models.weights import Weights

_DROPPED = float("-inf")


@dataclass
class EncoderBuilder(ModelBuilder):
    """Builds an encoder. `lengths` [batch] is how many tokens of each text are real; None where no
    text is padded."""

    lengths: Tensor | None
    _masks: dict[str, Tensor] | None = None

    @property
    def encoder(self) -> EncoderConfig:
        """The encoder's part of the configuration."""
        if self.config.encoder is None:
            raise FormatError("not an encoder", where=self.config.arch)
        return self.config.encoder

    # -- the parts of a layer -----------------------------------------------------------------

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Layer norm; with a bias where the file has one."""
        bias = self.param(f"{name}.bias") if f"{name}.bias" in self.weights else None
        return self.g.layer_norm(x, self.param(f"{name}.weight"), bias, eps=self.config.eps)

    def qkv(self, x: Tensor, layer: int) -> list[Tensor]:
        """q, k and v, from one joined weight or from three."""
        name, c = f"blk.{layer}.attn_", self.config
        if f"{name}qkv.weight" in self.weights:
            return self.split(self.linear(x, f"{name}qkv"), [c.hidden] * 3)
        return [self.linear(x, f"{name}{part}") for part in "qkv"]

    def attend(self, qkv: list[Tensor], layer: int) -> Tensor:
        """Attention to all real tokens, or to those in the window of a local layer."""
        c, e = self.config, self.encoder
        local = layer in e.local_layers
        q, k, v = qkv
        if e.rotary:
            rope = c.local_rope if local and c.local_rope is not None else c.rope
            q, k = (self._rotate(t, rope) for t in (q, k))
        mask = self._bias() if e.distance_buckets else self.key_mask()
        kind = MaskKind.NONE if mask is None else MaskKind.CUSTOM
        kind = MaskKind.LOCAL(e.window) if local else kind
        kind = MaskKind.BIAS if e.distance_buckets else kind
        return self.g.attention(
            q, k, v, mask, num_heads=c.heads, head_dim=c.head_dim, mask_kind=kind
        )

    def post_norm_layer(
        self,
        x: Tensor,
        layer: int,
        network: Callable[[Tensor, int], Tensor] | None = None,
        attend: Callable[[list[Tensor], int], Tensor] | None = None,
    ) -> Tensor:
        """The post-norm layer of BERT: norms after the residual sums."""
        name = f"blk.{layer}."
        seen = (attend or self.attend)(self.qkv(x, layer), layer)
        seen = self.linear(seen, f"{name}attn_output")
        x = self.norm(x + seen, f"{name}attn_output_norm")
        y = (network or self.ffn)(x, layer)
        return self.norm(x + y, f"{name}layer_output_norm")

    def ffn(self, x: Tensor, layer: int) -> Tensor:
        """down(act(up(x)))"""
        hidden = self.linear(x, f"blk.{layer}.ffn_up", self.config.activation)
        return self.linear(hidden, f"blk.{layer}.ffn_down")

    def gated_ffn(self, x: Tensor, layer: int) -> Tensor:
        """down(act(gate(x)) · up(x))"""
        gate, up = (self.linear(x, f"blk.{layer}.ffn_{part}") for part in ("gate", "up"))
        return self._gated(gate, up, layer)

    def joined_ffn(self, x: Tensor, layer: int, gate_first: bool = True) -> Tensor:
        """Gated FFN with gate and up, or up and gate, in one weight."""
        both = self.linear(x, f"blk.{layer}.ffn_up")
        first, second = self.split(both, [self.config.ffn] * 2)
        return self._gated(*((first, second) if gate_first else (second, first)), layer)

    def _gated(self, gate: Tensor, up: Tensor, layer: int) -> Tensor:
        hidden = activate(self.g, self.config.activation, gate) * up
        return self.linear(hidden, f"blk.{layer}.ffn_down")

    def _rotate(self, x: Tensor, rope: RopeConfig) -> Tensor:
        c = self.config
        kind = "local" if rope is c.local_rope else "rope"
        if f"{kind}.cos" not in self._values:
            cos, sin = rope_tables(rope, c.head_dim, c.context)
            self.array_param(f"{kind}.cos", cos)
            self.array_param(f"{kind}.sin", sin)
        tables = self._values[f"{kind}.cos"], self._values[f"{kind}.sin"]
        return self.g.rope(x, *tables, head_dim=c.head_dim)

    # -- embeddings ---------------------------------------------------------------------------

    def position_embeddings(self, ids: Tensor, types: Tensor | None) -> Tensor:
        """Learned position embeddings plus token type embeddings, where there are any."""
        first, length = self.encoder.first_position, ids.shape.dims[1]
        table = self.as_f32(self.param("position_embd.weight"))
        has_types = "token_types.weight" in self.weights
        if has_types and types is None:
            # a sum of parameters, computed once
            table = table + self._type_row()
        rows = table.narrow(axis=0, start=first, length=length)
        return rows + self.type_embeddings(types) if has_types and types is not None else rows

    def type_embeddings(self, types: Tensor | None) -> Tensor:
        """Token type embeddings; of type 0 where none are given."""
        return self._type_row() if types is None else self.embed(types, table="token_types.weight")

    def embed_without_positions(self, ids: Tensor, types: Tensor | None) -> Tensor:
        """Embeddings for layers with rotary positions."""
        x = self.embed(ids)
        if "token_types.weight" in self.weights:
            x = x + self.type_embeddings(types)
        return self.norm(x, "token_embd_norm")

    def _type_row(self) -> Tensor:
        table = self.as_f32(self.param("token_types.weight"))
        return table.narrow(axis=0, start=0, length=1)

    # -- masks --------------------------------------------------------------------------------

    def begin(self, ids: Tensor) -> None:
        """Called once, with the ids of the batch: masks depend on their shape."""
        self._masks = {}
        self._length = ids.shape.dims[1]

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A value that all layers share."""
        assert self._masks is not None
        if name not in self._masks:
            self._masks[name] = make()
        return self._masks[name]

    def _positions(self) -> Tensor:
        return self.once("at", lambda: self.g.iota((self._length,)))

    def is_real(self) -> Tensor:
        """Flags [batch, seq] of the real tokens."""
        lengths = self.lengths
        assert lengths is not None

        def make() -> Tensor:
            ends = lengths.reshape(-1, 1)
            return self._positions() < ends

        return self.once("is_real", make)

    def key_mask(self) -> Tensor | None:
        """Flags that broadcast to [batch, heads, queries, keys]; None where all are real."""
        if self.lengths is None:
            return None
        batch, length = self.is_real().shape.dims
        shape = (batch, 1, 1, length)
        return self.once("keys", lambda: self.is_real().reshape(shape))

    def distance(self) -> Tensor:
        """Key position minus query position, [queries, keys]."""
        at = self._positions()
        rows = at.reshape(self._length, 1)
        return at - rows

    def _bias(self) -> Tensor:
        """Bias of the scores by relative position; the same in every layer."""
        return self.once("bias", self._make_bias)

    def _make_bias(self) -> Tensor:
        g, c = self.g, self.config
        table = self.param("bias_by_distance", self._bias_by_distance)
        # one row of the table for every distance: -(context - 1) … context - 1
        at = self.distance() + (c.context - 1)
        values = table.gather(at, axis=1)  # [heads, queries, keys]
        values = values.reshape(1, *values.shape.dims)
        keep = self.key_mask()
        return values if keep is None else g.where(keep, values, _DROPPED)

    def _bias_by_distance(self) -> Any:
        c, e = self.config, self.encoder
        weights = np.asarray(self.weights.get("relative_bias.weight").array, np.float32)
        distance = np.arange(-(c.context - 1), c.context)
        return np.ascontiguousarray(weights[buckets(distance, e.distance_buckets, e.farthest)].T)


def buckets(distance: Any, count: int, farthest: int) -> Any:
    """The bucket of a relative position, as in T5: half of them for keys after the query; in each
    half one per near distance, then logarithmically wider ones."""
    half = count // 2
    size = np.abs(distance)
    exact = half // 2
    # in f32, as the models were trained: a border may fall to either side
    far = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact))
    steps = far / np.float32(np.log(farthest / exact)) * np.float32(half - exact)
    wide = np.minimum(exact + steps.astype(np.int64), half - 1)
    return np.where(size < exact, size, wide) + np.where(distance > 0, half, 0)


def build_encoder(
    g: GraphModule,
    model: ModelFile,
    weights: Weights,
    entry_point: EntryPoint,
    strassen: bool = False,
) -> tuple[EncoderBuilder, dict[str, Tensor]]:
    """An encoder with the output of an entry point. Norms keep its rows alike in scale, which
    `strassen` needs."""
    ids = g.input("ids", ["batch", "seq"], "i32")
    lengths = g.input("lengths", ["batch"], "i32") if entry_point.padded else None
    types = g.input("types", ["batch", "seq"], "i32") if entry_point.typed else None
    net = EncoderBuilder(g, model.config, weights, lengths, strassen=strassen)
    output = entry_point.output
    net.begin(ids)
    x = net.layers(model.arch, model.arch.embed(net, ids, types))
    if output == "scores":
        x = pooling.classify(net, x)
    elif output == "embedding":
        x = pooling.embedding(net, x, model.sentence, model.module_weights())
    return net, {output: x}


__all__ = ["EncoderBuilder", "Tensor", "buckets", "build_encoder"]
