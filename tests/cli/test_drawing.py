"""What people see, drawn from objects of a real run: complete, in 80 columns, without colour, and for programs."""

from __future__ import annotations

import json
from io import StringIO

import pytest
import yaml
from rich.console import Console, RenderableType

from rlfleet.cli import output, tables
from rlfleet.cli.output import Format
from rlfleet.show import rounds as round_view
from rlfleet.show.fleet import Pipeline, fleet
from rlfleet.show.topology import topology
from tests.cli.fleets import NOW_MS, Objects, large, recorded


def drawn(what: RenderableType, width: int = 80) -> str:
    stream = StringIO()
    Console(file=stream, width=width, no_color=True, highlight=False, markup=False, emoji=False).print(what)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def tree(objects: Objects) -> tuple[Pipeline, ...]:
    return fleet(objects["rlpipelines"], objects["enginepools"], objects["syncrounds"])


@pytest.mark.parametrize("name", ["empty", "base", "staging", "failed", "asleep"])
def test_everything_fits_into_80_columns_and_names_every_engine(name: str) -> None:
    objects = recorded(name)
    text = drawn(tables.status_tree(tree(objects), wide=False))
    assert all(len(line) <= 80 for line in text.splitlines())
    for pool in objects["enginepools"]:
        for engine in pool["status"].get("engines") or []:
            assert engine["name"] in text
    rounds = round_view.rounds(objects["syncrounds"])
    listed = drawn(tables.rounds_table(rounds, NOW_MS, wide=False))
    assert all(len(line) <= 80 for line in listed.splitlines())
    assert all(r.name in listed for r in rounds)


def test_a_failed_round_is_seen_at_the_pipeline_with_its_reason_lag_and_the_silent_engine() -> None:
    objects = recorded("failed")
    text = " ".join(drawn(tables.status_tree(tree(objects), wide=False)).split())
    assert "Readiness unknown (GatesUnreachable)" in text
    assert "committed v1, 1 behind sender v2, engines 3/4, CPUSerialize" in text
    assert (
        "! StagingDeadline: round p-v2-4afbc6dae8 failed in Staging: 4 of 4 gates did not receive the weights" in text
    )
    assert "! e-0-35c8a: GatesUnreachable: the gate does not answer; last known state" in text
    assert "e-0-35c8a Active v1 behind - Serialized" in text
    assert "e-1-eed33 Active v1 current - Serialized" in text


def test_what_owns_the_engines_now_is_named() -> None:
    text = drawn(tables.status_tree(tree(recorded("staging")), wide=False))
    assert "now: Refresh p-v2-4afbc6dae8; fence 1796010965000" in text


def test_an_engine_that_is_put_to_sleep_is_seen_draining_with_the_condition_that_says_why_not() -> None:
    text = " ".join(drawn(tables.status_tree(tree(recorded("asleep")), wide=False)).split())
    assert "f-1-a74eb Draining" in text
    assert "can not release their memory" in text


def test_wide_shows_fence_node_and_pod_uid() -> None:
    engine = recorded("failed")["enginepools"][0]["status"]["engines"][0]
    text = drawn(tables.status_tree(tree(recorded("failed")), wide=True), 200)
    for word in (engine["node"], engine["podUID"], str(engine["fence"])):
        assert word in text


def test_a_large_pool_lists_exceptions_and_says_how_many_it_leaves_out() -> None:
    text = drawn(tables.status_tree(tree(large(200)), wide=False))
    assert "199 more" in text
    assert "e-0-35c8a" in text
    assert len(text.splitlines()) < 30


def test_a_pool_without_its_pipeline_is_shown_and_says_so() -> None:
    objects = recorded("base")
    found = fleet([], objects["enginepools"], objects["syncrounds"])
    text = " ".join(drawn(tables.status_tree(found, wide=False)).split())
    assert "Not ready (PipelineNotFound)" in text
    assert "names RLPipeline p, which does not exist: create it" in text
    assert "e-0-35c8a" in text


def test_a_pipeline_that_no_operator_has_seen_says_so() -> None:
    objects = recorded("base")
    objects["rlpipelines"][0].pop("status")
    text = " ".join(drawn(tables.status_tree(tree(objects), wide=False)).split())
    assert "no operator has looked at it yet" in text


def test_nothing_at_all_says_where_to_look() -> None:
    assert "-A" in drawn(tables.status_tree((), wide=False))
    assert "rlfleet sync" in drawn(tables.rounds_table((), NOW_MS, wide=False))


def test_the_tree_is_drawn_without_line_art_where_the_encoding_has_none() -> None:
    assert drawn(tables.status_tree(tree(recorded("failed")), wide=False, ascii_only=True)).isascii()


def test_rounds_show_outcome_paused_share_and_a_bar_of_every_part_that_took_place() -> None:
    text = drawn(tables.rounds_table(round_view.rounds(recorded("failed")["syncrounds"]), NOW_MS, wide=False))
    good = next(line for line in text.splitlines() if line.startswith("p-v1-0028ca96bc"))
    assert good.split()[:5] == ["p-v1-0028ca96bc", "Succeeded", "4", "1.5s", "52%"]
    assert "".join(dict.fromkeys(good.split()[5])) == "psqtvur"
    bad = next(line for line in text.splitlines() if line.startswith("p-v2-4afbc6dae8"))
    assert bad.split()[1:5] == ["Failed", "4", "9.3s", "-"]
    assert "! p-v2-4afbc6dae8: Staging: StagingDeadline: 4 of 4 gates" in text


def test_rounds_are_newest_first_of_one_pipeline_and_not_more_than_asked() -> None:
    objects = recorded("failed")["syncrounds"]
    names = [r.name for r in round_view.rounds(objects)]
    assert names == ["p-v2-4afbc6dae8", "p-v1-0028ca96bc", "p-vbase-866d829f36"]
    assert [r.name for r in round_view.rounds(objects, limit=1)] == names[:1]
    assert round_view.rounds(objects, pipeline="other") == ()


@pytest.mark.parametrize("width", [7, 16, 40])
def test_a_bar_is_as_wide_as_asked_and_leaves_no_part_out(width: int) -> None:
    parts = {"plan": 1, "stage": 9000, "quiesce": 0, "transfer": 500, "verify": 2, "publish": 2, "reopen": 30}
    bar = round_view.bar(parts, width)
    assert len(bar) == width
    assert "".join(dict.fromkeys(bar)) == "psqtvur"
    assert max(bar, key=bar.count) == "s" or width == 7


def test_a_bar_without_any_time_is_even() -> None:
    assert round_view.bar({"plan": 0, "stage": 0}, 4) == "ppss"
    assert round_view.bar({}, 4) == ""


def test_one_round_shows_members_tries_failure_meaning_and_remedy() -> None:
    obj = next(r for r in recorded("failed")["syncrounds"] if r["metadata"]["name"] == "p-v2-4afbc6dae8")
    found = round_view.round_of(obj)
    page = tables.round_page(found, round_view.members(obj), obj["status"]["attempts"], NOW_MS)
    text = " ".join(drawn(page).split())
    assert "committed no: its version did not take effect" in text
    assert "meaning: stagingSeconds passed before all bytes were delivered" in text
    assert "Raise spec.sync.deadlines.stagingSeconds" in text
    assert f"rlfleet sync p -n {found.namespace} --version 2 --retries 1" in text
    assert "e-0-35c8a Serialized" in text
    assert "Settle Applied 1796010965000" in text


def test_a_failure_after_the_commit_does_not_ask_to_send_the_version_again() -> None:
    obj = next(r for r in recorded("failed")["syncrounds"] if r["metadata"]["name"] == "p-v2-4afbc6dae8")
    obj["status"]["committed"] = True
    assert "do not send it again" in round_view.remedy(round_view.round_of(obj))


def test_members_of_an_ended_round_with_exceptions_only_are_ok_by_default() -> None:
    obj = next(r for r in recorded("failed")["syncrounds"] if r["metadata"]["name"] == "p-v1-0028ca96bc")
    obj["status"]["members"] = [{"engine": "e-0-35c8a", "result": "Lost", "reason": "PodFailed"}]
    obj["status"]["plan"]["silent"] = ["e-9-fffff"]
    results = {m.engine: m.result for m in round_view.members(obj)}
    assert results == {
        "e-0-35c8a": "Lost", "e-1-eed33": "Ok", "f-0-69305": "Ok", "f-1-a74eb": "Ok", "e-9-fffff": "Silent"
    }  # fmt: skip


def test_topology_names_who_holds_a_device_and_that_two_do() -> None:
    objects = recorded("failed")
    row = objects["enginepools"][0]["status"]["engines"][0]
    row["gpus"] = ["GPU-0000", "GPU-0001"]
    objects["rlpipelines"][0]["spec"]["trainer"] = {"gpus": [{"node": row["node"], "devices": ["GPU-0001"]}]}
    objects["rlpipelines"][0]["status"]["grants"] = [
        {
            "cluster": "actor", "granted": False, "reason": "Offloading",
            "devices": [{"node": row["node"], "devices": ["GPU-0001"]}],
        }
    ]  # fmt: skip
    places = {p.device: p for p in topology(objects["rlpipelines"], objects["enginepools"]) if p.device}
    assert [h.kind for h in places["GPU-0000"].holders] == ["engine"]
    assert {h.kind for h in places["GPU-0001"].holders} == {"engine", "trainer", "demand"}
    assert places["GPU-0001"].shared
    assert not places["GPU-0000"].shared
    text = drawn(tables.topology_table(topology(objects["rlpipelines"], objects["enginepools"], ["idle"]), wide=False))
    assert "shared" in text
    assert "actor waits: Offloading" in text
    assert "idle" in text


def test_documents_are_plain_json_in_camel_case(capsys: pytest.CaptureFixture[str]) -> None:
    output.dump({"pipelines": tree(recorded("failed"))}, Format.JSON)
    found = json.loads(capsys.readouterr().out)["pipelines"][0]
    assert (found["name"], found["committed"], found["newest"], found["lag"]) == ("p", 1, 2, 1)
    engine = found["pools"][0]["engines"][0]
    assert engine["podUid"] == "54104041-bc6c-43fa-9464-c9db74065f8b"
    assert engine["fenced"] is False
    output.dump({"pipelines": tree(recorded("failed"))}, Format.YAML)
    assert yaml.safe_load(capsys.readouterr().out)["pipelines"][0] == found


EVIL = "a\x1b]0;taken\x07\x1b[31mred\x9b2J"


@pytest.mark.parametrize("form", [Format.JSON, Format.YAML])
def test_documents_carry_what_a_terminal_would_obey_in_escapes(
    form: Format, capsys: pytest.CaptureFixture[str]
) -> None:
    output.dump({"message": EVIL}, form)
    said = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b"} & set(said)
    assert yaml.safe_load(said) == {"message": EVIL}


def test_text_from_objects_does_not_steer_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = recorded("failed")
    objects["rlpipelines"][0]["status"]["conditions"][-1]["message"] = EVIL
    what = tables.status_tree(tree(objects), wide=False)
    output.show(what)
    assert not {"\x1b", "\x07", "\x9b"} & set(capsys.readouterr().out)
    assert not {"\x1b", "\x07", "\x9b"} & set(output.plain(what))
    # On a terminal there is colour, of ours and nobody else's.
    stream = StringIO()
    Console(file=stream, width=80, force_terminal=True, color_system="standard").print(output.Tamed(what))
    assert "\x1b[1m" in stream.getvalue()
    assert not {"\x07", "\x9b"} & set(stream.getvalue())
    assert "]0;taken" in stream.getvalue()
    assert "\x1b]" not in stream.getvalue()


def test_an_adopted_pool_is_as_large_as_the_pods_that_are_there() -> None:
    objects = recorded("base")
    pool = objects["enginepools"][0]
    pods = pool["status"]["replicas"]
    assert pods > 1
    pool["spec"]["source"] = {"adopt": {"selector": {"matchLabels": {"app": "engine"}}}}
    pool["spec"]["replicas"] = 1
    found = next(p for p in tree(objects)[0].pools if p.name == pool["metadata"]["name"])
    assert (found.replicas, found.wanted) == (pods, pods)
    assert f"{found.name} ({found.counts['active']}/{pods})" in drawn(tables.status_tree(tree(objects), wide=False))


def test_a_round_that_waits_is_named_where_nothing_runs() -> None:
    objects = recorded("failed")
    objects["rlpipelines"][0]["status"].pop("activeOperation", None)
    newest = objects["syncrounds"][0]
    waits = {**newest, "metadata": {**newest["metadata"], "name": "p-v9-waits"}, "status": {}}
    objects["syncrounds"].append(waits)
    text = " ".join(drawn(tables.status_tree(tree(objects), wide=False)).split())
    assert "now: nothing; waiting: p-v9-waits; fence" in text
    page = " ".join(drawn(tables.round_page(round_view.round_of(waits), (), (), NOW_MS)).split())
    assert "committed not yet" in page


def test_a_cancelled_round_asks_nobody_to_mend_anything() -> None:
    obj = next(r for r in recorded("failed")["syncrounds"] if r["metadata"]["name"] == "p-v2-4afbc6dae8")
    obj["status"] |= {"outcome": "Cancelled", "phase": "Cancelled"}
    obj["status"]["failure"] = {"stage": "Pending", "reason": "Cancelled", "message": "cancelled"}
    said = round_view.remedy(round_view.round_of(obj))
    assert said.startswith("Nothing, if that was meant")
    assert "--version 2 --retries 1" in said
