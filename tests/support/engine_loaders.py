"""Small models whose weight loaders take stored tensors apart as those of inference engines do:
parameters carry a `weight_loader`, fused parameters a table of the names that they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

Spec = tuple[tuple[int, ...], torch.dtype]
Loader = Callable[..., None]

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, EXPERTS = 16, 4, 2, 4, 24, 10, 4


class Single(nn.Module):
    """A model of one parameter, whose loader is a function."""

    def __init__(self, load: Loader, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load(self, name, tensor)


def parameter(*shape: int, loader: Loader | None = None, dtype: torch.dtype = BF16) -> nn.Parameter:
    """Make a parameter of an engine: it has a loader of its own."""
    made = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    made.weight_loader = loader or whole  # type: ignore[attr-defined]
    return made


def whole(param: torch.Tensor, loaded: torch.Tensor) -> None:
    assert param.shape == loaded.shape, (param.shape, loaded.shape)
    param.data.copy_(loaded)


class EngineModel(nn.Module):
    """A model with a loader that follows tables of names.

    `specs` are the stored tensors, `fused` says which parameter takes a stored one and as what.
    """

    fused: tuple[tuple[str, str, Any], ...] = ()
    specs: dict[str, Spec]

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.rank, self.size, self.specs = rank, size, {}

    def add(self, name: str, param: nn.Parameter) -> None:
        self.register_parameter(name.replace(".", "|"), param)

    def stored(self, name: str, *shape: int, dtype: torch.dtype = BF16) -> None:
        self.specs[name] = (shape, dtype)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params = {name.replace("|", "."): param for name, param in self.named_parameters()}
        loaded: set[str] = set()
        for name, weight in weights:
            if "rotary_emb.inv_freq" in name:
                continue
            for part, fused, place in self.fused:
                if part in name:
                    name = name.replace(part, fused)
                    params[name].weight_loader(params[name], weight, place)
                    break
            else:
                params[name].weight_loader(params[name], weight)
            loaded.add(name)
        return loaded

    def rows(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        """Take this rank's rows."""
        size = param.shape[0]
        param.data.copy_(loaded.narrow(0, self.rank * size, size))

    def columns(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        """Take this rank's columns."""
        param.data.copy_(loaded.chunk(self.size, dim=1)[self.rank])

    def vocabulary(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        """Take this rank's rows of a table that is padded with zeros."""
        size = param.shape[0]
        mine = loaded[self.rank * size : (self.rank + 1) * size]
        param[: mine.shape[0]].data.copy_(mine)
        param[mine.shape[0] :].data.fill_(0)

    def merged(self, param: torch.Tensor, loaded: torch.Tensor, part: int) -> None:
        """Put this rank's rows into one of two halves."""
        half = param.data.narrow(0, part * (param.shape[0] // 2), param.shape[0] // 2)
        half.copy_(loaded.narrow(0, self.rank * half.shape[0], half.shape[0]))

    def heads_of(self, param: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
        """Put this rank's heads behind those of the others; heads of keys may be copies."""
        heads, kv_heads = HEADS // self.size, max(1, KV_HEADS // self.size)
        unit = param.shape[0] // (heads + 2 * kv_heads)
        first, num = {"q": (0, heads), "k": (heads, kv_heads), "v": (heads + kv_heads, kv_heads)}[
            part
        ]
        rank = self.rank if part == "q" else self.rank * KV_HEADS // self.size // kv_heads
        target = param.data.narrow(0, first * unit, num * unit)
        source = loaded.narrow(0, rank * num * unit, num * unit)
        assert target.shape == source.shape
        target.copy_(source)


class Llama(EngineModel):
    """Fused qkv and gate_up, a padded vocabulary, a table that is not loaded."""

    fused = (
        (".q_proj", ".qkv_proj", "q"),
        (".k_proj", ".qkv_proj", "k"),
        (".v_proj", ".qkv_proj", "v"),
        (".gate_proj", ".gate_up_proj", 0),
        (".up_proj", ".gate_up_proj", 1),
    )
    bias = False
    norms: tuple[str, ...] = ()

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)
        heads, kv_heads = HEADS // size, max(1, KV_HEADS // size)
        qkv = (heads + 2 * kv_heads) * DIM
        padded = (VOCAB + 2) // size
        self.add("embed.weight", parameter(padded, HIDDEN, loader=self.vocabulary))
        self.add("attn.qkv_proj.weight", parameter(qkv, HIDDEN, loader=self.heads_of))
        self.add("attn.o_proj.weight", parameter(HIDDEN, heads * DIM, loader=self.columns))
        self.add(
            "mlp.gate_up_proj.weight", parameter(2 * INNER // size, HIDDEN, loader=self.merged)
        )
        self.add("mlp.down_proj.weight", parameter(HIDDEN, INNER // size, loader=self.columns))
        self.add("norm.weight", parameter(HIDDEN))
        self.stored("embed.weight", VOCAB, HIDDEN)
        for name, num in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.stored(f"attn.{name}_proj.weight", num * DIM, HIDDEN)
            if self.bias:
                self.stored(f"attn.{name}_proj.bias", num * DIM)
        self.stored("attn.o_proj.weight", HIDDEN, HEADS * DIM)
        self.stored("mlp.gate_proj.weight", INNER, HIDDEN)
        self.stored("mlp.up_proj.weight", INNER, HIDDEN)
        self.stored("mlp.down_proj.weight", HIDDEN, INNER)
        self.stored("norm.weight", HIDDEN, dtype=F32)  # converted
        self.stored("attn.rotary_emb.inv_freq", DIM // 2, dtype=F32)
        if self.bias:
            self.add("attn.qkv_proj.bias", parameter(qkv, loader=self.heads_of))
        for name in self.norms:
            self.add(name, parameter(DIM))
            self.stored(name, DIM)


class Qwen2(Llama):
    bias = True


class Qwen3(Llama):
    norms = ("attn.q_norm.weight", "attn.k_norm.weight")


class Gemma(Llama):
    """Tied: the table of the output is that of the input, and both are stored."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)
        self.stored("lm_head.weight", VOCAB, HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights((n.replace("lm_head", "embed"), w) for n, w in weights)


class Mixtral(EngineModel):
    """Experts in two parameters, w1 and w3 one behind the other; gate in fp32."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)
        inner = INNER // size
        self.add("w13", parameter(EXPERTS, 2 * inner, HIDDEN))
        self.add("w2", parameter(EXPERTS, HIDDEN, inner))
        self.add("gate", parameter(EXPERTS, HIDDEN, dtype=F32))
        for expert in range(EXPERTS):
            self.stored(f"experts.{expert}.w1.weight", INNER, HIDDEN)
            self.stored(f"experts.{expert}.w2.weight", HIDDEN, INNER)
            self.stored(f"experts.{expert}.w3.weight", INNER, HIDDEN)
        self.stored("gate", EXPERTS, HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        inner = self.w2.shape[2]
        for name, weight in weights:
            if name == "gate":
                self.gate.data.copy_(weight.to(F32))
                continue
            _, expert, part, _ = name.split(".")
            if part == "w2":
                mine = weight.narrow(1, self.rank * inner, inner)
                self.w2.data[int(expert)].copy_(mine)
                continue
            data = self.w13.data[int(expert)].narrow(0, inner * (part == "w3"), inner)
            data.copy_(weight.narrow(0, self.rank * inner, inner))
        return set()


class DeepSeek(EngineModel):
    """Latent attention: two projections in one, and one that is also kept by heads, transposed."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)
        heads = HEADS // size
        self.add("fused_a", parameter(6 + 5, HIDDEN))
        self.add("kv_b", parameter(heads * (DIM + 2), 3, loader=self.rows))
        self.register_buffer("w_kc", torch.zeros(heads, 3, DIM, dtype=BF16))
        self.register_buffer("w_vc", torch.zeros(heads, 2, 3, dtype=BF16))
        self.stored("q_a", 6, HIDDEN)
        self.stored("kv_a", 5, HIDDEN)
        self.stored("kv_b", HEADS * (DIM + 2), 3)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        waiting: dict[str, torch.Tensor] = {}
        for name, weight in weights:
            if name == "kv_b":
                self.kv_b.weight_loader(self.kv_b, weight)
                continue
            waiting[name] = weight
            if len(waiting) == 2:
                whole(self.fused_a, torch.cat([waiting["q_a"], waiting["kv_a"]], dim=0))
        by_head = self.kv_b.data.unflatten(0, (-1, DIM + 2))
        keys, values = by_head.split([DIM, 2], dim=1)
        self.w_kc.copy_(keys.transpose(1, 2).contiguous())
        self.w_vc.copy_(values)
        return set()


class GptOss(EngineModel):
    """All experts in one stored tensor, transposed; gate and up alternate by columns."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)
        inner = INNER // size
        self.add("w13", parameter(EXPERTS, 2 * inner, HIDDEN))
        self.add("w13_apart", parameter(EXPERTS, 2 * inner, HIDDEN))
        self.add("w13_bias", parameter(EXPERTS, 2 * inner, dtype=F32))
        self.add("sinks", parameter(HEADS // size))
        self.stored("gate_up", EXPERTS, HIDDEN, 2 * INNER)
        self.stored("gate_up_bias", EXPERTS, 2 * INNER)
        self.stored("sinks", HEADS)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        inner = self.w13.shape[1]
        mine = slice(self.rank * inner, (self.rank + 1) * inner)
        for name, weight in weights:
            if name == "gate_up":
                part = weight[:, :, mine].permute(0, 2, 1).contiguous()
                self.w13.data[:, : part.shape[1]].copy_(part)
                self.w13_apart.data[:, : inner // 2].copy_(part[:, ::2])
                self.w13_apart.data[:, inner // 2 :].copy_(part[:, 1::2])
            elif name == "gate_up_bias":
                self.w13_bias.data.copy_(weight[:, mine].to(F32))
            else:
                self.rows(self.sinks, weight)
        return set()


class Mamba(EngineModel):
    """A projection of unequal parts, and a convolution with an axis more than stored."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)
        self.parts = (8, 4, 4)
        num = sum(self.parts) // size
        self.add("in_proj", parameter(num, HIDDEN, loader=self.by_parts))
        self.add("conv", parameter(num, 1, 3, loader=self.by_parts))
        self.add("conv_flat", parameter(num, 3, loader=self.by_parts))
        self.stored("in_proj", sum(self.parts), HIDDEN)
        self.stored("conv", sum(self.parts), 3)
        self.stored("conv_flat", sum(self.parts), 1, 3)

    def by_parts(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        if loaded.dim() < param.dim():
            loaded = loaded.unsqueeze(1)
        elif loaded.dim() > param.dim():
            loaded = loaded.squeeze(1)
        begin = at = 0
        for size in self.parts:
            num = size // self.size
            first = begin + self.rank * num
            param.data[at : at + num, ...] = loaded[first : first + num, ...]
            begin, at = begin + size, at + num


class Fp8Blocks(EngineModel):
    """Codes and scales of blocks; scales of whole projections by index, codes seen as bytes."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)
        self.add("w", parameter(32 // size, 16, dtype=FP8, loader=self.rows))
        self.add("w_scale", parameter(4 // size, 2, dtype=F32, loader=self.rows))
        self.add("qkv_scale", parameter(3, dtype=F32))
        self.add("as_bytes", parameter(8, 4, dtype=torch.uint8))
        self.stored("w", 32, 16, dtype=FP8)
        self.stored("w_scale", 4, 2, dtype=F32)
        for part in "qkv":
            self.stored(f"{part}_scale", dtype=F32)
        self.stored("as_bytes", 8, 4, dtype=FP8)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, weight in weights:
            if name[0] in "qkv":
                self.qkv_scale.data["qkv".index(name[0])] = weight
            elif name == "as_bytes":
                self.as_bytes.data.copy_(weight.view(torch.uint8))
            else:
                getattr(self, name).weight_loader(getattr(self, name), weight)
        return set()


class Lora(EngineModel):
    """Adapters in slots with room for a larger rank; B of q, k and v in one tensor."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)
        self.slots_a = torch.zeros(2, 1, 4, HIDDEN, dtype=BF16)
        self.add("slots_b", parameter(2, 1, 3 * 8 // size, 4))
        self.stored("lora_A", 3, HIDDEN)
        for part in "qkv":
            self.stored(f"{part}.lora_B", 8, 3)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        collected = {}
        for name, weight in weights:
            if name == "lora_A":
                self.slots_a[1, 0, : weight.shape[0], :].copy_(weight, non_blocking=True)
            else:
                num = weight.shape[0] // self.size
                collected[name[0]] = weight[self.rank * num : (self.rank + 1) * num]
        joined = torch.stack([collected[part] for part in "qkv"]).flatten(0, 1)
        self.slots_b.data[1, 0, :, : joined.shape[1]] = joined
        return set()


class VisionTower(EngineModel):
    """q, k and v are stored as one tensor by heads, and wanted one behind the other."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)
        self.add("qkv", parameter(3 * HEADS * DIM // size, HIDDEN))
        self.add("patches", parameter(8, 3 * 2 * 2))
        self.add("positions", parameter(9, 8))
        self.add("kernel", parameter(12, 8, dtype=F32))
        self.stored("qkv", HEADS * 3 * DIM, HIDDEN)
        self.stored("patches", 8, 3, 2, 2)
        self.stored("class", 8)
        self.stored("positions", 1, 8, 8)
        self.stored("kernel", 8, 3, 2, 2)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, weight in weights:
            if name == "qkv":
                by_head = weight.view(HEADS, 3, DIM, HIDDEN)
                heads = by_head.chunk(self.size, 0)[self.rank]
                self.qkv.data.copy_(heads.transpose(0, 1).reshape(-1, HIDDEN))
            elif name == "patches":
                self.patches.data.copy_(weight.flatten(1))
            elif name == "kernel":
                self.kernel.data.copy_(weight.reshape(8, -1).t().float())
            elif name == "class":
                self.positions.data[0] = weight
            else:
                self.positions.data[1:].copy_(weight.squeeze(0))
        return set()


MODELS: Mapping[str, type[EngineModel]] = {
    each.__name__: each
    for each in (
        Llama,
        Qwen2,
        Qwen3,
        Gemma,
        Mixtral,
        DeepSeek,
        GptOss,
        Mamba,
        Fp8Blocks,
        Lora,
        VisionTower,
    )
}


def tensors_of(model: EngineModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a model, also those that are no parameters."""
    yield from model.state_dict().items()
    yield from ((k, v) for k, v in vars(model).items() if isinstance(v, torch.Tensor))


def stored_values(specs: Mapping[str, Spec], seed: int = 0) -> dict[str, torch.Tensor]:
    """Make values for stored tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in specs.items()
    }
