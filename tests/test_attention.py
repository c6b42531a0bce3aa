"""What of Triton's attention needs no kernel: tiles, splits and refusals. The kernels: tests/interpreter, tests/gpu."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.ops import attention_kernels
from engine.ops.attention import _card_tiles, _check, attention
from engine.ops.attention_tiles import Tile, block_layout, splits_for, tiles_for
from engine.ops.card import LARGE_SHARED_MEMORY
from tests.attention_helpers import Case, inputs_of, mask_of

SMALL_SHARED_MEMORY = 99 * 1024
MULTIPROCESSORS = 132


@pytest.mark.parametrize("E", [64, 128, 256])
def test_a_card_with_less_shared_memory_gets_smaller_tiles(E: int) -> None:
    large, small = (tiles_for(E, 2, memory, 128) for memory in (LARGE_SHARED_MEMORY, SMALL_SHARED_MEMORY))
    for kernel in ("forward", "dq", "dkv"):
        big, little = getattr(large, kernel), getattr(small, kernel)
        assert little.rows * little.keys <= big.rows * big.keys
        assert little.stages <= big.stages


def test_the_cards_own_shared_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 16, 8, 128, dtype=torch.bfloat16)
    for memory in (LARGE_SHARED_MEMORY, SMALL_SHARED_MEMORY):
        monkeypatch.setattr("engine.ops.attention.shared_memory_and_processors", lambda device, m=memory: (m, 84))
        assert _card_tiles(q, 128) == tiles_for(128, 2, memory, 128)


@pytest.mark.parametrize(("E", "name"), [(128, "forward"), (256, "dkv")])
def test_the_tightest_small_tiles_compile_within_99_kib(E: int, name: str) -> None:
    """Those that take most of it, for K = 4 and 16. Compiled for a card of compute capability 8.9; none is needed."""
    K, R, G = (4, 1, 8) if name == "forward" else (16, 4, 8)
    tile: Tile = getattr(tiles_for(E, 2, SMALL_SHARED_MEMORY, K * R), name)
    layout = block_layout(tile.rows, R, K)
    sizes = {"G": G, "R": R, "E": E, "K": K, "CAUSAL": False, "ROWS": tile.rows, "KEYS": tile.keys, "CHUNK": 1024}
    sizes |= {"EVEN": True, "BLOCKS": layout.blocks, "PARTS": layout.parts, "POSITIONS": layout.positions}
    sizes |= {"DRAFT": layout.keys}
    kernel = getattr(attention_kernels, f"{name}_kernel")
    constants, types = {}, {}
    for parameter in kernel.params:
        if parameter.is_constexpr:
            # Row strides are the only constants without a name of their own.
            constants[parameter.name] = sizes.get(parameter.name, (R + 2) * G * E)
        types[parameter.name] = _type_of(parameter.name, parameter.is_constexpr)
    divisible = [i for i, p in enumerate(kernel.params) if p.name.endswith("_ptr") or p.name.endswith("_sb")]
    source = ASTSource(kernel, types, constants, {(i,): [["tt.divisibility", 16]] for i in divisible})
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=options)
    assert 0 < compiled.metadata.shared <= SMALL_SHARED_MEMORY


def _type_of(name: str, is_constant: bool) -> str:
    """As attention.py passes it, in bf16."""
    if is_constant:
        return "constexpr"
    if not name.endswith("_ptr"):
        return "fp32" if name == "scale" else "i32"
    kind = name.removesuffix("_ptr")
    if kind in ("lse", "delta"):
        return "*fp32"
    return "*i32" if kind in ("anchors", "keeps", "starts", "low", "high") else "*bf16"


def test_no_operation_uses_an_atomic() -> None:
    """Their order would be the card's, and so would the last bits of every sum."""
    folder = Path(attention_kernels.__file__).parent
    calls = [
        f"{file.name}:{node.lineno}"
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("atomic")
    ]
    assert calls == []


def test_a_head_dim_without_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a head dim among \(16, 32, 64, 128, 256\), found 96"):
        tiles_for(96, 2, LARGE_SHARED_MEMORY, 64)


@pytest.mark.parametrize(
    ("rows", "R", "K", "blocks", "parts", "positions"),
    [
        (128, 4, 16, 2, 1, 32),
        (128, 4, 10, 3, 1, 30),
        (128, 4, 32, 1, 1, 32),
        (64, 4, 32, 1, 2, 16),
        (64, 5, 10, 1, 1, 10),
    ],
)
def test_blocks_lie_whole_in_a_tile_or_fill_several(
    rows: int, R: int, K: int, blocks: int, parts: int, positions: int
) -> None:
    layout = block_layout(rows, R, K)
    assert (layout.blocks, layout.parts, layout.positions) == (blocks, parts, positions)
    assert layout.keys >= layout.blocks * K


def test_a_group_wider_than_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at most 32 heads in a GQA group, found 64"):
        block_layout(32, 64, 16)


@pytest.mark.parametrize(
    ("S", "Q", "R", "splits"), [(512, 8192, 2, 8), (2048, 8192, 4, 2), (4096, 32768, 4, 1)], ids=["W1", "W2", "W3"]
)
def test_the_query_range_is_split_only_where_the_card_would_idle(S: int, Q: int, R: int, splits: int) -> None:
    assert splits_for(S, Q * R // 64, 8, 128, None, MULTIPROCESSORS) == splits


def test_many_rows_need_no_split() -> None:
    assert splits_for(512, 256, 8 * 64, 128, None, MULTIPROCESSORS) == 1


CASE = Case(K=4, N=8, H=4, G=2, S=64)


def checked(changes: dict[str, Any]) -> None:
    """_check on good inputs, but for the changes."""
    names = ("q", "k_context", "v_context", "k_draft", "v_draft")
    inputs, _ = inputs_of(CASE, torch.float32)
    arguments: dict[str, Any] = dict(zip(names, inputs, strict=True))
    _check(**{**arguments, "mask": mask_of(CASE), "window": None, **changes})


def test_the_cpu_is_refused_outside_the_interpreter() -> None:
    with pytest.raises(ValueError, match="expected tensors on a CUDA device, found cpu. Use attention_ref there."):
        attention(*inputs_of(CASE, torch.float32)[0], mask_of(CASE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": torch.zeros(1, 32, 4, 16, dtype=torch.float64)},
            "expected bfloat16, float16 or float32, found torch.float64",
        ),
        ({"q": torch.zeros(1, 32, 3, 16)}, "expected H as a multiple of G = 2, found 3"),
        ({"q": torch.zeros(1, 36, 4, 16)}, r"expected Q = N \* K = 8 \* 4, found 36"),
        ({"window": 0}, "expected a window of at least 1, found 0"),
        ({"q": torch.zeros(1, 4, 32, 16).transpose(1, 2)}, "expected q as .* heads of a row side by side"),
        ({"k_draft": torch.zeros(1, 64, 2, 16)}, r"expected k_draft as \[1, 32, 2, 16\].*found \[1, 64, 2, 16\]"),
        ({"v_context": torch.zeros(1, 64, 2, 16).half()}, "expected v_context as .*float32.* found .*float16"),
        ({"v_context": torch.zeros(64 * 2 * 16 + 1)[1:].view(1, 64, 2, 16)}, "rows aligned to 16 bytes"),
        ({"mask": mask_of(Case(K=4, N=8, H=4, G=2, S=64, B=2))}, r"expected anchor_positions as contiguous \[1, 8\]"),
    ],
)
def test_what_the_kernels_would_read_wrongly_is_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    checked({})
    with pytest.raises(ValueError, match=message):
        checked(changes)
