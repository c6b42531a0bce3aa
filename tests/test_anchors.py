import numpy as np
import pytest

from buffers.anchors import eligible_positions, random_order, sample_anchors


def test_a_position_is_eligible_iff_it_and_the_next_are_supervised_in_one_document() -> None:
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 1], dtype=np.uint8)
    assert eligible_positions(mask).tolist() == [0, 3, 4]
    assert eligible_positions(mask, np.array([0, 0, 0, 0, 1, 1, 1, 2])).tolist() == [0, 4]


@pytest.mark.parametrize("length", [1, 2, 33])
def test_eligible_positions_agree_with_the_written_out_rule(length: int) -> None:
    generator = np.random.default_rng(length)
    for _ in range(20):
        mask = generator.integers(0, 2, length, dtype=np.uint8)
        documents = np.sort(generator.integers(0, 4, length))
        expected = [i for i in range(length - 1) if mask[i] and mask[i + 1] and documents[i] == documents[i + 1]]
        assert eligible_positions(mask, documents).tolist() == expected


def test_every_eligible_count_from_none_to_more_than_n_fills_exactly_n_slots() -> None:
    N = 8
    for count in range(N + 4):
        eligible = np.arange(count) * 3 + 1
        positions, keep = sample_anchors(eligible, N, seed=0, epoch=2, sample_id=5)
        kept = min(count, N)
        assert (len(positions), len(keep)) == (N, N)
        assert (str(positions.dtype), str(keep.dtype)) == ("int32", "uint8")
        assert keep.tolist() == [1] * kept + [0] * (N - kept)
        assert (np.diff(positions[:kept]) > 0).all()
        assert set(positions[:kept]) <= set(eligible)
        assert not positions[kept:].any()


def test_sampling_depends_on_seed_epoch_sample_and_piece_and_on_nothing_else() -> None:
    eligible = np.arange(200)

    def drawn(seed: int = 3, epoch: int = 1, sample_id: int = 7, piece: int = 0) -> list[int]:
        return sample_anchors(eligible, 16, seed=seed, epoch=epoch, sample_id=sample_id, piece=piece)[0].tolist()

    first = drawn()
    np.random.seed(9)
    assert drawn() == first
    others = [drawn(seed=4), drawn(epoch=2), drawn(sample_id=8), drawn(piece=1)]
    assert all(other != first for other in others)


def test_fewer_slots_take_the_first_of_the_same_permutation() -> None:
    eligible = np.arange(100)
    few, many = (set(sample_anchors(eligible, N, seed=1, epoch=0, sample_id=0)[0].tolist()) for N in (8, 32))
    assert few < many


def test_the_drawn_anchors_are_these_for_ever() -> None:
    """A resumed run must draw what the interrupted one would have, whatever numpy it finds."""
    assert random_order(8, seed=42, stream=0, counter=(1, 2, 3)).tolist() == [6, 5, 3, 0, 7, 1, 4, 2]
    positions, _ = sample_anchors(np.arange(64), 8, seed=42, epoch=1, sample_id=2)
    assert positions.tolist() == [1, 2, 9, 27, 29, 34, 37, 50]


def test_every_position_is_drawn_about_equally_often() -> None:
    counts = np.zeros(40)
    for sample_id in range(2000):
        counts[sample_anchors(np.arange(40), 8, seed=0, epoch=0, sample_id=sample_id)[0]] += 1
    # Binomial(2000, 0.2): mean 400, standard deviation 18.
    assert abs(counts - 400).max() < 5 * 18


def test_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a seed and counters of at least 0, found seed -1"):
        sample_anchors(np.arange(4), 8, seed=-1, epoch=0, sample_id=0)
