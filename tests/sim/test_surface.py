"""The control surface answers as SGLang's does: status codes, required bodies, keys, quirks callers must survive."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from e2e.sim.model import MODELS, initial_state, save_config
from e2e.sim.tensors import write_safetensors

CONFIG = MODELS["tiny"]


@pytest.fixture
def engine(start_engine: Any) -> Any:
    return start_engine("numpy")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/ready", None, 200),
        ("GET", "/health", None, 200),
        ("GET", "/health_generate", None, 200),
        ("GET", "/model_info", None, 200),
        ("GET", "/get_model_info", None, 200),
        ("GET", "/server_info", None, 200),
        ("GET", "/get_server_info", None, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/loads", None, 200),
        ("GET", "/metrics", None, 404),  # only with --enable-metrics
        ("GET", "/no_such_path", None, 404),
        ("POST", "/pause_generation", None, 400),  # a body is required although all has defaults
        ("POST", "/pause_generation", {"mode": "sideways"}, 400),
        ("POST", "/pause_generation", {}, 200),
        ("POST", "/continue_generation", None, 400),
        ("POST", "/continue_generation", {}, 200),  # also when not paused
        ("POST", "/abort_request", {}, 200),
        ("POST", "/abort_request", {"rid": "nobody"}, 200),
        ("POST", "/flush_cache", None, 200),
        ("GET", "/flush_cache", None, 200),
        ("POST", "/begin_weight_update", {}, 200),
        ("POST", "/end_weight_update", {}, 400),  # without a session
        ("POST", "/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, 400),
        ("POST", "/update_weights_from_distributed", {"names": []}, 400),
        ("POST", "/init_weights_update_group", {"master_port": 1}, 400),
        ("POST", "/destroy_weights_update_group", {"group_name": "none"}, 400),
        ("POST", "/update_weights_from_disk", {"model_path": "/no/such/path"}, 400),
        ("POST", "/update_weight_version", {}, 400),
        ("POST", "/update_weight_version", {"new_version": 3}, 400),
        ("POST", "/update_weight_version", {"new_version": "3"}, 200),
        ("POST", "/weights_checker", {}, 200),
        ("POST", "/weights_checker", {"action": "guess"}, 400),
        ("POST", "/weights_checker", {"action": "compare"}, 400),  # without a snapshot
        ("POST", "/get_weights_by_name", {"name": "lm_head.weight"}, 200),
        ("POST", "/get_weights_by_name", {"name": "nothing"}, 400),
        ("GET", "/get_weights_by_name", None, 400),  # the body is needed even for GET
        ("POST", "/release_memory_occupation", {}, 200),
        ("POST", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "unknown": None}, 200),
        ("POST", "/generate", {"text": "hello"}, 400),
        ("POST", "/generate", {"input_ids": []}, 400),
        ("POST", "/generate", {"input_ids": [CONFIG.vocab_size]}, 400),
        ("POST", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 10_000}}, 400),
        ("POST", "/generate", {"input_ids": [1], "sampling_params": {"temperature": -1}}, 400),
        ("POST", "/generate", {"input_ids": "1 2 3"}, 400),
        ("POST", "/generate", {"input_ids": [1], "stream": True}, 400),
    ],
)
def test_status_codes(shared_engine: Any, method: str, path: str, body: Any, status: int) -> None:
    answer = shared_engine.http.request(method, path, **({} if body is None else {"json": body}))
    assert answer.status_code == status, answer.text


def test_refusals_are_error_objects_and_json_is_checked(shared_engine: Any) -> None:
    for answer in (
        shared_engine.http.post("/pause_generation"),
        shared_engine.http.post("/pause_generation", content=b"{not json"),
        shared_engine.http.post("/pause_generation", content=b"[]"),
    ):
        assert answer.status_code == 400
        assert answer.json()["object"] == "error"
        assert answer.json()["code"] == 400


def test_an_http2_preface_is_survived(shared_engine: Any) -> None:
    with socket.create_connection((shared_engine.host, shared_engine.port), timeout=10) as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert b"400" in raw.recv(1000)
    assert shared_engine.http.get("/ready").status_code == 200
    assert "Traceback" not in shared_engine.log()


def test_generate_carries_logprobs_and_spans(engine: Any) -> None:
    answer = engine.generate([1, 2, 3], 5, temperature=0)
    meta = answer["meta_info"]
    assert [t for _, t, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]
    assert meta["num_retractions"] == 0
    first = answer["output_ids"][0]
    stopped = engine.generate([1, 2, 3], 5, temperature=0, stop_token_ids=[first])
    assert stopped["output_ids"] == [first]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}


def test_seed_and_top_p_decide_the_sample(shared_engine: Any) -> None:
    def sample(**more: Any) -> list[int]:
        ids: list[int] = shared_engine.generate([4, 5], 24, **more)["output_ids"]
        return ids

    assert sample(sampling_seed=7) == sample(sampling_seed=7) != sample(sampling_seed=8)
    assert sample() != sample()
    assert sample(top_p=1e-6) == sample(temperature=0)


def test_metrics_when_enabled(start_engine: Any) -> None:
    engine = start_engine("numpy", "--enable-metrics")
    engine.generate([1], 3)
    assert "sglang:generation_tokens_total 3" in engine.http.get("/metrics").text


ANY = {None, "user", "admin"}


@pytest.mark.parametrize(
    ("keys", "opens"),
    [
        ((), {"/model_info": ANY, "/begin_weight_update": ANY, "/ready": ANY}),
        (("--api-key", "user"), {"/model_info": {"user"}, "/begin_weight_update": {"user"}, "/ready": ANY}),
        (
            ("--api-key", "user", "--admin-api-key", "admin"),
            {
                "/begin_weight_update": {"admin"},
                "/weights_checker": {"admin"},
                "/model_info": {"user"},
                "/v1/loads": {"user"},
                "/generate": {"user"},
                "/health": ANY,
            },
        ),
        (("--admin-api-key", "admin"), {"/begin_weight_update": {"admin"}, "/model_info": ANY}),
    ],
)
def test_user_and_admin_keys_are_split(
    start_engine: Any, keys: tuple[str, ...], opens: dict[str, set[str | None]]
) -> None:
    engine = start_engine("numpy", "--no-health-generation", *keys)
    for path, wanted in opens.items():
        method = "POST" if path in ("/begin_weight_update", "/weights_checker", "/generate") else "GET"
        for key in (None, "user", "admin"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            refused = engine.http.request(method, path, json={}, headers=headers).status_code == 401
            assert refused == (key not in wanted), (path, key)


# ---- disk ------------------------------------------------------------------------------------------------------


def checkpoint(directory: Path, seed: int, **changed: np.ndarray[Any, Any]) -> Path:
    directory.mkdir()
    write_safetensors(directory / "model-00001-of-00001.safetensors", {**initial_state(CONFIG, seed), **changed})
    return directory


def test_disk_load_moves_checksums_and_renames_the_model_but_not_the_label(engine: Any, tmp_path: Path) -> None:
    base = engine.checksum()
    engine.post("/update_weight_version", {"new_version": "4"})
    target = checkpoint(tmp_path / "b", 1)
    assert engine.post("/weights_checker", {"action": "snapshot"}).status_code == 200
    assert engine.post("/weights_checker", {"action": "compare"}).status_code == 200
    answer = engine.post("/update_weights_from_disk", {"model_path": str(target)})
    assert answer.json() == {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    assert engine.post("/weights_checker", {"action": "compare"}).status_code == 400
    assert engine.checksum() != base
    info = engine.http.get("/model_info").json()
    assert (info["weight_version"], info["served_model_name"], info["model_path"]) == ("4", str(target), str(target))
    assert engine.http.get("/server_info").json()["served_model_name"] == "tiny"  # what it was started with
    again = engine.post("/update_weights_from_disk", {"model_path": str(target), "weight_version": "5"})
    assert again.status_code == 200
    assert engine.http.get("/model_info").json()["weight_version"] == "5"
    row = engine.post("/get_weights_by_name", {"name": "model.layers.1.self_attn.k_proj.weight", "truncate_size": 1})
    wanted = initial_state(CONFIG, 1)["model.layers.1.self_attn.k_proj.weight"][:1]
    np.testing.assert_array_equal(np.float32(row.json()), wanted)


def test_checksums_name_fused_parameters_and_follow_the_content_only(start_engine: Any, tmp_path: Path) -> None:
    started = start_engine("numpy", "--seed", "1")
    loaded = start_engine("numpy")
    directory = checkpoint(tmp_path / "one", 1)
    save_config(CONFIG, directory)
    from_checkpoint = start_engine("numpy", "--model", str(directory))
    assert loaded.checksum() != started.checksum()
    loaded.post("/update_weights_from_disk", {"model_path": str(directory)})
    assert loaded.checksum() == started.checksum() == from_checkpoint.checksum()
    rank = started.post("/weights_checker", {"action": "checksum"}).json()["ranks"][0]
    assert "model.layers.0.self_attn.qkv_proj.weight" in rank["checksums"]
    assert rank["per_gpu_checksum"]
    started.post("/weights_checker", {"action": "reset_tensors"})
    assert started.checksum() != loaded.checksum()


def test_failed_disk_loads(engine: Any, tmp_path: Path) -> None:
    base = engine.checksum()
    for bad in ("/no/such/path", str(tmp_path)):
        assert engine.post("/update_weights_from_disk", {"model_path": bad}).status_code == 400
    assert engine.checksum() == base


@pytest.mark.parametrize("how", ["torn", "wrong"])
def test_a_disk_load_that_fails_half_way_ends_the_engine(start_engine: Any, tmp_path: Path, how: str) -> None:
    """It "rolls back" by reading the same files again."""
    engine = start_engine("numpy")
    folder = tmp_path / how
    if how == "torn":
        folder.mkdir()
        (folder / "model.safetensors").write_bytes((10**6).to_bytes(8, "little") + b"{}")
    else:
        checkpoint(folder, 1, **{"lm_head.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(httpx.HTTPError):
        engine.post("/update_weights_from_disk", {"model_path": str(folder)})
    assert engine.process.wait(120) == 1


def test_a_subset_of_tensors_is_a_success(engine: Any, tmp_path: Path) -> None:
    base = engine.checksum()
    write_safetensors(tmp_path / "some.safetensors", {"lm_head.weight": initial_state(CONFIG, 1)["lm_head.weight"]})
    answer = engine.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "2"})
    assert answer.status_code == 200
    assert engine.checksum() != base


def test_bfloat16_files_load_as_the_same_values(engine: Any, tmp_path: Path) -> None:
    # 1.5 in bfloat16 is 0x3FC0
    header = b'{"model.norm.weight":{"dtype":"BF16","shape":[32],"data_offsets":[0,64]}}'
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\xc0\x3f" * 32)
    assert engine.post("/update_weights_from_disk", {"model_path": str(tmp_path)}).status_code == 200
    assert engine.post("/get_weights_by_name", {"name": "model.norm.weight"}).json() == [1.5] * 32


# ---- exits on misuse ---------------------------------------------------------------------------------------------


def test_resuming_memory_that_was_not_released_kills_the_engine(engine: Any) -> None:
    assert engine.post("/release_memory_occupation", {"tags": ["kv_cache"]}).json() is None
    assert engine.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).status_code == 200
    with pytest.raises(Exception, match=r"disconnected|reset"):
        engine.post("/resume_memory_occupation", {"tags": ["weights"]})
    assert engine.process.wait(120) != 0
    assert "KeyError" in engine.log()
