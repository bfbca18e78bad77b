"""IQ formats: eight or four weights are a codebook entry, times signs and a scale.

Codebooks of the IQ formats: lattice points, stored compressed.

Coordinates take a few levels (three, or eight), and the format lists its points in ascending order
with the first coordinate as the lowest digit. So the set alone defines the list: one bit per
possible point, compressed.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache

import numpy as np

from rlx.ir.quant.blocks import F32, Array, CodeTable, bits_of, decoder, f32, fields, fill, planes

# Dimensions, levels of a coordinate. IQ1_S (and IQ1_M, which shares it) is {-1, 0, 1} times 8.
SHAPES = {
    "IQ2_XXS": (8, (8, 25, 43)),
    "IQ2_XS": (8, (8, 25, 43)),
    "IQ2_S": (8, (8, 25, 43)),
    "IQ3_XXS": (4, (4, 12, 20, 28, 36, 44, 52, 62)),
    "IQ3_S": (4, (1, 3, 5, 7, 9, 11, 13, 15)),
    "IQ1_S": (8, (-8, 0, 8)),
}


@cache
def grid(name: str) -> Array:
    """The points as words of eight (u64) or four (u32) i8 coordinates."""
    dims, levels = SHAPES[name]
    packed = np.frombuffer(zlib.decompress(base64.b85decode(_SETS[name])), np.uint8)
    members = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    digits = members[:, None] // len(levels) ** np.arange(dims) % len(levels)
    points = np.array(levels, np.int8)[digits]
    words: Array = points.view(np.uint64 if dims == 8 else np.uint32)[:, 0]
    return words


_SETS = {
    "IQ2_XXS": (
        "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn"
        "6;is&dxI!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrz"
        "cFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gb"
        "lzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
    ),
    "IQ2_XS": (
        "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&("
        "-c)w(<-fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p="
        "RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+"
        "$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTm"
        "D?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC"
    ),
    "IQ2_S": (
        "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&"
        "YfEj@sgh^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!"
        "2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW"
        "*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m"
        "?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6"
    ),
    "IQ3_XXS": (
        "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHo"
        "X-c)&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS"
        "3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydl"
        "NePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5"
    ),
    "IQ3_S": (
        "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkw"
        "q!%0~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q("
        "AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+"
        "CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X"
        "$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
    ),
    "IQ1_S": (
        "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umM"
        "k2dT8mb2WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;"
        "QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R"
        "@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-WD<$YEG%"
        "#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXv"
        "Hn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#"
        "9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@"
        "uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}"
        "uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEM"
        "lIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1"
    ),
}


CURVE = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)

_CURVE = CodeTable(CURVE)


def _even_signs() -> Array:
    """Seven stored sign bits; the eighth makes the number of minus signs even."""
    low = np.arange(128, dtype=np.uint8)
    odd: Array = bits_of(low).reshape(128, 8).sum(axis=1, dtype=np.uint8) % 2
    return low | odd << 7


_EVEN_SIGNS = _even_signs()
# Per byte of sign bits, eight bytes of 0 or -1.
_SIGN_MASKS = (-bits_of(np.arange(256, dtype=np.uint8)).view(np.int8)).view(np.uint64)
# Eight bytes of -1, eight of 1.
_DOWN, _UP = np.repeat(np.array([-1, 1], np.int8), 8).view(np.uint64)
_SEVENS = np.array([0, 7, 14, 21], np.uint32)
_THREES = np.array([0, 3, 6, 9], np.uint16)


@decoder("IQ2_XXS", ("d", "<f2"), ("qs", [("index", "u1", 4), ("aux", "<u4")], 8))
def iq2_xxs(b: Array, out: F32) -> None:
    aux = b["qs"]["aux"]
    points = grid("IQ2_XXS").take(b["qs"]["index"].reshape(-1, 32))
    _fill_signed(points, _packed_signs(aux), f32(b["d"]) * _quarters(aux >> 28), out)


@decoder("IQ2_XS", ("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8))
def iq2_xs(b: Array, out: F32) -> None:
    points = grid("IQ2_XS").take(b["qs"] & 511)
    scale = f32(b["d"]) * _quarters(fields(b["scales"], 4))
    _fill_signed(points, _EVEN_SIGNS.take(b["qs"] >> 9), scale, out)


@decoder(
    "IQ2_S",
    ("d", "<f2"),
    ("qs", "u1", 32),
    ("signs", "u1", 32),
    ("qh", "u1", 8),
    ("scales", "u1", 8),
)
def iq2_s(b: Array, out: F32) -> None:
    points = grid("IQ2_S").take(b["qs"] | fields(b["qh"], 2).astype(np.uint16) << 8)
    _fill_signed(points, b["signs"], f32(b["d"]) * _quarters(fields(b["scales"], 4)), out)


@decoder("IQ3_XXS", ("d", "<f2"), ("qs", "u1", 64), ("aux", "<u4", 8))
def iq3_xxs(b: Array, out: F32) -> None:
    points = grid("IQ3_XXS").take(b["qs"]).view(np.uint64)
    scale = f32(b["d"]) * (_quarters(b["aux"] >> 28) * np.float32(2))
    _fill_signed(points, _packed_signs(b["aux"]), scale, out)


@decoder(
    "IQ3_S",
    ("d", "<f2"),
    ("qs", "u1", 64),
    ("qh", "u1", 8),
    ("signs", "u1", 32),
    ("scales", "u1", 4),
)
def iq3_s(b: Array, out: F32) -> None:
    points = grid("IQ3_S").take(b["qs"] | bits_of(b["qh"]).astype(np.uint16) << 8)
    scale = f32(b["d"]) * (2 * fields(b["scales"], 4) + 1)
    _fill_signed(points.view(np.uint64), b["signs"], scale, out)


@decoder("IQ1_S", ("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8))
def iq1_s(b: Array, out: F32) -> None:
    high = (b["qh"][..., None] >> _THREES) & 7
    index = b["qs"] | high.reshape(-1, 32) << 8
    shift = np.repeat(np.where(b["qh"] & 0x8000, _DOWN, _UP), 4, axis=1)
    _fill_shifted(index, shift, f32(b["d"]) * (2 * (b["qh"] >> 12 & 7) + 1), out)


@decoder("IQ1_M", ("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4))
def iq1_m(b: Array, out: F32) -> None:
    """The f16 scale is in the top nibbles of the four words of scales, lowest first."""
    words = b["scales"]
    parts = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    d = np.bitwise_or.reduce(parts, axis=1, keepdims=True).view(np.float16)
    scale = 2 * ((words[..., None] >> _THREES) & 7).reshape(-1, 16) + 1
    high = fields(b["qh"], 4)
    shift = np.where(high & 8, _DOWN, _UP)
    index = b["qs"] | (high & 7).astype(np.uint16) << 8
    _fill_shifted(index, shift, d.astype(np.float32) * scale, out)


@decoder("IQ4_NL", ("d", "<f2"), ("qs", "u1", 16))
def iq4_nl(b: Array, out: F32) -> None:
    fill(out, _CURVE.take(planes(b["qs"], 4)), f32(b["d"]))


@decoder("IQ4_XS", ("d", "<f2"), ("high", "<u2"), ("low", "u1", 4), ("qs", "u1", (8, 16)))
def iq4_xs(b: Array, out: F32) -> None:
    high = (b["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    six_bits = fields(b["low"], 4) | high.astype(np.uint8) << 4
    scale = f32(b["d"]) * (six_bits.view(np.int8) - np.int8(32))
    fill(out, _CURVE.take(planes(b["qs"], 4)), scale)


def _quarters(scale: Array) -> Array:
    """(1/2 + s) / 4, the scale of the two-bit types."""
    return (scale.astype(np.float32) + np.float32(0.5)) * np.float32(0.25)


def _packed_signs(aux: Array) -> Array:
    index = (aux[..., None] >> _SEVENS) & 127
    return _EVEN_SIGNS.take(index.reshape(-1, 32))


def _fill_signed(points: Array, signs: Array, scale: Array, out: F32) -> None:
    """out = scale * ±point; points are words of eight i8, signs bytes of eight bits."""
    masks = _SIGN_MASKS.take(signs)
    points ^= masks
    values = points.view(np.int8)
    values -= masks.view(np.int8)  # two's complement: -x is ~x + 1
    fill(out, values, scale)


def _fill_shifted(index: Array, shift: Array, scale: Array, out: F32) -> None:
    """out = scale * (point ± 1/8). The grid is stored times 8, so the sum is an integer."""
    values = grid("IQ1_S").take(index).view(np.int8)
    values += shift.view(np.int8)
    fill(out, values, scale * np.float32(0.125))
