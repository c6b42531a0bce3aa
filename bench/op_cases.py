"""The operations of a step and of the update on a workload's shapes, each in every way there is of computing it.

"ours" is what the engine runs on CUDA, "reference" its definition in plain torch, "torch" what torch.nn.functional or torch.optim
has for it, "compiled" that under torch.compile, "flex" compiled flex_attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import plain_torch
from bench.attention import Shape, attention_calls
from bench.op_case import Call, Case, Data, Draw, Results, differentiable, fresh
from bench.workloads import Workload
from engine.kernels import Ops, fused_ops, reference_ops
from engine.ops.adamw_arenas import AdamWArenas
from engine.params import parameter_shapes

_EPS = 1e-6
_STD = 0.02
# Parameters of the update that is timed: more would only take longer.
_MOST_UPDATED = 1 << 28
_SHARD = 8192  # the arenas' size is a multiple

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def cases(workload: Workload, device: torch.device, *, chunk_rows: int, compiled: bool) -> list[Case]:
    """Every operation of the engine's step and update on the workload's shapes."""
    ops = {"reference": reference_ops()}
    if device.type == "cuda":
        ops = {"ours": fused_ops("triton"), **ops}
    compiler = partial(torch.compile, dynamic=False) if compiled else None
    return [
        _norm_linear(workload, ops, compiler),
        _linear(workload, ops),
        _qkv_rope(workload, ops, compiler),
        _attention(workload, device),
        _norm_mlp(workload, ops, compiler),
        _norm(workload, ops, compiler),
        _head(workload, ops, compiler, chunk_rows),
        _adamw(workload, ops),
    ]


def _norm_linear(w: Workload, ops: Mapping[str, Ops], compiler: Compile | None) -> Case:
    D, Q = w.hidden_size, w.bucket.Q
    width = (w.num_attention_heads + 2 * w.config().num_key_value_heads) * w.config().head_dim

    def make(rows: int, dtype: torch.dtype, device: torch.device) -> Data:
        draw = Draw(dtype, device)
        weights = {"norm": fresh(draw(D)), "weight": fresh(draw(width, D) * _STD)}
        return Data({"residual": draw(rows, D), "delta": draw(rows, D)}, weights, (draw(rows, D), draw(rows, width)))

    def ours(op: Ops) -> Call:
        def call(d: Data) -> tuple[Tensor, Tensor]:
            x = d.leaves
            return op.norm_linear(x["residual"], x["delta"], d.weights["norm"], _EPS, d.weights["weight"])

        return differentiable(call)

    def plain(residual: Tensor, delta: Tensor, norm: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return total, F.linear(F.rms_norm(total, (D,), norm, _EPS), weight)

    calls = {name: ours(op) for name, op in ops.items()} | _rivals(plain, compiler)
    return Case("residual, norm, q k v", Q, f"{Q} x {D} -> {width}", make, calls, 6.0 * Q * D * width, "TFLOP/s")


def _linear(w: Workload, ops: Mapping[str, Ops]) -> Case:
    D, Q = w.hidden_size, w.bucket.Q
    HE = w.num_attention_heads * w.config().head_dim

    def make(rows: int, dtype: torch.dtype, device: torch.device) -> Data:
        draw = Draw(dtype, device)
        return Data({"x": draw(rows, HE)}, {"weight": fresh(draw(D, HE) * _STD)}, (draw(rows, D),))

    def ours(op: Ops) -> Call:
        return differentiable(lambda d: op.linear(d.leaves["x"], d.weights["weight"]))

    calls = {name: ours(op) for name, op in ops.items()} | _rivals(F.linear, None)
    return Case("linear o", Q, f"{Q} x {HE} -> {D}", make, calls, 6.0 * Q * D * HE, "TFLOP/s")


def _qkv_rope(w: Workload, ops: Mapping[str, Ops], compiler: Compile | None) -> Case:
    H, G, E, Q = w.num_attention_heads, w.config().num_key_value_heads, w.config().head_dim, w.bucket.Q
    width = (H + 2 * G) * E

    def make(rows: int, dtype: torch.dtype, device: torch.device) -> Data:
        draw = Draw(dtype, device)
        angles = torch.rand(rows, E // 2, device=device, generator=draw.generator) * 6.3
        # Held as whole numbers of 2^-10: they are the same in every precision that the tables may have.
        tables = {"cos": (angles.cos() * 1024).int(), "sin": (angles.sin() * 1024).int()}
        extra = {**tables, "positions": torch.arange(rows, device=device, dtype=torch.int32)}
        weights = {"q_norm": fresh(draw(E)), "k_norm": fresh(draw(E))}
        return Data({"qkv": draw(rows, width)}, weights, tuple(draw(rows, heads, E) for heads in (H, G, G)), extra)

    def tables(d: Data) -> list[Tensor]:
        wide = torch.promote_types(d.leaves["qkv"].dtype, torch.float32)
        found: list[Tensor] = d.once("tables", lambda: [d.extra[name].to(wide) / 1024 for name in ("cos", "sin")])
        return found

    def ours(op: Ops) -> Call:
        sizes = {"num_heads": H, "num_kv_heads": G, "head_dim": E, "eps": _EPS}
        return differentiable(
            lambda d: op.qkv_rope(d.leaves["qkv"], *d.weights.values(), *tables(d), d.extra["positions"], **sizes)
        )

    def plain(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.split([H * E, G * E, G * E], dim=-1)
        rope = plain_torch.heads_with_rope
        return rope(q, q_norm, cos, sin, E, _EPS), rope(k, k_norm, cos, sin, E, _EPS), v.unflatten(-1, (G, E))

    calls = {name: ours(op) for name, op in ops.items()} | _rivals(plain, compiler, tables)
    # Forward a row read and written, backward its gradient and the row read, and written.
    return Case("norms of q k, RoPE", Q, f"{Q} x {width}", make, calls, 5.0 * Q * width * _size(ops), "GB/s")


def _attention(w: Workload, device: torch.device) -> Case:
    whole = Shape(w.name, w.S, w.N, w.K, w.num_attention_heads)
    few = replace(whole, N=min(64, w.N), H=whole.H // whole.G, G=1)

    def make(rows: int, dtype: torch.dtype, on: torch.device) -> Data:
        shape = whole if rows == whole.N * whole.K else few
        inputs, do = shape.inputs(on)
        names = ("q", "k_context", "v_context", "k_draft", "v_draft")
        extra = {"mask": shape.mask(on), "S": shape.S}
        return Data(dict(zip(names, inputs, strict=True)), {}, (do,), extra).to(dtype)

    def under(name: str, attend: Callable[..., Any]) -> Call:
        def call(d: Data) -> Tensor:
            o: Tensor = d.once(name, lambda: attend(d.extra["mask"], d.extra["S"]))(*d.leaves.values())
            return o

        return differentiable(call)

    calls = {name: under(name, attend) for name, attend in attention_calls(device).items()}
    Q = whole.N * whole.K
    # Forward two products over the visible pairs, backward five.
    return Case(
        "attention", Q, f"{Q} x {w.S}, {whole.H} heads", make, calls, 3.5 * whole.flop(), "TFLOP/s", check_rows=0
    )


def _norm_mlp(w: Workload, ops: Mapping[str, Ops], compiler: Compile | None) -> Case:
    D, inter, Q = w.hidden_size, w.intermediate_size, w.bucket.Q

    def make(rows: int, dtype: torch.dtype, device: torch.device) -> Data:
        draw = Draw(dtype, device)
        matrices = {"gate_up": fresh(draw(2 * inter, D) * _STD), "down": fresh(draw(D, inter) * _STD)}
        leaves = {"residual": draw(rows, D), "delta": draw(rows, D)}
        return Data(leaves, {"norm": fresh(draw(D)), **matrices}, (draw(rows, D), draw(rows, D)))

    def ours(op: Ops) -> Call:
        def call(d: Data) -> tuple[Tensor, Tensor]:
            norm, gate_up, down = d.weights.values()
            return op.norm_mlp(d.leaves["residual"], d.leaves["delta"], norm, _EPS, gate_up, down)

        return differentiable(call)

    def plain(residual: Tensor, delta: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return total, plain_torch.gated_mlp(F.rms_norm(total, (D,), norm, _EPS), gate_up, down)

    calls = {name: ours(op) for name, op in ops.items()} | _rivals(plain, compiler)
    return Case("residual, norm, MLP", Q, f"{Q} x {D} -> {inter}", make, calls, 18.0 * Q * D * inter, "TFLOP/s")


def _norm(w: Workload, ops: Mapping[str, Ops], compiler: Compile | None) -> Case:
    D, Q = w.hidden_size, w.bucket.Q

    def make(rows: int, dtype: torch.dtype, device: torch.device) -> Data:
        draw = Draw(dtype, device)
        leaves = {"residual": draw(rows, D), "delta": draw(rows, D)}
        return Data(leaves, {"norm": fresh(draw(D))}, (draw(rows, D), draw(rows, D)))

    def ours(op: Ops) -> Call:
        return differentiable(
            lambda d: op.add_rms_norm(d.leaves["residual"], d.leaves["delta"], d.weights["norm"], _EPS)
        )

    def plain(residual: Tensor, delta: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return total, F.rms_norm(total, (D,), norm, _EPS)

    calls = {name: ours(op) for name, op in ops.items()} | _rivals(plain, compiler)
    # Forward two rows read and two written, backward three read and one written.
    return Case("residual, norm", Q, f"{Q} x {D}", make, calls, 8.0 * Q * D * _size(ops), "GB/s")


def _head(w: Workload, ops: Mapping[str, Ops], compiler: Compile | None, chunk_rows: int) -> Case:
    D, V, R = w.hidden_size, w.vocab_size, w.bucket.B * w.bucket.N * (w.K - 1)

    def make(rows: int, dtype: torch.dtype, device: torch.device) -> Data:
        draw = Draw(dtype, device)
        labels = torch.randint(V, (rows,), device=device, generator=draw.generator)
        ones = torch.ones(rows, device=device)
        return Data({"h": draw(rows, D)}, extra={"head": draw(V, D) * _STD, "labels": labels, "ones": ones})

    def ours(op: Ops) -> Call:
        def run(d: Data) -> Results:
            weights = d.extra["ones"].float()
            one, h = weights[0], d.leaves["h"].detach()
            rows = op.frozen_head(
                h, d.extra["head"], d.extra["labels"], ce_weight=one, kl_weight=one, chunk_rows=chunk_rows
            )
            assert rows.dh is not None
            op.weigh_rows(rows.dh, rows.dh_scale, weights)
            return {"ce": rows.ce, "dh": rows.dh}

        return Call(run)

    def rival(losses: Callable[..., Tensor]) -> Call:
        def run(d: Data) -> Results:
            h, head, labels = d.leaves["h"], d.extra["head"], d.extra["labels"]
            ce, dh = plain_torch.cross_entropy(h, head, labels, chunk_rows=chunk_rows, losses=losses)
            return {"ce": ce, "dh": dh.mul_(d.extra["ones"].to(dh.dtype)[:, None])}

        return Call(run)

    calls = {name: ours(op) for name, op in ops.items()} | {"torch": rival(plain_torch.row_losses)}
    if compiler is not None:
        calls["compiled"] = rival(compiler(plain_torch.row_losses))
    return Case("frozen-head loss", R, f"{R} x {D} -> {V}", make, calls, 4.0 * R * D * V, "TFLOP/s", check_rows=64)


def _adamw(w: Workload, ops: Mapping[str, Ops]) -> Case:
    parameters = sum(torch.Size(shape).numel() for shape in parameter_shapes(w.config()).values())
    size = min(_MOST_UPDATED, parameters // _SHARD * _SHARD)
    beta1, beta2, lr = 0.9, 0.95, 1e-3

    def make(rows: int, dtype: torch.dtype, device: torch.device) -> Data:
        draw = Draw(torch.float32, device)
        # In the order of adamw_arenas.SCALARS, of the first step and without decay.
        values = [lr, 0.0, beta1, beta2, 1e-8, 1.0, 1 - beta1, (1 - beta2) ** 0.5, 1.0]
        master = draw(rows)
        moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        arenas = {"master": master, **moments, "weight": torch.zeros_like(master, dtype=dtype)}
        return Data({}, extra={**arenas, "grad": draw(rows).to(dtype), "scalars": torch.tensor(values, device=device)})

    def ours(op: Ops) -> Call:
        def run(d: Data) -> Results:
            names = ("weight", "grad", "master", "exp_avg", "exp_avg_sq")
            weight, grad, master, exp_avg, exp_avg_sq = (d.extra[name] for name in names)
            op.adamw(AdamWArenas(weight, grad, master, exp_avg, exp_avg_sq, num_decayed=0), d.extra["scalars"])
            return {name: d.extra[name] for name in names[2:]}

        return Call(run)

    def optimizer(d: Data) -> torch.optim.AdamW:
        parameter = torch.nn.Parameter(d.extra["master"])
        parameter.grad = d.extra["grad"].to(parameter.dtype)
        on_device = parameter.is_cuda
        return torch.optim.AdamW(
            [parameter], lr, (beta1, beta2), eps=1e-8, weight_decay=0.0, fused=True, capturable=on_device
        )

    def rival(d: Data) -> Results:
        made: torch.optim.AdamW = d.once("optimizer", lambda: optimizer(d))
        made.step()
        (parameter,) = made.param_groups[0]["params"]
        d.extra["weight"].copy_(parameter.detach())
        return {"master": parameter.detach(), **{n: made.state[parameter][n] for n in ("exp_avg", "exp_avg_sq")}}

    calls = {name: ours(op) for name, op in ops.items()} | {"torch": Call(rival)}
    # The gradient read, the weight written, master and moments read and written.
    work = size * (24.0 + 2 * _size(ops))
    return Case("AdamW", size, f"{size:,}", make, calls, work, "GB/s", check_rows=min(size, 1 << 16))


def _rivals(
    plain: Callable[..., Any], compiler: Compile | None, more: Callable[[Data], list[Tensor]] = lambda d: []
) -> dict[str, Call]:
    """A function of the leaves, the weights' values and `more`, by torch and compiled."""

    def call(function: Callable[..., Any]) -> Call:
        return differentiable(
            lambda d: function(*d.leaves.values(), *(weight.value for weight in d.weights.values()), *more(d))
        )

    made = {"torch": call(plain)}
    if compiler is not None:
        made["compiled"] = call(compiler(plain))
    return made


def _size(ops: Mapping[str, Ops]) -> int:
    """Bytes of an activation: bf16 on the GPU, fp32 on the CPU."""
    return 2 if "ours" in ops else 4
