"""The calls that warm a generation's steps up, and what they are good for besides: on a real batch such a call is the eager twin
that the replay is compared with afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from buffers.shapes import Bucket
from engine.generation import GenerationOptions, Inputs

Load = Callable[[], object]


class FirstCalls:
    """Around the first call of each step: content for it before, and after a bucket's last training step, where it had a batch, a
    sum of all bits that it left. twins: these sums, by bucket."""

    def __init__(
        self,
        options: GenerationOptions,
        loads: Mapping[Bucket, Load],
        *,
        forget: Callable[[], object],
        bits: Callable[[Bucket], int],
    ) -> None:
        """loads: puts a batch into the inputs of a bucket; those without one get inputs without content. forget: zeroes
        gradients, the step's weight and metrics. bits: of the bucket's inputs and of all that its steps wrote."""
        self.twins: dict[Bucket, int] = {}
        self._options, self._loads, self._forget, self._bits = options, loads, forget, bits
        self._buckets = {bucket.name: bucket for bucket in options.buckets}

    def before(self, name: str) -> None:
        """The step of that name is about to be called."""
        kind, _, bucket_name = name.partition(" ")
        if kind == "add":
            return  # what train left is what it adds to
        self._forget()
        bucket = self._buckets.get(bucket_name)
        if bucket is None:
            return  # the update, which skips itself without weight
        if kind == "train" and bucket in self._loads:
            self._loads[bucket]()
        else:
            _empty(self._options.inputs if kind == "train" else self._options.eval_inputs, bucket)

    def after(self, name: str) -> None:
        """It was called."""
        kind, _, bucket_name = name.partition(" ")
        bucket = self._buckets.get(bucket_name)
        if bucket is not None and bucket in self._loads and kind == self._options.kinds[-1]:
            self.twins[bucket] = self._bits(bucket)


def _empty(provide: Inputs | None, bucket: Bucket) -> None:
    """Rows of length 0, no block kept: every number finite, every weight 0. Buckets share memory: what another one's batch left
    there would be no token's number."""
    assert provide is not None, "a step has inputs"
    for tensor in provide(bucket).values():
        tensor.zero_()
