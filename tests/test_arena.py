import pytest
import torch

from buffers.arena import Arena, BufferSpec, arena_table, packed_size

SPECS = (
    BufferSpec("hidden", (3, 5, 7), torch.bfloat16),
    BufferSpec("ids", (3, 5), torch.int32),
    BufferSpec("mask", (3,), torch.uint8),
    BufferSpec("step", (), torch.float32),
)


def test_packed_size_starts_every_buffer_at_a_multiple_of_256_bytes() -> None:
    assert [spec.nbytes for spec in SPECS] == [210, 60, 3, 4]
    assert packed_size(SPECS) == 4 * 256
    assert packed_size([BufferSpec("x", (65,), torch.float32)]) == 512
    assert packed_size([]) == 0


@pytest.mark.parametrize("base", [0, 512])
def test_views_are_aligned_disjoint_and_have_their_shapes(base: int) -> None:
    arena = Arena("test", base + packed_size(SPECS), "cpu")
    views = arena.views(SPECS, base)
    assert list(views) == [spec.name for spec in SPECS]
    for index, (spec, view) in enumerate(zip(SPECS, views.values(), strict=True)):
        assert (tuple(view.shape), view.dtype, view.is_contiguous()) == (spec.shape, spec.dtype, True)
        assert view.data_ptr() % 256 == 0
        view.fill_(index + 1)
    for index, view in enumerate(views.values()):
        assert (view == index + 1).all()


def test_views_alias_the_arena_and_keep_their_addresses() -> None:
    arena = Arena("test", packed_size(SPECS), "cpu", poison=True)
    first, second = arena.views(SPECS), arena.views(SPECS)
    first["ids"][1, 2] = 17
    assert second["ids"][1, 2] == 17
    assert [view.data_ptr() for view in first.values()] == [view.data_ptr() for view in second.values()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_poison_is_nan_in_every_float_type(dtype: torch.dtype) -> None:
    view = Arena("test", 256, "cpu", poison=True).views([BufferSpec("x", (16,), dtype)])["x"]
    assert torch.isnan(view).all()


def test_the_table_names_every_buffer_with_its_address() -> None:
    views = Arena("inputs", packed_size(SPECS), "cpu").views(SPECS)
    rows = arena_table([("inputs", views), ("again", {"ids": views["ids"]})])
    assert [(row.arena, row.name, row.shape, row.dtype) for row in rows] == [
        ("inputs", "hidden", "3x5x7", "bfloat16"),
        ("inputs", "ids", "3x5", "int32"),
        ("inputs", "mask", "3", "uint8"),
        ("inputs", "step", "scalar", "float32"),
        ("again", "ids", "3x5", "int32"),
    ]
    assert rows[0].mib == 210 / 2**20
    assert [int(row.address, 16) for row in rows[:4]] == [view.data_ptr() for view in views.values()]


def test_specs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected arena 'small' to hold 1024 bytes, found 512"):
        Arena("small", 512, "cpu").views(SPECS)


def test_names_that_are_not_unique_are_refused() -> None:
    with pytest.raises(ValueError, match="expected buffer names to differ, found 'mask' twice"):
        Arena("test", 2048, "cpu").views([*SPECS, SPECS[2]])


def test_a_base_that_would_break_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="expected base to be a multiple of 256, found 8"):
        Arena("test", 2048, "cpu").views(SPECS, 8)


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a positive size for arena 'empty', found 0"):
        Arena("empty", 0, "cpu")


def test_pinned_memory_is_host_memory() -> None:
    with pytest.raises(ValueError, match="expected device cpu for the pinned arena 'slot', found cuda"):
        Arena("slot", 256, "cuda", pinned=True)
