"""Whether an encoder's weights are those that its settings speak of: said when it is loaded, not
when a text of some length comes."""

from __future__ import annotations

from rlx.errors import FormatError
from rlx.models.encoder_graph import EncoderFile
from rlx.models.sentence_config import Step
from rlx.models.weights import Weights


def check_weights(model: EncoderFile, weights: Weights) -> None:
    """Raise unless tables and layers have the sizes that the settings say."""
    c = model.config
    positions, table = c.first_position + c.context, c.embedding or c.hidden
    tables: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (c.vocab, table),
        "position_embd.weight": (positions, table),
        "relative_bias.weight": (c.distance_buckets, c.heads),
        "relative_embd.weight": (c.distance_buckets, c.hidden),
    }
    if c.labels:
        weights.get("cls.weight")  # all of them have a layer before the last
        tables["cls.output.weight"] = (c.labels, c.hidden)
    for name, expected in tables.items():
        found = weights.find(name)
        # some have more positions than they say they use
        extra = name.startswith("position") and found is not None and found.shape[0] > positions
        if found is not None and found.shape != expected and not extra:
            raise FormatError(
                f"{name} does not fit the settings", where=model.file.name,
                got=list(found.shape), expected=list(expected),
                hint="is config.json that of another model?",
            )  # fmt: skip
    beyond = f"blk.{c.layers}."
    if any(f"{beyond}{part}.weight" in weights for part in ("attn_output", "ffn_up", "ffn_down")):
        raise FormatError(
            "the weights have more layers than the settings say", where=model.file.name,
            got=f"{c.layers + 1} or more", expected=c.layers,
        )  # fmt: skip


def width(model: EncoderFile) -> int:
    """Numbers of a vector, after all that follows pooling."""
    found = len(model.sentence.pooling) * model.config.hidden
    for step, weights in zip(model.sentence.steps, model.steps(), strict=True):
        if weights is not None:
            found = _through(step, weights, found)
    return found


def _through(step: Step, weights: Weights, given: int) -> int:
    name = "norm.weight" if step.kind == "LayerNorm" else "linear.weight"
    shape = weights.get(name).shape
    fits = shape == (given,) if step.kind == "LayerNorm" else len(shape) == 2 and shape[1] == given
    bias = weights.find(name.replace("weight", "bias"))
    other = weights.find("residual.weight") if step.residual else None
    if (
        not fits
        or (bias is not None and bias.shape != shape[:1])
        or (other is not None and other.shape != shape)
        or (step.residual and other is None and shape[0] != given)
    ):
        raise FormatError(
            f"a {step.kind} module does not fit what comes before it", where=str(step.weights),
            got=f"{name} {list(shape)}", expected=f"{given} numbers in",
        )  # fmt: skip
    return shape[0]
