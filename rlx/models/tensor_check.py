"""Holds the tensors of a file against the configuration, before anything is built.

Every tensor is a weight of the architecture, of the size that the configuration says, or known to
be harmless. Any other is refused: what it does would be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from rlx.errors import FormatError, UnsupportedError, close_names
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.formats.tensor_file import TensorInfo
from rlx.models.config import ModelConfig
from rlx.models.config_fields import HARMLESS_TENSORS, is_listed
from rlx.models.weights import Derived, Names, Source, of_layer

# dims of weights by fields of the configuration; a bias has the first dim of its weight
_SHAPES = {
    "token_embd": "vocab, hidden",
    "output": "vocab, hidden",
    "position_embd": "context+encoder.first_position, hidden",
    "output_norm": "hidden",
    "attn_norm": "hidden",
    "ffn_norm": "hidden",
    "post_attention_norm": "hidden",
    "post_ffw_norm": "hidden",
    "attn_q": "heads*head_dim, hidden",
    "attn_k": "kv_heads*head_dim, hidden",
    "attn_v": "kv_heads*head_dim, hidden",
    "attn_qkv": "heads*head_dim+2*kv_heads*head_dim, hidden",
    "attn_output": "hidden, heads*head_dim",
    "attn_sinks": "heads",
    "ffn_gate": "ffn, hidden",
    "ffn_up": "ffn, hidden",
    "ffn_down": "hidden, ffn",
    "ffn_gate_inp": "experts.count, hidden",
    "ffn_gate_exps": "experts.count, experts.width, hidden",
    "ffn_up_exps": "experts.count, experts.width, hidden",
    "ffn_down_exps": "experts.count, hidden, experts.width",
    "ffn_gate_shexp": "experts.shared_width, hidden",
    "ffn_up_shexp": "experts.shared_width, hidden",
    "ffn_down_shexp": "hidden, experts.shared_width",
    "ssm_dt": "recurrent.heads",
    "ssm_d": "recurrent.heads",
    "attn_output_norm": "hidden",
    "layer_output_norm": "hidden",
}
# our sizes → the fields of config.json that give them
_FIELDS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "context": "max_position_embeddings",
    "encoder.embedding": "embedding_size",
    "encoder.types": "type_vocab_size",
    "encoder.labels": "number of labels",
    "experts.count": "number of experts",
    "experts.width": "moe_intermediate_size",
    "experts.shared_width": "shared expert size",
    "latent.rank": "kv_lora_rank",
    "latent.query_rank": "q_lora_rank",
    "latent.nope_dim": "qk_nope_head_dim",
    "latent.rope_dim": "qk_rope_head_dim",
    "latent.value": "v_head_dim",
}
# of GGUF files: frequencies of the rotary embedding, and layers that only draft tokens
_GGUF_HARMLESS = ("*.nextn.*", "*.rope_freqs.weight")
_GGUF_NAMES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_GGUF_SHAPES = {"position_embd": "any, hidden"}  # a file may state a shorter context
_FEW = 8  # names in a message


def check_folder(folder: HfFolder, page: ModuleType, names: Names, config: ModelConfig) -> None:
    """Raise for tensors of a Hugging Face folder that are not read, missing, or of another size."""
    transposed = getattr(page, "HF_TRANSPOSED", ())
    shapes = {**_SHAPES, **getattr(page, "SHAPES", {})}
    optional = getattr(page, "OPTIONAL", ())
    used: set[str] = set()
    for pattern, sources in names.items():
        several = sources if isinstance(sources, tuple) else (sources,)
        for name, i in _layers(pattern, config, page):
            if name in config.without or pattern in config.without:
                continue
            choices = [of_layer(s, i) for s in several]
            source = next((s for s in choices if _stored(folder, s)), None)
            if source is None:
                if not _may_lack(pattern, config, optional):
                    raise _missing(folder.name, folder.tensors, choices[0], page, pattern)
                continue
            used.update(_tensors(folder, source))
            reverse = pattern.endswith(transposed) if transposed else False
            _check_shape(folder, source, pattern, shapes, config, reverse)
    _check_layers(folder, names, config)
    harmless = (*HARMLESS_TENSORS, *getattr(page, "HARMLESS_TENSORS", ()))
    _refuse_unread(folder, set(folder.tensors) - used, harmless, page)


def check_gguf(file: GgufFile, page: ModuleType, config: ModelConfig) -> None:
    """Raise for tensors of a GGUF file that are not read, or of another size."""
    patterns = {*getattr(page, "GGUF_ONLY", ()), *getattr(page, "FIRST_BODY", ())}
    patterns |= {*page.HF_NAMES} if config.encoder is None else {*page.BODY, *page.HEAD}
    shapes = {**_SHAPES, **getattr(page, "SHAPES", {}), **_GGUF_SHAPES}
    shapes |= getattr(page, "GGUF_SHAPES", {})
    unread = set()
    for name, info in file.tensors.items():
        pattern, layer = _pattern(name)
        if layer >= config.layers:
            if file.metadata.get(f"{file.metadata['general.architecture']}.nextn_predict_layers"):
                continue
            unread.add(name)
        elif pattern in patterns:
            wanted = _dims(pattern, shapes, config)
            if wanted is not None and not _fits(info.shape, wanted[0]):
                raise _wrong_shape(file.name, name, info.shape, *wanted)
        elif name not in _GGUF_NAMES:
            unread.add(name)
    _refuse_unread(file, unread, _GGUF_HARMLESS, page)
    if config.encoder is not None and config.encoder.labels and "cls.weight" not in file.tensors:
        raise _missing(file.name, file.tensors, "cls.weight", page, "cls.weight")


def _may_lack(pattern: str, config: ModelConfig, optional: Iterable[str]) -> bool:
    """Whether a folder may be without a weight: a tied head, or what is before a classifier."""
    if pattern.startswith("cls."):
        return config.encoder is not None and not config.encoder.labels
    return (config.tied and pattern == "output.weight") or pattern in optional


def _check_layers(folder: HfFolder, names: Names, config: ModelConfig) -> None:
    for pattern, sources in names.items():
        if "{i}" in pattern and not (config.encoder is not None and config.encoder.groups):
            for source in sources if isinstance(sources, tuple) else (sources,):
                if _stored(folder, of_layer(source, str(config.layers))):
                    raise FormatError(
                        "the weights have more layers than num_hidden_layers says",
                        where=folder.name, got=f"{config.layers + 1} or more",
                        expected=config.layers,
                    )  # fmt: skip


def _layers(pattern: str, config: ModelConfig, page: ModuleType) -> Iterator[tuple[str, str]]:
    if "{i}" not in pattern:
        yield pattern, ""
        return
    groups = config.encoder.groups if config.encoder is not None else 0
    for i in map(str, range(groups or config.layers)):
        yield pattern.replace("{i}", i), i


def _pattern(name: str) -> tuple[str, int]:
    head, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if head != "blk" or not layer.isdecimal():
        return name, -1
    return f"blk.{{i}}.{part}", int(layer)


def _stored(folder: HfFolder, source: Source) -> bool:
    names = source.names if isinstance(source, Derived) else (source.replace("{e}", "0"),)
    return all(n in folder.tensors for n in names)


def _tensors(folder: HfFolder, source: Source) -> Iterable[str]:
    if isinstance(source, Derived):
        return source.names
    if "{e}" not in source:
        return (source,)
    found, count = [], 0
    while (name := source.replace("{e}", str(count))) in folder.tensors:
        found.append(name)
        count += 1
    return found


def _check_shape(
    folder: HfFolder, source: Source, pattern: str, shapes: Mapping[str, str],
    config: ModelConfig, reverse: bool,
) -> None:  # fmt: skip
    if isinstance(source, Derived):
        for name, stated in zip(source.names, source.dims, strict=False):
            wanted = _evaluated(stated, config)
            if not _fits(folder.tensors[name].shape, wanted[0]):
                raise _wrong_shape(folder.name, name, folder.tensors[name].shape, *wanted)
        return
    found = _dims(pattern, shapes, config)
    if found is None:
        return
    dims, said = found
    names = list(_tensors(folder, source))
    if "{e}" in source:
        if dims[0] and len(names) != dims[0]:
            raise _wrong_shape(folder.name, source, (len(names), *dims[1:]), dims, said)
        dims, said = dims[1:], said[1:]
    if reverse:
        dims, said = dims[::-1], said[::-1]
    for name in names:
        info: TensorInfo = folder.tensors[name]
        if not _fits(info.shape, dims):
            raise _wrong_shape(folder.name, name, info.shape, dims, said)


def _dims(
    pattern: str, shapes: Mapping[str, str], config: ModelConfig
) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
    """The dims of a weight, and how they are said; 0: any. None where they are not known."""
    base, _, end = pattern.removeprefix("blk.{i}.").rpartition(".")
    dims = shapes.get(base)
    if dims is None:
        return None
    numbers, said = _evaluated(dims, config)
    if end != "bias":
        return numbers, said
    experts = base.endswith("_exps")  # a bias for each expert
    return numbers[: 1 + experts], said[: 1 + experts]


def _evaluated(dims: str, config: ModelConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sums of products of fields, as numbers and with the names of config.json."""
    numbers, said = [], []
    for dim in filter(None, (d.strip() for d in dims.split(","))):
        total, known = 0, True
        for term in dim.split("+"):
            product = 1
            for factor in term.split("*"):
                product *= int(factor) if factor.isdecimal() else _field(config, factor)
            total += product
            known = known and (product > 0 or term == "encoder.first_position")
        numbers.append(total if known else 0)
        words = (_FIELDS.get(f, f.rpartition(".")[2]) for f in dim.replace("+", "*+*").split("*"))
        said.append(" ".join(words))
    return tuple(numbers), tuple(said)


def _field(config: ModelConfig, name: str) -> int:
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part, 0)
    return int(found or 0)


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        n in (0, s) for s, n in zip(shape, wanted, strict=True)
    )


def _wrong_shape(
    where: str, tensor: str, shape: tuple[int, ...], wanted: tuple[int, ...], said: tuple[str, ...]
) -> FormatError:
    numbers = ", ".join(str(n) if n else "any" for n in wanted)
    return FormatError(
        f"{tensor} does not have the size that the configuration says", where=where, got=shape,
        expected=f"({numbers}): {', '.join(said)}",
    )  # fmt: skip


def _missing(
    where: str, tensors: Mapping[str, Any], source: Source, page: ModuleType, pattern: str
) -> FormatError:
    wanted = source if isinstance(source, str) else ", ".join(source.names)
    hint = _switch(page, [pattern]) or close_names(wanted, tensors)
    return FormatError("a weight is missing", where=where, expected=wanted, hint=hint)


def _refuse_unread(
    file: HfFolder | GgufFile, unread: set[str], harmless: Iterable[str], page: ModuleType
) -> None:
    left = sorted(n for n in unread if not is_listed(n, harmless))
    if not left:
        return
    more = f" and {len(left) - _FEW} more" if len(left) > _FEW else ""
    raise UnsupportedError(
        "tensors that this architecture does not read", where=file.name,
        got=", ".join(left[:_FEW]) + more, hint=_switch(page, left),
    )  # fmt: skip


def _switch(page: ModuleType, names: list[str]) -> str:
    """The fields that say whether weights of these names are there."""
    if any(n.endswith(("lm_head.weight", "output.weight", "embed_out.weight")) for n in names):
        return "tie_word_embeddings says whether the model has a head of its own"
    fields = [f for f, parts in getattr(page, "SWITCHES", {}).items() if _ends(parts, names)]
    return f"{' and '.join(fields)} of config.json says whether they are there" if fields else ""


def _ends(parts: tuple[str, ...], names: list[str]) -> bool:
    ends = {part.rpartition(".")[2] for part in parts}
    return any(n.endswith(tuple(ends)) for n in names)
