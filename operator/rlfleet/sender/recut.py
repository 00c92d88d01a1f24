"""Smaller buckets out of the ones that are held, without a copy.

Any run of whole tensors of a bucket's data region is a data region too. What the tensors are, and with it the digest,
does not depend on the cut.

Invariant: no bucket is larger than was asked for, but one that holds a single tensor.
"""

from __future__ import annotations

from dataclasses import replace

from rlfleet.api import manifest as mf
from rlfleet.api import wire
from rlfleet.sender.cache import Weights
from rlfleet.sender.errors import Refused


def recut(weights: Weights, bucket_bytes: int | None) -> Weights:
    """The same weights in buckets of at most ``bucket_bytes`` (None: as they are). They share their memory.

    Refused TooLarge when that would make more buckets than a manifest can have.
    """
    if bucket_bytes is None or all(size <= bucket_bytes for size in weights.manifest.bucket_bytes):
        return weights
    known = weights.cuts.get(bucket_bytes)
    if known is not None:
        return known
    entries: list[mf.TensorEntry] = []
    pieces: list[tuple[int, int, int]] = []  # bucket, begin, end
    for t in weights.manifest.tensors:
        fits = pieces and pieces[-1][0] == t.bucket and t.offset + t.nbytes - pieces[-1][1] <= bucket_bytes
        # Tensors without bytes stay in the bucket that is open; the first of all opens one.
        if pieces and pieces[-1][0] == t.bucket and (fits or not t.nbytes or pieces[-1][1] == pieces[-1][2]):
            bucket, begin, _ = pieces[-1]
            pieces[-1] = (bucket, begin, t.offset + t.nbytes)
        else:
            pieces.append((t.bucket, t.offset, t.offset + t.nbytes))
        entries.append(t.model_copy(update={"bucket": len(pieces) - 1, "offset": t.offset - pieces[-1][1]}))
    if len(pieces) > mf.MAX_BUCKETS:
        raise Refused(
            wire.ErrorReason.TOO_LARGE,
            f"spec.transport.bucketMiB would make {len(pieces)} buckets, {mf.MAX_BUCKETS} are possible: raise it",
        )
    made = replace(
        weights,
        manifest=mf.Manifest(
            hash_algorithm=weights.manifest.hash_algorithm,
            tensors=tuple(entries),
            bucket_bytes=tuple(end - begin for _, begin, end in pieces),
            digest=weights.manifest.digest,
        ),
        buckets=tuple(weights.buckets[bucket][begin:end] for bucket, begin, end in pieces),
        cuts={},
    )
    weights.cuts[bucket_bytes] = made
    return made
