import pytest

from buffers.shapes import Bucket, anchors_for, round_up


def test_a_bucket_knows_its_positions_and_its_name() -> None:
    bucket = Bucket(B=4, S=512, N=64, K=16)
    assert (bucket.Q, bucket.tokens, bucket.name) == (1024, 4 * (512 + 1024), "4x512x64")


def test_buckets_of_equal_sizes_are_the_same_key() -> None:
    assert {Bucket(1, 128, 8, 16): "graph"}[Bucket(1, 128, 8, 16)] == "graph"


@pytest.mark.parametrize("name", ["B", "S", "N", "K", "tile"])
@pytest.mark.parametrize("value", [0, -8])
def test_every_size_must_be_positive(name: str, value: int) -> None:
    sizes = {"B": 1, "S": 128, "N": 8, "K": 16, "tile": 128, name: value}
    with pytest.raises(ValueError, match=f"expected a positive {name} in a bucket, found {value}. Set it"):
        Bucket(**sizes)


def test_context_that_is_no_multiple_of_the_tile_is_refused_with_the_next_that_is() -> None:
    with pytest.raises(ValueError, match="attention tile 128, found S = 500. Round it up to 512"):
        Bucket(1, 500, 8, 16)


def test_draft_positions_that_are_no_multiple_of_the_tile_are_refused_with_the_n_that_is() -> None:
    with pytest.raises(ValueError, match=r"attention tile 128, found 9 \* 16 = 144. Raise N to 16"):
        Bucket(1, 512, 9, 16)


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (1, 8), (8, 8), (9, 16)])
def test_round_up(value: int, expected: int) -> None:
    assert round_up(value, 8) == expected


@pytest.mark.parametrize(
    ("most_eligible", "num_anchors", "K", "expected"),
    [(511, 512, 16, 512), (1000, 512, 16, 512), (3, 512, 16, 8), (0, 512, 16, 8), (500, 500, 10, 512), (30, 64, 8, 32)],
)
def test_n_is_what_the_samples_can_use_rounded_up_to_whole_tiles(
    most_eligible: int, num_anchors: int, K: int, expected: int
) -> None:
    blocks = anchors_for(most_eligible, num_anchors, K, 128)
    assert blocks == expected
    assert Bucket(1, 128, blocks, K).Q % 128 == 0


def test_n_of_no_anchors_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a positive num_anchors, found 0"):
        anchors_for(3, 0, 16, 128)
