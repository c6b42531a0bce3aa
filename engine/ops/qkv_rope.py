"""Split, q and k norm, RoPE and layout in one pass each way (Triton). A program holds all heads of one row at a time; the
backward pass overwrites the saved projection with its gradient, which nothing else reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.card import pipeline_stages
from engine.ops.column_sums import add_sums
from engine.ops.weight import Weight

# Swept on an H200: few warps, so that two programs share a multiprocessor and each thread has much to load at a time.
_BACKWARD_PROGRAMS = 264
_BACKWARD_WARPS = 4
_BACKWARD_STAGES = 3


@triton.jit
def _weights(q_weight_ptr, k_weight_ptr, head, column, H, G, ok):
    """Norm weights of every head as a tile: q's, k's, and nothing (0) for v."""
    q_weight = tl.load(q_weight_ptr + column, (head < H) & ok, 0.0)
    k_weight = tl.load(k_weight_ptr + column, (head >= H) & (head < H + G) & ok, 0.0)
    return q_weight.to(tl.float32) + k_weight.to(tl.float32)


@triton.jit(do_not_specialize=["R"])
def _forward(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    R,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, HALF)[None]
    ok = (head < H + 2 * G) & (c < E // 2)
    source = row
    if SHARED > 0:
        source = tl.where(row % SHARED == 0, row // SHARED, R // SHARED)
    at = source * ((H + 2 * G) * E) + head * E + c
    x1 = tl.load(qkv_ptr + at, ok, 0.0).to(tl.float32)
    x2 = tl.load(qkv_ptr + at + E // 2, ok, 0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x1 * x1 + x2 * x2, 1)[:, None] / E + eps)
    position = tl.load(position_ptr + row)
    cos = tl.load(cos_ptr + position * (E // 2) + c, c < E // 2, 0.0)
    sin = tl.load(sin_ptr + position * (E // 2) + c, c < E // 2, 0.0)
    n1 = x1 * rstd * _weights(q_weight_ptr, k_weight_ptr, head, c, H, G, ok)
    n2 = x2 * rstd * _weights(q_weight_ptr, k_weight_ptr, head, c + E // 2, H, G, ok)
    y1 = n1 * cos - n2 * sin
    y2 = n2 * cos + n1 * sin
    dtype = k_ptr.dtype.element_ty
    if H > 0:
        q_at = row * (H * E) + head * E + c
        tl.store(q_ptr + q_at, y1.to(dtype), ok & (head < H))
        tl.store(q_ptr + q_at + E // 2, y2.to(dtype), ok & (head < H))
    is_k = ok & (head >= H) & (head < H + G)
    k_at = row * (G * E) + (head - H) * E + c
    tl.store(k_ptr + k_at, y1.to(dtype), is_k)
    tl.store(k_ptr + k_at + E // 2, y2.to(dtype), is_k)
    is_v = ok & (head >= H + G)
    v_at = row * (G * E) + (head - H - G) * E + c
    tl.store(v_ptr + v_at, x1.to(dtype), is_v)
    tl.store(v_ptr + v_at + E // 2, x2.to(dtype), is_v)


@triton.jit(do_not_specialize=["R", "rows_per_program"])
def _backward(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    qkv_ptr,
    dqkv_ptr,
    dshared_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    dweight_ptr,
    R,
    rows_per_program,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, HALF)[None]
    ok = (head < H + 2 * G) & (c < E // 2)
    is_q = ok & (head < H)
    is_k = ok & (head >= H) & (head < H + G)
    is_v = ok & (head >= H + G)
    w1 = _weights(q_weight_ptr, k_weight_ptr, head, c, H, G, ok)
    w2 = _weights(q_weight_ptr, k_weight_ptr, head, c + E // 2, H, G, ok)
    dw1 = tl.zeros([HEADS, HALF], tl.float32)
    dw2 = tl.zeros([HEADS, HALF], tl.float32)
    dshared1 = tl.zeros([HEADS, HALF], tl.float32)
    dshared2 = tl.zeros([HEADS, HALF], tl.float32)
    first = program.to(tl.int64) * rows_per_program
    for i in tl.range(0, tl.minimum(rows_per_program, R - first), num_stages=STAGES):
        row = first + i
        source = row
        own = ok
        if SHARED > 0:
            source = tl.where(row % SHARED == 0, row // SHARED, R // SHARED)
            own = ok & (head < tl.where(row % SHARED == 0, H + 2 * G, 0))
        at = source * ((H + 2 * G) * E) + head * E + c
        x1 = tl.load(qkv_ptr + at, ok, 0.0).to(tl.float32)
        x2 = tl.load(qkv_ptr + at + E // 2, ok, 0.0).to(tl.float32)
        k_at = row * (G * E) + (head - H) * E + c
        v_at = row * (G * E) + (head - H - G) * E + c
        dy1 = tl.load(dk_ptr + k_at, is_k, 0.0).to(tl.float32)
        dy2 = tl.load(dk_ptr + k_at + E // 2, is_k, 0.0).to(tl.float32)
        if H > 0:
            q_at = row * (H * E) + head * E + c
            dy1 += tl.load(dq_ptr + q_at, is_q, 0.0).to(tl.float32)
            dy2 += tl.load(dq_ptr + q_at + E // 2, is_q, 0.0).to(tl.float32)
        position = tl.load(position_ptr + row)
        cos = tl.load(cos_ptr + position * (E // 2) + c, c < E // 2, 0.0)
        sin = tl.load(sin_ptr + position * (E // 2) + c, c < E // 2, 0.0)
        dn1 = dy1 * cos + dy2 * sin
        dn2 = dy2 * cos - dy1 * sin
        rstd = 1.0 / tl.sqrt(tl.sum(x1 * x1 + x2 * x2, 1)[:, None] / E + eps)
        h1 = x1 * rstd
        h2 = x2 * rstd
        dw1 += dn1 * h1
        dw2 += dn2 * h2
        g1 = dn1 * w1
        g2 = dn2 * w2
        mean = tl.sum(g1 * h1 + g2 * h2, 1)[:, None] / E
        dx1 = (g1 - h1 * mean) * rstd
        dx2 = (g2 - h2 * mean) * rstd
        dx1 = tl.where(is_v, tl.load(dv_ptr + v_at, is_v, 0.0).to(tl.float32), dx1)
        dx2 = tl.where(is_v, tl.load(dv_ptr + v_at + E // 2, is_v, 0.0).to(tl.float32), dx2)
        tl.store(dqkv_ptr + at, dx1.to(dqkv_ptr.dtype.element_ty), own)
        tl.store(dqkv_ptr + at + E // 2, dx2.to(dqkv_ptr.dtype.element_ty), own)
        if SHARED > 0:
            dshared1 += tl.where(row % SHARED > 0, dx1, 0.0)
            dshared2 += tl.where(row % SHARED > 0, dx2, 0.0)
    if SHARED > 0:
        shared_at = program.to(tl.int64) * ((H + 2 * G) * E) + head * E + c
        tl.store(dshared_ptr + shared_at, dshared1, ok)
        tl.store(dshared_ptr + shared_at + E // 2, dshared2, ok)
    base = dweight_ptr + program * (2 * E) + tl.arange(0, HALF)
    half_ok = tl.arange(0, HALF) < E // 2
    tl.store(base, tl.sum(tl.where(is_q, dw1, 0.0), 0), half_ok)
    tl.store(base + E // 2, tl.sum(tl.where(is_q, dw2, 0.0), 0), half_ok)
    tl.store(base + E, tl.sum(tl.where(is_k, dw1, 0.0), 0), half_ok)
    tl.store(base + E + E // 2, tl.sum(tl.where(is_k, dw2, 0.0), 0), half_ok)


class _QKVRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        qkv: Tensor,
        q_value: Tensor,
        q_norm: Weight,
        k_value: Tensor,
        k_norm: Weight,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        H: int,
        G: int,
        E: int,
        eps: float,
        shared: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        R = positions.shape[0]
        q, k, v = (qkv.new_empty(R, heads, E) for heads in (H, G, G))
        sizes = {
            "H": H,
            "G": G,
            "E": E,
            "HEADS": triton.next_power_of_2(H + 2 * G),
            "HALF": triton.next_power_of_2(E // 2),
            "SHARED": shared,
        }
        _forward[(R,)](qkv, q_value, k_value, cos, sin, positions, q, k, v, R, eps, **sizes, num_warps=_warps(sizes))
        ctx.save_for_backward(qkv, q_value, k_value, cos, sin, positions)
        ctx.sizes, ctx.eps, ctx.q_norm, ctx.k_norm = sizes, eps, q_norm, k_norm
        return q, k, v

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
        qkv, q_value, k_value, cos, sin, positions = ctx.saved_tensors
        sizes, R, E = ctx.sizes, positions.shape[0], ctx.sizes["E"]
        rows_per_program = triton.cdiv(R, min(R, _BACKWARD_PROGRAMS))
        programs = triton.cdiv(R, rows_per_program)
        partial = torch.empty(programs, 2, E, device=qkv.device, dtype=torch.float32)
        # In place: qkv came fresh out of a matmul that did not save its output, and each row has one reader. Not so where
        # slots share a row: those gradients are summed by program, then over the programs, in a fixed order.
        dqkv, dshared = qkv, partial
        if sizes["SHARED"]:
            dqkv = torch.empty_like(qkv)
            dshared = torch.empty(programs, qkv.shape[1], device=qkv.device, dtype=torch.float32)
        # Eight loads a row, of whole tiles: two halves each of the projection, dq, dk and dv.
        in_flight = 8 * sizes["HEADS"] * sizes["HALF"] * qkv.element_size()
        _backward[(programs,)](
            dq.contiguous(),
            dk.contiguous(),
            dv.contiguous(),
            qkv,
            dqkv,
            dshared,
            q_value,
            k_value,
            cos,
            sin,
            positions,
            partial,
            R,
            rows_per_program,
            ctx.eps,
            **sizes,
            STAGES=pipeline_stages(_BACKWARD_STAGES, in_flight, qkv.device),
            num_warps=min(_BACKWARD_WARPS, _warps(sizes)),
        )
        if sizes["SHARED"]:
            add_sums(dqkv[-1], dshared, add=False)
        if sizes["H"]:
            add_sums(ctx.q_norm.grad, partial[:, 0], add=ctx.q_norm.adds())
        add_sums(ctx.k_norm.grad, partial[:, 1], add=ctx.k_norm.adds())
        return (dqkv, *[None] * 12)


def _warps(sizes: dict[str, int]) -> int:
    return max(1, min(8, sizes["HEADS"] * sizes["HALF"] // 512))


def qkv_rope(
    qkv_RF: Tensor,
    q_norm: Weight,
    k_norm: Weight,
    cos_PE: Tensor,
    sin_PE: Tensor,
    positions_R: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    shared_slots: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [R, (H + 2G) E] -> q [R, H, E], k [R, G, E], v [R, G, E]; H = 0 for the context. See qkv_rope_ref.py.

    Takes qkv over: the backward pass writes qkv's gradient into its memory.
    """
    return _QKVRope.apply(
        qkv_RF,
        q_norm.value,
        q_norm,
        k_norm.value,
        k_norm,
        cos_PE,
        sin_PE,
        positions_R,
        num_heads,
        num_kv_heads,
        head_dim,
        eps,
        shared_slots,
    )
