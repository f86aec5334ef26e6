"""Scaled dot-product attention.

Legend: b batch-like dims, h key/value heads, g query heads per key/value head, l query positions, s key positions, e, v widths of
keys and values. Query head ``i`` uses key/value head ``i // g`` (``torch.repeat_interleave`` order), so its dim is ``(h g)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.rules.arguments import Arguments, lead, text
from planner.rules.base import Call, Rule, Strategy, rule
from planner.sharding import S

SCHEMA = "query key value attn_mask dropout_p is_causal"


@dataclass(frozen=True)
class Heads:
    """The dims before (position, width) of query, key, value and output; ``sizes`` of the factors of a joined head dim ``(h g)``."""

    query: list[str]
    key: list[str]
    value: list[str]
    out: list[str]
    sizes: dict[str, int]

    @property
    def grouped(self) -> bool:
        return bool(self.sizes)


def _heads(args: Arguments, out: tuple[int, ...], gqa: bool) -> Heads:
    query, key, value = (args.shape(name)[:-2] for name in ("query", "key", "value"))
    names = lead("b", len(out) - 2)
    sizes: dict[str, int] = {}
    if names:
        names[-1] = "h"
    q, k, v = (_leading(shape, out[:-2], names) for shape in (query, key, value))
    if gqa and query[-1] != key[-1]:
        sizes = {"h": key[-1], "g": query[-1] // key[-1]}
        q[-1] = names[-1] = "(h g)"
        k[-1] = v[-1] = "h"
    return Heads(q, k, v, names, sizes)


def _leading(shape: tuple[int, ...], out: tuple[int, ...], names: list[str]) -> list[str]:
    skip = len(out) - len(shape)
    return [name if size == whole else "1" for size, name, whole in zip(shape, names[skip:], out[skip:])]


@rule("aten.scaled_dot_product_attention.default")
def attention(call: Call) -> Rule:
    """``scaled_dot_product_attention(query [*, L, E], key [*, S, E], value [*, S, V], attn_mask, dropout_p, is_causal, enable_gqa)``."""
    args = Arguments(call, SCHEMA)
    heads = _heads(args, call.out, bool(call.arg(8, "enable_gqa", False)))
    return _rule(call, args, heads, outputs=text(heads.out, "l", "v"))


@rule("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention_for_cpu(call: Call) -> Rule:
    """The CPU kernel on its own: (output, logsumexp [b, h, l])."""
    args = Arguments(call, "query key value dropout_p is_causal attn_mask")
    heads = _heads(args, call.out, False)
    return _rule(call, args, heads, outputs=f"{text(heads.out, 'l', 'v')}, {text(heads.out, 'l')}", positions=(3, 4))


def _rule(call: Call, args: Arguments, heads: Heads, outputs: str, positions: tuple[int, int] = (4, 5)) -> Rule:
    query, key, value = args.shape("query"), args.shape("key"), args.shape("value")
    length, keys, width, out_width = query[-2], key[-2], query[-1], value[-1]
    dropout = float(call.arg(positions[0], "dropout_p", 0.0))
    causal = bool(call.arg(positions[1], "is_causal", False))
    plain = len(call.node.outputs) == 1 and not dropout
    extra: list[Strategy] = []
    if causal and plain:
        extra.append(_split_queries(args, call))
    if heads.grouped and plain:
        extra.append(_split_grouped_heads(args, call))
    sizes = dict(heads.sizes)
    if any(strategy.factor == "q" for strategy in extra):
        sizes["q"] = query[-3]
    # two products, 2 FLOPs per multiply-add; a causal mask leaves about half of the positions
    per_row = 2.0 * (width + out_width) / (width * out_width) / sizes.get("q", 1)
    return args.rule(
        {
            "query": text(heads.query, "l", "e"),
            "key": text(heads.key, "s", "e"),
            "value": text(heads.value, "s", "v"),
            "attn_mask": _mask(args, call.out, heads, length, keys),
        },
        outputs,
        whole=["s", "e", "v", "l"] if causal else ["s", "e", "v"],
        saves=("query", "key", "value", "attn_mask", "out0"),
        sizes=sizes,
        kind="attention",
        flops_per_point=per_row * (_causal_share(length, keys) if causal else 1.0),
        extra_saved_bytes_per_point=4.0 / out_width,
        extra=tuple(extra),
        exclusive=(frozenset("hgq"),) if "q" in sizes else (),
        random=dropout > 0,
    )


def _causal_share(length: int, keys: int) -> float:
    """Share of the (query, key) pairs that a causal mask leaves: query i sees keys 0..i."""
    seen = sum(min(i + 1, keys) for i in range(length)) if length <= 4096 else length * min(length, keys) / 2
    return seen / (length * keys)


def _mask(args: Arguments, out: tuple[int, ...], heads: Heads, length: int, keys: int) -> str:
    if not args.has("attn_mask"):
        return ""
    shape = args.shape("attn_mask")
    leading = _leading(shape[:-2], out[:-2], heads.out)
    tail = ["l" if shape[-2] == length else "1"] if len(shape) > 1 else []
    return text(leading, tail, "s" if shape[-1] == keys else "1")


def _split_queries(args: Arguments, call: Call) -> Strategy:
    """Causal attention of a part of the queries to all keys before them: the kernel knows where its part begins."""
    dim = len(call.out) - 2
    return args.extra({"query": S(len(args.shape("query")) - 2)}, (S(dim),), "l", "causal_attention")


def _split_grouped_heads(args: Arguments, call: Call) -> Strategy:
    """Any split of the query heads, with keys and values whole: the kernel picks the key/value heads that its query heads use."""
    dim = len(call.out) - 3
    types = {"query": S(len(args.shape("query")) - 3)}
    if args.has("attn_mask"):
        mask = args.shape("attn_mask")
        if len(mask) > 2 and mask[-3] == call.out[-3]:
            types["attn_mask"] = S(len(mask) - 3)
    return args.extra(types, (S(dim),), "q", "grouped_heads")
