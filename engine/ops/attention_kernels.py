"""Triton kernels of attention under the DFlash mask. attention.py launches them, attention_ref.py is the definition.

R heads of a GQA group; ROWS query rows and KEYS context keys of a tile. Row r of a tile is draft position r // R,
head r % R of the group; they lie side by side in [Q, H, E]. x_sb is the batch stride of x, x_sq or x_ss its row stride:
a constant of the model, compiled in, because addresses then need fewer registers.

A row sees context [low, high) and the K keys of its own block. The diagonal comes first, as one small product, so no
row is ever empty; then the context tiles that every row sees whole, without a mask; then those at the edges. Softmax is
in base 2, statistics and sums in fp32. Keys at or past the highest anchor of a tile are never loaded, or never used.

`lse` and `delta` are fp32 [B, G, Q * R]. A row that does not exist reads lse = +inf, which makes its probabilities 0.
"""

import triton
import triton.language as tl

_FAR = tl.constexpr(1 << 30)
_LOG2E = tl.constexpr(1.4426950408889634)
# Sizes that differ between buckets: a compiled kernel must serve all of them.
_SIZES = ["N", "S", "window"]


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _visible(n, k, ok, anchors_ptr, keeps_ptr, starts_ptr, S, window):
    """Context [low, high) that slot k of block n sees; (far, 0) where it sees none."""
    anchor = tl.load(anchors_ptr + n, ok, 0)
    keep = tl.load(keeps_ptr + n, ok, 0)
    low = tl.maximum(tl.load(starts_ptr + n, ok, 0), anchor + k - (window - 1))
    high = tl.where(keep > 0, tl.minimum(anchor, S), 0)
    some = low < high
    return tl.where(some, low, _FAR), tl.where(some, high, 0)


@triton.jit
def _context_range(low, high, ok, KEYS: tl.constexpr):
    """(begin, full_begin, full_end, end) of a tile's context, in keys; all but end are multiples of KEYS.

    Every row sees [full_begin, full_end); what else any row sees lies in [begin, full_begin) and [full_end, end).
    """
    end = tl.max(high, 0)
    begin = tl.minimum(tl.min(low, 0), end) // KEYS * KEYS
    full_begin = (tl.minimum(tl.max(tl.where(ok, low, 0), 0), end) + KEYS - 1) // KEYS * KEYS
    full_end = tl.maximum(tl.min(tl.where(ok, high, _FAR), 0) // KEYS * KEYS, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def _forward_step(acc, m, total, s, v, scale):
    m_next = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - m_next[:, None])
    alpha = tl.exp2(m - m_next)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, m_next, total * alpha + tl.sum(p, 1)


@triton.jit(do_not_specialize=_SIZES)
def forward_kernel(
    q_ptr, kc_ptr, vc_ptr, kd_ptr, vd_ptr, o_ptr, lse_ptr, anchors_ptr, keeps_ptr, starts_ptr,
    q_sb, kc_sb, vc_sb, kd_sb, vd_sb, o_sb,
    q_sq: tl.constexpr, kc_ss: tl.constexpr, vc_ss: tl.constexpr,
    kd_sq: tl.constexpr, vd_sq: tl.constexpr, o_sq: tl.constexpr,
    N, S, window, scale,
    G: tl.constexpr, R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, POSITIONS: tl.constexpr, DRAFT: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile of rows. Grid (B * G, tiles); the last tiles, with the longest prefixes, come first."""
    g, b = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    scale = scale * _LOG2E
    first_block = tile // PARTS * BLOCKS
    first = first_block * K + tile % PARTS * POSITIONS
    r = tl.arange(0, ROWS)
    e = tl.arange(0, E)[None, :]
    slot = tile % PARTS * POSITIONS + r // R
    n, k = first_block + slot // K, slot % K
    ok = (r // R < POSITIONS) & (slot < BLOCKS * K) & (n < N)
    low, high = _visible(n, k, ok, anchors_ptr + b * N, keeps_ptr + b * N, starts_ptr + b * N, S, window)
    q_ptr += b * q_sb + first * q_sq + g * R * E
    q = tl.load(q_ptr + (r // R * q_sq + r % R * E)[:, None] + e, ok[:, None], 0.0)

    c = tl.arange(0, DRAFT)
    c_ok = (c < BLOCKS * K) & (first_block + c // K < N)
    kd_ptr += b * kd_sb + first_block * K * kd_sq + g * E
    vd_ptr += b * vd_sb + first_block * K * vd_sq + g * E
    key_d = tl.load(kd_ptr + (c * kd_sq)[:, None] + e, c_ok[:, None], 0.0)
    v_d = tl.load(vd_ptr + (c * vd_sq)[:, None] + e, c_ok[:, None], 0.0)
    own = (c[None, :] // K == slot[:, None] // K) & c_ok[None, :]
    if CAUSAL:
        own = own & (c[None, :] % K <= k[:, None])
    s_d = tl.where(own | ~ok[:, None], _dot(q, tl.trans(key_d)), float("-inf"))
    m = tl.max(s_d, 1) * scale
    p_d = tl.exp2(s_d * scale - m[:, None])
    total = tl.sum(p_d, 1)
    acc = _dot(p_d.to(v_d.dtype), v_d)

    begin, full_begin, full_end, end = _context_range(low, high, ok, KEYS)
    j = tl.arange(0, KEYS)
    kc_ptr += b * kc_sb + g * E
    vc_ptr += b * vc_sb + g * E
    kc = kc_ptr + (j * kc_ss)[:, None] + e
    vc = vc_ptr + (j * vc_ss)[:, None] + e
    for key_0 in range(full_begin, full_end, KEYS):
        key = tl.load(kc + key_0 * kc_ss)
        v = tl.load(vc + key_0 * vc_ss)
        acc, m, total = _forward_step(acc, m, total, _dot(q, tl.trans(key)), v, scale)
    edge = full_begin - begin
    for i in range(0, edge + end - full_end, KEYS):
        key_0 = begin + i + (i >= edge) * (full_end - full_begin)
        here = (key_0 + j < end)[:, None]
        key = tl.load(kc + key_0 * kc_ss, here, 0.0)
        v = tl.load(vc + key_0 * vc_ss, here, 0.0)
        sees = (key_0 + j[None, :] < high[:, None]) & (key_0 + j[None, :] >= low[:, None])
        s = tl.where(sees, _dot(q, tl.trans(key)), float("-inf"))
        acc, m, total = _forward_step(acc, m, total, s, v, scale)

    o_ptr += b * o_sb + first * o_sq + g * R * E
    o_at = o_ptr + (r // R * o_sq + r % R * E)[:, None] + e
    tl.store(o_at, (acc / total[:, None]).to(o_ptr.dtype.element_ty), ok[:, None])
    lse_ptr += (b * G + g) * N * K * R + first * R
    tl.store(lse_ptr + r, m + tl.log2(total), ok)


@triton.jit(do_not_specialize=_SIZES)
def dq_kernel(
    q_ptr, kc_ptr, vc_ptr, kd_ptr, vd_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, low_ptr, high_ptr,
    dq_ptr, dkd_ptr, dvd_ptr, anchors_ptr, keeps_ptr, starts_ptr,
    q_sb, kc_sb, vc_sb, kd_sb, vd_sb, o_sb, do_sb, dq_sb, dkd_sb, dvd_sb,
    q_sq: tl.constexpr, kc_ss: tl.constexpr, vc_ss: tl.constexpr,
    kd_sq: tl.constexpr, vd_sq: tl.constexpr, o_sq: tl.constexpr,
    do_sq: tl.constexpr, dq_sq: tl.constexpr, dkd_sq: tl.constexpr, dvd_sq: tl.constexpr,
    N, S, window, scale,
    G: tl.constexpr, R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, POSITIONS: tl.constexpr, DRAFT: tl.constexpr,
):  # fmt: skip
    """dQ and delta = sum(o * do) of one tile of rows; the draft keys' gradients too, where a tile holds whole blocks.

    Grid (B * G, tiles); the last tiles come first.
    """
    g, b = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    scale2 = scale * _LOG2E
    first_block = tile // PARTS * BLOCKS
    first = first_block * K + tile % PARTS * POSITIONS
    r = tl.arange(0, ROWS)
    e = tl.arange(0, E)[None, :]
    slot = tile % PARTS * POSITIONS + r // R
    n, k = first_block + slot // K, slot % K
    ok = (r // R < POSITIONS) & (slot < BLOCKS * K) & (n < N)
    low, high = _visible(n, k, ok, anchors_ptr + b * N, keeps_ptr + b * N, starts_ptr + b * N, S, window)
    q_ptr += b * q_sb + first * q_sq + g * R * E
    q = tl.load(q_ptr + (r // R * q_sq + r % R * E)[:, None] + e, ok[:, None], 0.0)
    o_ptr += b * o_sb + first * o_sq + g * R * E
    o = tl.load(o_ptr + (r // R * o_sq + r % R * E)[:, None] + e, ok[:, None], 0.0)
    do_ptr += b * do_sb + first * do_sq + g * R * E
    do = tl.load(do_ptr + (r // R * do_sq + r % R * E)[:, None] + e, ok[:, None], 0.0)
    statistics = (b * G + g) * N * K * R + first * R
    lse = tl.load(lse_ptr + statistics + r, ok, float("inf"))
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + statistics + r, delta, ok)
    # Bounds for dkv_kernel, whose edge tiles have no registers to spare for working them out.
    if g == 0:
        tl.store(low_ptr + b * N * K * R + first * R + r, low, ok)
        tl.store(high_ptr + b * N * K * R + first * R + r, high, ok)

    c = tl.arange(0, DRAFT)
    c_ok = (c < BLOCKS * K) & (first_block + c // K < N)
    kd_ptr += b * kd_sb + first_block * K * kd_sq + g * E
    vd_ptr += b * vd_sb + first_block * K * vd_sq + g * E
    key_d = tl.load(kd_ptr + (c * kd_sq)[:, None] + e, c_ok[:, None], 0.0)
    v_d = tl.load(vd_ptr + (c * vd_sq)[:, None] + e, c_ok[:, None], 0.0)
    own = (c[None, :] // K == slot[:, None] // K) & c_ok[None, :]
    if CAUSAL:
        own = own & (c[None, :] % K <= k[:, None])
    p_d = tl.where(own, tl.exp2(_dot(q, tl.trans(key_d)) * scale2 - lse[:, None]), 0.0)
    ds_d = (p_d * (_dot(do, tl.trans(v_d)) - delta[:, None])).to(key_d.dtype)
    dq = _dot(ds_d, key_d)
    if PARTS == 1:
        # All heads of the group and the whole of each block are in this tile: these sums are complete.
        dkd_ptr += b * dkd_sb + first_block * K * dkd_sq + g * E
        dvd_ptr += b * dvd_sb + first_block * K * dvd_sq + g * E
        dk = _dot(tl.trans(ds_d), q) * scale
        dv = _dot(tl.trans(p_d.to(do.dtype)), do)
        tl.store(dkd_ptr + (c * dkd_sq)[:, None] + e, dk.to(dkd_ptr.dtype.element_ty), c_ok[:, None])
        tl.store(dvd_ptr + (c * dvd_sq)[:, None] + e, dv.to(dvd_ptr.dtype.element_ty), c_ok[:, None])

    begin, full_begin, full_end, end = _context_range(low, high, ok, KEYS)
    j = tl.arange(0, KEYS)
    kc_ptr += b * kc_sb + g * E
    vc_ptr += b * vc_sb + g * E
    kc = kc_ptr + (j * kc_ss)[:, None] + e
    vc = vc_ptr + (j * vc_ss)[:, None] + e
    for key_0 in range(full_begin, full_end, KEYS):
        key = tl.load(kc + key_0 * kc_ss)
        v = tl.load(vc + key_0 * vc_ss)
        p = tl.exp2(_dot(q, tl.trans(key)) * scale2 - lse[:, None])
        ds = p * (_dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision="ieee")
    edge = full_begin - begin
    for i in range(0, edge + end - full_end, KEYS):
        key_0 = begin + i + (i >= edge) * (full_end - full_begin)
        here = (key_0 + j < end)[:, None]
        key = tl.load(kc + key_0 * kc_ss, here, 0.0)
        v = tl.load(vc + key_0 * vc_ss, here, 0.0)
        sees = (key_0 + j[None, :] < high[:, None]) & (key_0 + j[None, :] >= low[:, None])
        p = tl.where(sees, tl.exp2(_dot(q, tl.trans(key)) * scale2 - lse[:, None]), 0.0)
        ds = p * (_dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision="ieee")

    dq_ptr += b * dq_sb + first * dq_sq + g * R * E
    dq_at = dq_ptr + (r // R * dq_sq + r % R * E)[:, None] + e
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), ok[:, None])


@triton.jit(do_not_specialize=_SIZES)
def draft_kernel(
    q_ptr, kd_ptr, vd_ptr, do_ptr, lse_ptr, delta_ptr, dkd_ptr, dvd_ptr,
    q_sb, kd_sb, vd_sb, do_sb, dkd_sb, dvd_sb,
    q_sq: tl.constexpr, kd_sq: tl.constexpr, vd_sq: tl.constexpr,
    do_sq: tl.constexpr, dkd_sq: tl.constexpr, dvd_sq: tl.constexpr,
    N, scale,
    G: tl.constexpr, R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, POSITIONS: tl.constexpr, DRAFT: tl.constexpr,
):  # fmt: skip
    """Draft dK and dV of one block whose rows fill more than one tile of dq_kernel. Grid (B * G, N). Reads delta."""
    g, b, n = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64), tl.program_id(1)
    scale2 = scale * _LOG2E
    r = tl.arange(0, ROWS)
    e = tl.arange(0, E)[None, :]
    c = tl.arange(0, DRAFT)
    kd_ptr += b * kd_sb + n * K * kd_sq + g * E
    vd_ptr += b * vd_sb + n * K * vd_sq + g * E
    key = tl.load(kd_ptr + (c * kd_sq)[:, None] + e, (c < K)[:, None], 0.0)
    v = tl.load(vd_ptr + (c * vd_sq)[:, None] + e, (c < K)[:, None], 0.0)
    dk = tl.zeros([DRAFT, E], tl.float32)
    dv = tl.zeros([DRAFT, E], tl.float32)
    q_ptr += b * q_sb + n * K * q_sq + g * R * E
    do_ptr += b * do_sb + n * K * do_sq + g * R * E
    for part in range(PARTS):
        k = part * POSITIONS + r // R
        ok = (r // R < POSITIONS) & (k < K)
        q = tl.load(q_ptr + (k * q_sq + r % R * E)[:, None] + e, ok[:, None], 0.0)
        do = tl.load(do_ptr + (k * do_sq + r % R * E)[:, None] + e, ok[:, None], 0.0)
        statistics = (b * G + g) * N * K * R + (n * K + part * POSITIONS) * R
        lse = tl.load(lse_ptr + statistics + r, ok, float("inf"))
        delta = tl.load(delta_ptr + statistics + r, ok, 0.0)
        own = (c < K)[None, :] & ok[:, None]
        if CAUSAL:
            own = own & (c[None, :] <= k[:, None])
        p = tl.where(own, tl.exp2(_dot(q, tl.trans(key)) * scale2 - lse[:, None]), 0.0)
        ds = p * (_dot(do, tl.trans(v)) - delta[:, None])
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")
    dkd_ptr += b * dkd_sb + n * K * dkd_sq + g * E
    dvd_ptr += b * dvd_sb + n * K * dvd_sq + g * E
    tl.store(dkd_ptr + (c * dkd_sq)[:, None] + e, (dk * scale).to(dkd_ptr.dtype.element_ty), (c < K)[:, None])
    tl.store(dvd_ptr + (c * dvd_sq)[:, None] + e, dv.to(dvd_ptr.dtype.element_ty), (c < K)[:, None])


@triton.jit
def _block_range(
    key_0, anchors_ptr, keeps_ptr, starts_ptr, N, S, window, K: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr
):
    """(n0, n1, full0, full1, reach): blocks [n0, n1) hold all that see any of the keys [key_0, key_0 + KEYS), those
    of [full0, full1) see all of them, and no block of the row sees a key at or past reach.

    Needs no order of the anchors to be right, only to be fast: where the blocks that see all are not side by side,
    which never happens to sorted anchors with unused blocks last, the second range is empty.
    """
    n0, n1, full0, full1, count, reach = N, 0, N, 0, 0, 0
    for chunk in range(0, N, CHUNK):
        n = chunk + tl.arange(0, CHUNK)
        ok = n < N
        low, high = _visible(n, 0, ok, anchors_ptr, keeps_ptr, starts_ptr, S, window)
        some = (low < key_0 + KEYS) & (high > key_0)
        n0 = tl.minimum(n0, tl.min(tl.where(some, n, _FAR), 0))
        n1 = tl.maximum(n1, tl.max(tl.where(some, n + 1, 0), 0))
        reach = tl.maximum(reach, tl.max(high, 0))
        low, high = _visible(n, K - 1, ok, anchors_ptr, keeps_ptr, starts_ptr, S, window)
        full = (low <= key_0) & (high >= key_0 + KEYS)
        full0 = tl.minimum(full0, tl.min(tl.where(full, n, _FAR), 0))
        full1 = tl.maximum(full1, tl.max(tl.where(full, n + 1, 0), 0))
        count += tl.sum(full.to(tl.int32), 0)
    return n0, n1, full0, tl.where(full1 - full0 == count, full1, full0), reach


@triton.jit
def _load_rows(
    q_ptr, do_ptr, lse_ptr, delta_ptr, q_at, do_at, first, Q,
    q_sq: tl.constexpr, do_sq: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """q, do, lse and delta of the rows from draft position `first` on. EVEN: no row of any tile lies past the last."""
    r = tl.arange(0, ROWS)
    q_at = q_ptr + first * q_sq + q_at
    do_at = do_ptr + first * do_sq + do_at
    if EVEN:
        return tl.load(q_at), tl.load(do_at), tl.load(lse_ptr + first * R + r), tl.load(delta_ptr + first * R + r)
    ok = (r < ROWS // R * R) & (first + r // R < Q)
    q = tl.load(q_at, ok[:, None], 0.0)
    do = tl.load(do_at, ok[:, None], 0.0)
    return q, do, tl.load(lse_ptr + first * R + r, ok, float("inf")), tl.load(delta_ptr + first * R + r, ok, 0.0)


@triton.jit
def _load_edges(
    low_ptr, high_ptr, key_0, first, Q, R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EVEN: tl.constexpr
):
    """What each row sees of the keys [key_0, key_0 + KEYS): from (edge & 0xFFFF) to (edge >> 16), counted from key_0.

    Packed because two integers a row, held across the products, would not fit into the registers.
    """
    r = tl.arange(0, ROWS)
    if EVEN:
        low = tl.load(low_ptr + first * R + r)
        high = tl.load(high_ptr + first * R + r)
    else:
        ok = (r < ROWS // R * R) & (first + r // R < Q)
        low = tl.load(low_ptr + first * R + r, ok, 0)
        high = tl.load(high_ptr + first * R + r, ok, 0)
    low = tl.minimum(tl.maximum(low - key_0, 0), KEYS)
    return low | (tl.minimum(tl.maximum(high - key_0, 0), KEYS) << 16)


@triton.jit(do_not_specialize=_SIZES)
def dkv_kernel(
    q_ptr, kc_ptr, vc_ptr, do_ptr, lse_ptr, delta_ptr, low_ptr, high_ptr, dk_ptr, dv_ptr,
    anchors_ptr, keeps_ptr, starts_ptr,
    q_sb, kc_sb, vc_sb, do_sb, dk_sb, dv_sb,
    q_sq: tl.constexpr, kc_ss: tl.constexpr, vc_ss: tl.constexpr,
    do_sq: tl.constexpr, dk_ss: tl.constexpr, dv_ss: tl.constexpr,
    split_stride,
    N, S, window, scale,
    G: tl.constexpr, R: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Context dK and dV of one tile of keys, summed over a part of the query range that sees it.

    Grid (B * G, splits, tiles); the first keys, which nearly all queries see, come first. Products are transposed
    (keys x rows), so that probabilities go from registers straight into the sums. Tiles of rows disregard blocks.
    """
    g, b = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64)
    split, splits, key_0 = tl.program_id(1), tl.num_programs(1), tl.program_id(2) * KEYS
    POSITIONS: tl.constexpr = ROWS // R
    scale2 = scale * _LOG2E
    anchors_ptr += b * N
    keeps_ptr += b * N
    starts_ptr += b * N
    e = tl.arange(0, E)[None, :]
    j = key_0 + tl.arange(0, KEYS)
    here = (j < S)[:, None]
    key = tl.load(kc_ptr + b * kc_sb + g * E + (j * kc_ss)[:, None] + e, here, 0.0)
    n0, n1, full0, full1, reach = _block_range(key_0, anchors_ptr, keeps_ptr, starts_ptr, N, S, window, K, KEYS, CHUNK)
    # What nobody sees may be NaN: as keys it is masked below, as values it would meet probabilities of 0 in 0 * NaN.
    v = tl.load(vc_ptr + b * vc_sb + g * E + (j * vc_ss)[:, None] + e, (j < reach)[:, None], 0.0)
    dk = tl.zeros([KEYS, E], tl.float32)
    dv = tl.zeros([KEYS, E], tl.float32)

    tile0 = n0 * K // POSITIONS
    tile1 = tl.maximum((n1 * K + POSITIONS - 1) // POSITIONS, tile0)
    share = (tile1 - tile0 + splits - 1) // splits
    tile0 = tl.minimum(tile0 + split * share, tile1)
    tile1 = tl.minimum(tile0 + share, tile1)
    full_0 = tl.minimum(tl.maximum((full0 * K + POSITIONS - 1) // POSITIONS, tile0), tile1)
    # Rows past the last block make a tile of full rows no less full: they read lse = +inf.
    full_1 = tl.where(full1 == N, (N * K + POSITIONS - 1) // POSITIONS, full1 * K // POSITIONS)
    full_1 = tl.minimum(tl.maximum(full_1, full_0), tile1)

    r = tl.arange(0, ROWS)
    column = tl.arange(0, KEYS)
    low_ptr += b * N * K * R
    high_ptr += b * N * K * R
    q_ptr += b * q_sb + g * R * E
    do_ptr += b * do_sb + g * R * E
    lse_ptr += (b * G + g) * N * K * R
    delta_ptr += (b * G + g) * N * K * R
    q_at = (r // R * q_sq + r % R * E)[:, None] + e
    do_at = (r // R * do_sq + r % R * E)[:, None] + e
    for tile in range(full_0, full_1):
        q, do, lse, delta = _load_rows(
            q_ptr, do_ptr, lse_ptr, delta_ptr, q_at, do_at, tile * POSITIONS, N * K, q_sq, do_sq, R, ROWS, EVEN
        )
        p = tl.exp2(_dot(key, tl.trans(q)) * scale2 - lse[None, :])
        dp = _dot(v, tl.trans(do))
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    edge = full_0 - tile0
    for i in range(0, edge + tile1 - full_1):
        first = (tile0 + i + (i >= edge) * (full_1 - full_0)) * POSITIONS
        q, do, lse, delta = _load_rows(
            q_ptr, do_ptr, lse_ptr, delta_ptr, q_at, do_at, first, N * K, q_sq, do_sq, R, ROWS, EVEN
        )
        edges = _load_edges(low_ptr, high_ptr, key_0, first, N * K, R, ROWS, KEYS, EVEN)
        p = tl.exp2(_dot(key, tl.trans(q)) * scale2 - lse[None, :])
        sees = (column[:, None] >= (edges & 0xFFFF)[None, :]) & (column[:, None] < (edges >> 16)[None, :])
        p = tl.where(sees, p, 0.0)
        dp = _dot(v, tl.trans(do))
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")

    dk_ptr += split.to(tl.int64) * split_stride + b * dk_sb + g * E
    dv_ptr += split.to(tl.int64) * split_stride + b * dv_sb + g * E
    tl.store(dk_ptr + (j * dk_ss)[:, None] + e, (dk * scale).to(dk_ptr.dtype.element_ty), here)
    tl.store(dv_ptr + (j * dv_ss)[:, None] + e, dv.to(dv_ptr.dtype.element_ty), here)


@triton.jit(do_not_specialize=["S", "splits"])
def sum_splits_kernel(
    partial_ptr, dk_ptr, dv_ptr, dk_sb, dv_sb, dk_ss: tl.constexpr, dv_ss: tl.constexpr, split_stride, S, splits,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the partial context dK and dV, fp32 [2, splits, B, S, G * E], in the order of the splits. Grid (S, B, 2)."""
    s, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < WIDTH
    partial_ptr += tl.program_id(2).to(tl.int64) * splits * split_stride + (b * S + s) * WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(partial_ptr + split * split_stride + i, ok, 0.0)
    if tl.program_id(2) == 0:
        tl.store(dk_ptr + b * dk_sb + s * dk_ss + i, total.to(dk_ptr.dtype.element_ty), ok)
    else:
        tl.store(dv_ptr + b * dv_sb + s * dv_ss + i, total.to(dv_ptr.dtype.element_ty), ok)
