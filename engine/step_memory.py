"""The memory of one captured step, by arithmetic: every tensor that forward and backward make, in their order, and when it is
let go. No tensor is made here; the sizes are those of engine/model.py, engine/objective.py and engine/ops.

Letters as in buffers/shapes.py, and c bytes a number of the compute dtype; R = B Q draft rows, C = B S context rows, P =
R (K - 1) / K rows that predict, I the MLP's width, F = (H + 2 G) E the width of [q | k | v].

Kept from forward to backward, in numbers:
  context            2 C D                         fc's output and its norm
  a layer, context   4 C G E                       [k | v] before, k and v after norm and RoPE
  a layer, draft     R D                           the stream at the first norm (not in layer 0)
                     2 R F                         [q | k | v] before (layer 0: of B N + 1 rows) and after norm and RoPE
                     R H E, and R H fp32           attention's output and log-sum-exp
                     R D + 2 R I                   the stream at the second norm, [gate | up]; in the last layer P rows
  the end            2 P D                         the stream and its norm
recompute = "mlp" keeps no [gate | up]; "layer" keeps the stream and what is to be added to it, and makes the rest again.
fp8 keeps the matmuls' inputs, and their weights, turned and one byte a number, too.

The step needs most in one of three places: at the head, which has a chunk of logits [head_chunk, V] beside all that is kept
(with soft labels the teacher's too); at the last layer's MLP backward, which has the activation's gradient and two more
streams; or, recomputing, while a layer is formed again. The walk below passes all three, and torch's allocator rounds and
splits what it is asked for (graphs/pool_model.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from graphs.pool_model import Block, Pool

_FP32 = 4
_NORM_PROGRAMS = 528  # of the norm's backward pass, each with a row of partial sums


@dataclass(frozen=True)
class StepShape:
    """What decides a step's memory besides the drafter and the bucket. precision: bf16, fp32 or fp8. grad_bytes: of a number of
    the gradient arena."""

    precision: str = "bf16"
    grad_bytes: int = 2
    recompute: str = "none"
    head_chunk: int = 2048
    attention: str = "triton"
    soft_labels: bool = False

    @property
    def c(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True)
class StepMemory:
    """Bytes. kept: from forward to backward; logits: at the head; most: in use at the worst moment; grown: what the pool has
    to hold more than before."""

    kept: int
    logits: int
    most: int
    grown: int


def walk_step(pool: Pool, config: DrafterConfig, bucket: Bucket, shape: StepShape) -> StepMemory:
    """Runs a training step of this bucket through the pool, which is left with nothing in use."""
    before, pool.most_live = pool.reserved, pool.live
    walk = _Walk(pool, config, bucket, shape)
    walk.forward()
    kept = pool.live
    logits = walk.head()
    walk.backward()
    assert pool.live == 0, "the walk lets go of all that it makes"
    return StepMemory(kept, logits, pool.most_live, pool.reserved - before)


class _Walk:
    """One step. `held` maps what is kept, by (layer, name), to its block."""

    def __init__(self, pool: Pool, config: DrafterConfig, bucket: Bucket, shape: StepShape) -> None:
        self.pool, self.config, self.shape = pool, config, shape
        self.D, self.inter = config.hidden_size, config.intermediate_size
        self.HE, self.GE = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.F = self.HE + 2 * self.GE
        self.B, self.S, self.Q = bucket.B, bucket.S, bucket.Q
        self.R, self.C, self.shared = bucket.B * bucket.Q, bucket.B * bucket.S, bucket.B * bucket.N + 1
        self.P = self.R // bucket.K * (bucket.K - 1)
        self.last = config.num_hidden_layers - 1
        self.held: dict[tuple[int, str], Block] = {}

    # Sizes and names

    def new(self, count: int, itemsize: int | None = None) -> Block:
        return self.pool.new(count * (itemsize or self.shape.c))

    def keep(self, layer: int, name: str, count: int, itemsize: int | None = None) -> None:
        self.held[layer, name] = self.new(count, itemsize)

    def drop(self, layer: int, *names: str) -> None:
        for name in names:
            block = self.held.pop((layer, name), None)
            if block is not None:
                self.pool.free(block)

    def take(self, layer: int, name: str) -> Block:
        return self.held.pop((layer, name))

    def rows(self, layer: int) -> int:
        """Behind a layer's attention: without slot 0 in the last one."""
        return self.P if layer == self.last else self.R

    # Forward

    def forward(self) -> None:
        """engine/model.py: what is in `held` afterwards waits for the backward pass."""
        for name, count in (("context positions", self.C), ("positions", self.R), ("ids", self.R)):
            self.keep(-1, name, count, _FP32)
        self.keep(-1, "fc", self.C * self.D)
        self.keep(-1, "context", self.C * self.D)
        self.keep(-1, "rstd", self.C, _FP32)
        self.keep(-1, "shared", self.shared * self.D)
        stream, delta = self.new(self.R * self.D), None
        recomputes = self.shape.recompute == "layer"
        for i in range(self.last + 1):
            out = self.layer(i)
            if recomputes:
                self.drop_layer(i, but="stream")
                # Its arguments wait for the backward pass instead.
                self.held[i, "in stream"] = stream
                if delta is not None:
                    self.held[i, "in delta"] = delta
                stream, delta = self.take(i, "stream"), out
                continue
            # The caller's names for what went in live as long as the call.
            if i == 0:
                self.pool.free(stream)
            if delta is not None:
                self.pool.free(delta)
            delta = out
        self.keep(-1, "end", self.P * self.D)
        self.keep(-1, "hidden", self.P * self.D)
        self.keep(-1, "end rstd", self.P, _FP32)
        assert delta is not None
        self.pool.free(delta, *([stream] if recomputes else []))

    def layer(self, i: int) -> Block:
        """All of one layer; returns the MLP's output, which the next norm adds to the stream."""
        new, keep, R, D, rows = self.new, self.keep, self.R, self.D, self.rows(i)
        keep(i, "kv", self.C * 2 * self.GE)
        keep(i, "k context", self.C * self.GE)
        keep(i, "v context", self.C * self.GE)
        source = self.shared if i == 0 else R
        if i > 0:
            keep(i, "first", source * D)
        x = new(source * D)
        keep(i, "first rstd", source, _FP32)
        self.keep_fp8(i, "qkv", source, D, self.F)
        keep(i, "qkv", source * self.F)
        self.pool.free(x)
        for name, width in (("q", self.HE), ("k", self.GE), ("v", self.GE)):
            keep(i, name, R * width)
        self.attention_forward(i)
        self.keep_fp8(i, "o", R, self.HE, D)
        delta = new(R * D)
        keep(i, "stream", rows * D)
        x = new(rows * D)
        keep(i, "rstd", rows, _FP32)
        self.mlp_forward(i, rows)
        act = new(rows * self.inter)
        out = new(rows * D)
        self.pool.free(x, act, delta)
        if self.shape.recompute == "mlp":
            self.drop(i, "hidden", "gate_up fp8", "down fp8")
        return out

    def mlp_forward(self, i: int, rows: int) -> None:
        self.keep_fp8(i, "gate_up", rows, self.D, 2 * self.inter)
        self.keep(i, "hidden", rows * 2 * self.inter)
        self.keep_fp8(i, "down", rows, self.inter, self.D)

    def attention_forward(self, i: int) -> None:
        R, heads = self.R, self.config.num_attention_heads
        if self.shape.attention == "flex":
            # [context | draft] side by side, and it is these that are kept.
            for name in ("k joined", "v joined"):
                self.keep(i, name, (self.C + R) * self.GE)
        elif self.shape.attention == "reference":
            # Scores over the whole row: masked, as probabilities in fp32, and those in the compute dtype.
            keys = self.S + self.config.block_size
            for name, size in (("scores", self.shape.c), ("softmax", _FP32), ("p", self.shape.c)):
                self.keep(i, name, R * heads * keys, size)
        self.keep(i, "o", R * self.HE)
        self.keep(i, "lse", R * heads, _FP32)

    def keep_fp8(self, i: int, name: str, rows: int, width: int, out: int) -> None:
        """A matmul's input and weight, one byte a number, where fp8 keeps them; as one block."""
        if self.shape.precision == "fp8":
            self.keep(i, f"{name} fp8", width * (rows + out), 1)

    def drop_layer(self, i: int, but: str = "") -> None:
        self.drop(i, *[name for layer, name in list(self.held) if layer == i and name != but and name[:3] != "in "])

    # The head

    def head(self) -> int:
        """engine/objective.py and engine/ops/frozen_head.py; leaves the gradient of the hidden states. Bytes of the logits."""
        P, V, c = self.P, self.config.vocab_size, self.shape.c
        chunk = min(self.shape.head_chunk, P)
        supervision = [self.new(P, 8), self.new(P, _FP32), self.new(P, _FP32)]
        teacher = []
        if self.shape.soft_labels:
            # The target's norm in fp32, then its rows of logits: all of the context's, or a chunk of the draft's.
            wide = [self.new(self.C * self.D, _FP32) for _ in range(2)]
            normed = self.new(self.C * self.D)
            self.pool.free(*wide)
            teacher = [normed, self.new(P, _FP32)]
        rows = [self.new(P, _FP32), self.new(P, _FP32), self.new(P, 1)]
        self.keep(-1, "dh", P * self.D)
        if not self.shape.soft_labels:
            rows.append(self.new(P, _FP32))
        logits = [self.new(chunk * V)]
        if self.shape.soft_labels:
            whole = self.C <= P
            logits.append(self.new((self.C if whole else chunk) * V))
            if not whole:
                teacher.append(self.new(chunk * self.D))
        self.pool.free(*logits, *teacher)
        correct = self.new(P, 1)
        self.pool.free(*rows, correct, *supervision)
        return c * V * (chunk + ((self.C if self.C <= P else chunk) if self.shape.soft_labels else 0))

    # Backward

    def backward(self) -> None:
        """In the reverse order. dstream is the gradient both of a layer's stream and of what is added to it."""
        dstream: Block | None = self.norm_backward(self.P)
        self.drop(-1, "end", "end rstd")
        dcontext: Block | None = None
        for i in range(self.last, -1, -1):
            if self.shape.recompute == "layer":
                self.pool.free(self.layer(i))
            assert dstream is not None
            dstream = self.mlp_backward(i, dstream)
            self.weight_gradient(self.D, self.HE)
            do = self.new(self.R * self.HE)
            self.drop(i, "o fp8")
            gradients = self.attention_backward(i, do)
            dstream = self.qkv_backward(i, dstream, gradients)
            dcontext = self.context_backward(i, gradients, dcontext)
            self.drop_layer(i)
            self.drop(i, "in stream", "in delta")
        assert dcontext is not None
        dfc = self.norm_backward(self.C)
        self.pool.free(dcontext)
        self.drop(-1, "context", "rstd")
        self.weight_gradient(self.D, self.config.num_taps * self.D)
        self.pool.free(dfc)
        self.drop(-1, *[name for _, name in list(self.held)])

    def norm_backward(self, rows: int) -> Block:
        dx = self.new(rows * self.D)
        self.pool.free(self.new(min(rows, _NORM_PROGRAMS) * self.D, _FP32))
        return dx

    def weight_gradient(self, out: int, width: int) -> None:
        """[out, width] goes straight into an arena of the compute dtype; else, and in fp8, it is formed beside it first."""
        if self.shape.precision == "fp8":
            self.pool.free(self.new(out * width))
        elif self.shape.grad_bytes != self.shape.c:
            self.pool.free(self.new(out * width, self.shape.grad_bytes))

    def mlp_backward(self, i: int, dy: Block) -> Block:
        rows, D, inter = self.rows(i), self.D, self.inter
        x = None
        if self.shape.recompute == "mlp":
            x = self.new(rows * D)
            self.mlp_forward(i, rows)
        fp8 = self.shape.precision == "fp8"
        dy8 = [self.new(rows * D, 1), self.new(rows * D, 1)] if fp8 else []
        dact = self.new(rows * inter)
        self.weight_gradient(D, inter)
        if fp8:
            dhidden8 = [self.new(rows * 2 * inter, 1), self.new(rows * 2 * inter, 1)]
            self.pool.free(dact, *dy8)
            dact, dy8 = dhidden8[0], dhidden8[1:]
            self.weight_gradient(2 * inter, D)
        dx = self.new(rows * D)
        dstream = self.new(self.R * D)
        self.pool.free(self.new(min(self.R, _NORM_PROGRAMS) * D, _FP32))
        if not fp8:
            self.weight_gradient(2 * inter, D)
        self.pool.free(dact, dx, dy, *dy8, *([x] if x is not None else []))
        self.drop(i, "hidden", "stream", "rstd", "gate_up fp8", "down fp8")
        return dstream

    def attention_backward(self, i: int, do: Block) -> dict[str, Block]:
        R, heads = self.R, self.config.num_attention_heads
        sizes = {"q": R * self.HE, "k context": self.C * self.GE, "v context": self.C * self.GE}
        sizes |= {"k": R * self.GE, "v": R * self.GE}
        gradients = {name: self.new(size) for name, size in sizes.items()}
        beside = [self.new(R * heads, _FP32), self.new(2 * R * heads // self.config.num_key_value_heads, _FP32)]
        if self.shape.attention == "flex":
            beside += [self.new((self.C + R) * self.GE) for _ in range(2)]
        elif self.shape.attention == "reference":
            keys = self.S + self.config.block_size
            beside += [self.new(R * heads * keys, size) for size in (self.shape.c, _FP32)]
        self.pool.free(*beside, do)
        self.drop(i, "q", "k", "v", "k context", "v context", "k joined", "v joined", "o", "lse")
        self.drop(i, "scores", "softmax", "p")
        return gradients

    def qkv_backward(self, i: int, dstream: Block, gradients: dict[str, Block]) -> Block | None:
        """RoPE and norms over [q | k | v] itself, then the projection, then the norm in front of it."""
        dqkv = self.new(self.shared * self.F) if i == 0 else None
        self.pool.free(*(gradients.pop(name) for name in ("q", "k", "v")))
        source = self.shared if i == 0 else self.R
        x = self.new(source * self.D)
        result = self.new(self.R * self.D) if i > 0 else None
        self.pool.free(self.new(min(source, _NORM_PROGRAMS) * self.D, _FP32))
        self.weight_gradient(self.F, self.D)
        self.pool.free(x, dstream, *([dqkv] if dqkv is not None else []))
        self.drop(i, "qkv", "first", "first rstd", "qkv fp8")
        return result

    def context_backward(self, i: int, gradients: dict[str, Block], dcontext: Block | None) -> Block:
        """In place over [k | v] too; the layers' gradients of the context are added up."""
        self.pool.free(*gradients.values())
        self.weight_gradient(2 * self.GE, self.D)
        dx = self.new(self.C * self.D)
        if dcontext is not None:
            both = self.new(self.C * self.D)
            self.pool.free(dcontext, dx)
            dx = both
        self.drop(i, "kv")
        return dx
