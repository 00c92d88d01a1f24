"""A real Ray actor as the sender: what it holds is what was published, and what becomes of it when it is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlfleet.sender import InvalidStateDict, LayoutChanged, VersionGoesBackwards, layout
from tests.netns import inside
from tests.ray_kit import free_port, local_ray
from tests.sender.caller import POD_UID, Operator, public, weights
from tests.sender.test_cache import build
from tests.sender.test_tensors import odd_tensors


@pytest.mark.timeout(400)
def test_an_actor_holds_what_was_published_and_begins_anew_when_killed(
    request: pytest.FixtureRequest, tmp_path: Path, key: Ed25519PrivateKey
) -> None:
    if not inside(request, tmp_path, seconds=380):
        return
    import ray

    from e2e.scenarios.kit import wait_until
    from rlfleet.sender import ray as ray_sender

    with local_ray():
        port = free_port()
        keys = {"k1": public(key)}
        sender = ray_sender.start("127.0.0.1", port, pod_uid=POD_UID, public_keys=keys, bucket_bytes=4096)
        assert sender.url == f"http://127.0.0.1:{port}"
        first = sender.incarnation
        operator = Operator(sender.url, key, first)
        state = weights(1) | odd_tensors(1)
        digest = sender.publish(1, state)
        assert digest == build(state).digest
        status = operator.status()
        assert status.cache is not None
        assert (status.incarnation, status.cache.version, status.cache.manifest_digest) == (first, 1, digest)

        # Refused here, or there: the same errors as from a sender in this process.
        with pytest.raises(InvalidStateDict, match="is empty"):
            sender.publish(2, {})
        with pytest.raises(VersionGoesBackwards):
            sender.publish(0, state)
        with pytest.raises(LayoutChanged):
            sender.publish(2, weights(2))
        # A publish that was left in the middle is given up by the next one, and nothing of it is seen.
        entries = layout.check(state)
        options = {"timeout": None, "allow_rollback": False, "allow_layout_change": False}
        names = ray.get(sender.actor.begin.remote(5, entries, options))
        assert len(names) > 2
        ray.get(sender.actor.add.remote({name: ray_sender._bytes(state[name]) for name in names[0]}))
        now = operator.status().cache
        assert now is not None
        assert (now.version, now.manifest_digest) == (1, digest)
        second = weights(3) | odd_tensors(3)
        assert sender.publish(3, second) == build(second).digest

        ray.kill(sender.actor, no_restart=False)
        # The process ends in its own time.
        again = wait_until(lambda: found if (found := sender.incarnation) != first else None, "another process")
        fresh = Operator(sender.url, key, again)
        assert fresh.status().cache is None
        assert sender.publish(3, second) == build(second).digest
        assert fresh.status().incarnation == again
        for caller in (operator, fresh):
            caller.http.close()
        sender.close()
