"""What the first epoch of a batch plan holds, bucket by bucket."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from buffers.batching import BatchPlan
from buffers.planner import Plan
from buffers.shapes import Bucket


def count_first_epoch(
    plan: BatchPlan, eligible_counts: NDArray[np.int64], cost: Callable[[Bucket], float], too_long_count: int
) -> Plan:
    """The plan with the counts of its first epoch; eligible_counts int64[n] are the samples' places for an anchor. Buckets
    without a row in it are kept, other epochs may need them."""
    index = {bucket: place for place, bucket in enumerate(plan.buckets)}
    counts = np.zeros((4, len(index)), dtype=np.int64)
    for batch in plan.epoch(0):
        documents = batch.documents
        if plan.packed:
            blocks = sum(document.max_blocks for document in documents)
        else:
            places = (min(d.stop - d.start - 1, int(eligible_counts[d.sample_id])) for d in documents)
            blocks = sum(min(batch.bucket.N, count) for count in places)
        counts[:, index[batch.bucket]] += (len(documents), 1, batch.useful_tokens, blocks)
    samples, batches, useful, used = (tuple(row.tolist()) for row in counts)
    costs = tuple(cost(bucket) * count for bucket, count in zip(plan.buckets, batches, strict=True))
    return Plan(plan.buckets, sum(costs), costs, samples, batches, useful, used, too_long_count)
