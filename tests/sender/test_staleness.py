"""How stale a sample is, from the token spans that its engine reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlfleet.sender import WeightSender
from tests.sender.caller import Operator


def spans(*versions: Any) -> dict[str, Any]:
    return {"weight_versions": [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(versions)]}


def metrics(sender: WeightSender, operator: Operator) -> str:
    return operator.http.get(sender.url + "/metrics").text


def test_a_sample_is_as_stale_as_its_oldest_token(sender: WeightSender, operator: Operator) -> None:
    assert sender.observe_sample(spans("1")) is None, "nothing is published yet"
    sender.publish(5, {"w": torch.zeros(4)})
    assert sender.observe_sample(spans("5", "3")) == 2
    assert sender.observe_sample({"weight_version": "5"}) == 0
    assert sender.observe_sample(spans("7")) == 0, "after a rollback"
    text = metrics(sender, operator)
    assert "rlfleet_sender_sample_staleness_versions_count 3.0" in text
    assert "rlfleet_sender_sample_staleness_versions_sum 2.0" in text


@pytest.mark.parametrize(
    "meta", [spans("default"), spans("-1", None), {}, {"weight_versions": "x"}, {"weight_version": None}]
)
def test_what_names_no_version_counts_nothing(meta: dict[str, Any], sender: WeightSender, operator: Operator) -> None:
    sender.publish(5, {"w": torch.zeros(4)})
    assert sender.observe_sample(meta) is None
    assert "rlfleet_sender_sample_staleness_versions_count 0.0" in metrics(sender, operator)
