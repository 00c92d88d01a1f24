"""A whole serialized round at one gate and a real engine process."""

from __future__ import annotations

from tests.gate.kit import Engine, Operator, Weights


def test_serialized_round_reaches_the_engine_and_is_proven(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(7)
    before = engine.checksum()
    operator.deliver(weights, 12)
    assert engine.label() == "12"
    assert engine.checksum() != before
    status = operator.status()
    assert status["holds"] == {
        "version": 12,
        "manifestDigest": weights.digest,
        "engineDigest": engine.checksum(),
    }
    assert status["engine"]["paused"] is True
    assert engine.ready() == 503
    load = status["loads"][-1]
    assert (load["state"], load["verified"], load["published"]) == ("Succeeded", True, True)
    operator.ok("Resume", **operator.names(weights, 12))
    assert engine.ready() == 200
    assert operator.status()["engine"]["paused"] is False
