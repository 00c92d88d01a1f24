"""What was published is what the engine holds, bit for bit: every dtype, shape and memory layout, both transports."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from e2e.sim.model import MODELS
from e2e.sim.model_torch import torch_state
from rlfleet.api import wire
from rlfleet.api.manifest import DTYPES
from rlfleet.sender import InvalidStateDict, WeightSender
from tests.gate import kit
from tests.sender.caller import SECONDS, Operator
from tests.sender.test_broadcast import order
from tests.sender.test_cache import raw, tensor

BUCKET_BYTES = 40_000
#: The ways on which a sender moves weights.
SENT = (wire.Transport.SERIALIZED, wire.Transport.BROADCAST)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "sender.md"


def odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    """One tensor of every dtype, and every odd shape and memory layout; their sizes in bytes have nothing in common."""
    shared = tensor("float32", (7, 3), seed + 1)
    state = {f"dtype.{name}": tensor(name, (3, 5), seed + i) for i, name in enumerate(DTYPES)}
    state |= {f"scalar.{name}": tensor(name, (), seed + i) for i, name in enumerate(DTYPES)}
    state |= {
        "tied.one": shared,
        "tied.two": shared,
        "turned": tensor("bfloat16", (4, 9), seed).t(),
        "every.second": tensor("float16", (21,), seed)[::2],
        "expanded": tensor("int16", (1, 5), seed).expand(3, 5),
        "shifted": tensor("uint8", (13,), seed)[3:],
        "conjugate": tensor("complex64", (2, 3), seed).conj(),
        "negated": tensor("complex64", (2, 3), seed).conj().imag,
        "empty": torch.empty(0, 7, dtype=torch.float64),
        "empty.odd": torch.empty(3, 0, dtype=torch.int8),
        "larger.than.a.bucket": tensor("float8_e4m3fn", (BUCKET_BYTES + 13,), seed),
        "parameter": torch.nn.Parameter(tensor("float32", (3,), seed)),
    }
    return state


ODD = odd_tensors(0)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[kit.Engine, kit.Gate]]:
    """An engine with parameters of every dtype, and its gate."""
    tmp_path = tmp_path_factory.mktemp("odd")
    described = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in ODD.items()}
    (tmp_path / "extra.json").write_text(json.dumps(described))
    arguments = ("--group-timeout", "30", "--extra-tensors", str(tmp_path / "extra.json"))
    engine = kit.Engine(tmp_path, *arguments, backend="torch").up()
    (tmp_path / "gate").mkdir()
    gate = kit.Gate(tmp_path / "gate", engine.url, engine.host).start()
    yield engine, gate
    gate.close()
    engine.close()


@pytest.mark.parametrize(("seed", "transport"), list(enumerate(SENT, start=100)))
def test_bit_equal_at_the_engine(
    seed: int,
    transport: wire.Transport,
    fleet: tuple[kit.Engine, kit.Gate],
    make_sender: Callable[..., WeightSender],
    make_operator: Callable[[WeightSender], Operator],
) -> None:
    engine, gate = fleet
    sender = make_sender(public_keys={kit.KID: kit.public(kit.KEY)}, bucket_bytes=BUCKET_BYTES)
    # Each transport has to bring other bytes than the one before it.
    odd = odd_tensors(1000 * seed)
    manifest = sender.publish(seed, torch_state(MODELS["tiny"], seed) | odd)
    assert len(manifest.bucket_bytes) > 2
    at_gate = kit.Operator(gate, operation=f"round-{seed}", generation=seed).ready()
    at_sender = make_operator(sender)
    at_sender.key = kit.KEY
    at_sender.operation, at_sender.generation = at_gate.operation, at_gate.generation
    assert at_sender.hold(seed, manifest.digest).status_code == 200
    named = {"version": seed, "manifestDigest": manifest.digest}
    at_gate.ok("Prepare", transport=transport.value, totalBytes=manifest.total_bytes, **named)
    target = wire.PushTarget(
        engine="pool-0",
        url=gate.url,
        pod_uid=gate.pod_uid,
        buckets=transport is wire.Transport.SERIALIZED,
        token=at_sender.push_token(gate.pod_uid),
    )
    pushed = at_sender.run(wire.PushOrder(manifest_digest=manifest.digest, targets=(target,), deadline_seconds=SECONDS))
    assert pushed.result["targets"]["pool-0"]["ok"], pushed.result
    at_gate.ok("Pause", mode="Retract")
    if transport is wire.Transport.BROADCAST:
        send = order(manifest, world_size=2)
        started = at_sender.post("/v1/operations", at_sender.request(send))
        at_gate.ok("Load", transport=transport.value, group=send.group.wire(), rankOffset=1, **named)
        sent = at_sender.ended(started.json()["id"])
        assert sent.state is wire.OperationState.SUCCEEDED, sent.error
    else:
        at_gate.ok("Load", transport=transport.value, **named)
    at_gate.ok("Verify", **named)
    for name, published in odd.items():
        answer = engine.http.get("/_sim/tensor", params={"name": name})
        assert answer.status_code == 200, name
        assert answer.content == raw(published.detach().resolve_neg().resolve_conj()), name
    assert at_sender.release().status_code == 200


LAYOUTS = st.dictionaries(
    st.text("abc", min_size=1, max_size=6),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    min_size=1,
    max_size=16,
)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(LAYOUTS, st.integers(1, 200))
def test_every_tensor_lies_where_its_dtype_can_be_addressed(
    layout: dict[str, tuple[str, tuple[int, ...]]], bucket_bytes: int
) -> None:
    from rlfleet.sender.layout import cut

    slices, sizes = cut(layout, bucket_bytes)
    assert {s.name for s in slices} == set(layout)
    assert [s.bucket for s in slices] == sorted(s.bucket for s in slices)
    for s in slices:
        assert s.offset % DTYPES[s.dtype][0] == 0
        assert s.offset + s.nbytes <= sizes[s.bucket]


REFUSED = sorted(
    {
        str(value).removeprefix("torch.")
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and str(value).removeprefix("torch.") not in DTYPES
    }
)
REMEDIES = {
    "complex128": "view_as_real",
    "complex32": "view_as_real",
    "float8_e8m0fnu": r"tensor\.view\(torch\.uint8\)",
    "float4_e2m1fn_x2": r"tensor\.view\(torch\.uint8\)",
    "qint8": r"int_repr\(\)",
    "quint4x2": r"int_repr\(\)",
}


def _of_dtype(name: str) -> torch.Tensor:
    """A tensor of any dtype that torch has, quantized ones included."""
    dtype = getattr(torch, name)
    if name in ("qint8", "quint8", "qint32"):
        return torch.quantize_per_tensor(torch.ones(4), 0.5, 0, dtype)
    if name in ("quint4x2", "quint2x4"):
        return torch.quantize_per_channel(torch.ones(4, 4), torch.ones(4), torch.zeros(4), 0, dtype)
    return torch.empty(4, dtype=dtype)


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz.*:")
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_every_other_dtype_is_refused_by_name(sender: WeightSender, name: str) -> None:
    try:
        one = _of_dtype(name)
    except (RuntimeError, NotImplementedError):
        pytest.skip(f"this torch has no tensor of dtype {name}")
    with pytest.raises(InvalidStateDict, match=rf"tensor 'w.x': dtype {name} cannot be carried") as refused:
        sender.publish(1, {"fine": torch.ones(1), "w.x": one})
    assert "; " in str(refused.value)
    if name in REMEDIES:
        with pytest.raises(InvalidStateDict, match=REMEDIES[name]):
            sender.publish(1, {"w.x": one})


def test_the_documented_table_is_the_one_in_force() -> None:
    """docs/reference/sender.md says of every dtype of this torch whether it travels."""
    section = DOCS.read_text().split("## What can be published", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    told = {row.split("`")[1]: row.split("|")[2].strip() for row in rows}
    assert {name: f"`{safetensors}`" for name, (_, safetensors) in DTYPES.items()} == {
        name: word for name, word in told.items() if word != "refused"
    }
    refused = {name for name, word in told.items() if word == "refused"}
    families = {"int": "int1", "uint": "uint1", "bits": "bits8", "q": "qint8"}
    for name in REFUSED:
        family = next((f for f, member in families.items() if name.startswith(f) and member in refused), None)
        assert name in refused or family, f"{name} is missing in {DOCS.name}"


def test_a_tensor_that_keeps_its_bytes_elsewhere_is_refused(sender: WeightSender) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(InvalidStateDict, match="'n' is a NestedTensor, which keeps its bytes in other tensors"):
        sender.publish(1, {"n": nested})


def test_a_failed_publish_leaves_what_was_there(sender: WeightSender, caplog: pytest.LogCaptureFixture) -> None:
    held = sender.publish(1, {"w": torch.ones(3)})
    with pytest.raises(InvalidStateDict, match="is empty"), caplog.at_level(logging.INFO, "rlfleet.sender"):
        sender.publish(2, {})
    assert "is ready" not in caplog.text
    assert sender.publish(1, {"w": torch.ones(3)}) == held


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_cuda_tensors_are_copied(sender: WeightSender) -> None:
    state = {name: t.cuda() for name, t in ODD.items()}
    assert sender.publish(1, state).digest == sender.publish(1, ODD).digest
