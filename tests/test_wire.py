"""Messages as bytes: what was sent is what is read, and whatever else comes is one sentence."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from crafted import table_of, with_table
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from small import STREAM, engine, first_task, method

from flowdup.client import ClientConfig
from flowdup.errors import ConfigError, MessageError
from flowdup.messages import Reply, Task, schema_of
from flowdup.params import Params
from flowdup.rank_one import Factors
from flowdup.wire import (
    ENCODINGS,
    most_bytes,
    reply_from_bytes,
    reply_to_bytes,
    reply_with_feedback,
    task_from_bytes,
    task_to_bytes,
)

DRAW = torch.Generator().manual_seed(1)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW)


PSI = {"w": normal(30, 20), "b": normal(30), "a": normal()}
SCHEMA = schema_of(PSI)
LIMIT = most_bytes(SCHEMA)
TASK = Task(4, PSI, {"mu": torch.tensor(float("inf"))}, {0: 17, 3: 5})
REPLY = Reply(4, {n: normal(*p.shape) for n, p in PSI.items()}, torch.tensor(1.5), 5, 8)
PAIR = Factors(normal(4, 30), normal(4, 20))
FACTORED = replace(REPLY, delta={n: REPLY.delta[n] for n in "ba"}, factors={"w": PAIR})


def read(data: bytes) -> Reply:
    return reply_from_bytes(data, 4, SCHEMA, LIMIT)


def same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_task_comes_as_it_was_sent_in_the_order_of_psi() -> None:
    found = task_from_bytes(task_to_bytes(TASK), SCHEMA, LIMIT)
    assert (found.round, found.cohort) == (4, {0: 17, 3: 5})
    assert same(found.psi, PSI) and list(found.psi) == list(PSI)
    assert same(found.broadcast, TASK.broadcast)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("encoding", ["plain", "factors"])
def test_exact_encodings_keep_every_bit(encoding: str, dtype: torch.dtype) -> None:
    delta = {n: d.to(dtype) for n, d in REPLY.delta.items()}
    sent = replace(REPLY, delta=delta, loss=REPLY.loss.to(dtype))
    found = reply_from_bytes(reply_to_bytes(sent, encoding), 4, schema_of(delta), 2 * LIMIT)
    assert same(found.delta, delta) and torch.equal(found.loss, sent.loss)
    assert (found.round, found.points, found.rows, found.clients) == (4, 5, 8, 1)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_same_reply_gives_the_same_bytes(encoding: str) -> None:
    assert reply_to_bytes(FACTORED, encoding) == reply_to_bytes(FACTORED, encoding)
    assert task_to_bytes(TASK) == task_to_bytes(TASK)


def test_factors_are_sent_where_they_are_smaller_and_without_unused_rows() -> None:
    data = reply_to_bytes(FACTORED)
    found = read(data)
    assert torch.equal(found.factors["w"].left, PAIR.left) and len(data) < 4 * 600
    roomy = Factors(*(torch.cat([t, torch.zeros(60, t.shape[1])]) for t in PAIR))
    assert reply_to_bytes(replace(FACTORED, factors={"w": roomy})) == data
    many = Factors(normal(13, 30), normal(13, 20))  # 13 * 50 > 30 * 20
    dense = read(reply_to_bytes(replace(FACTORED, factors={"w": many})))
    assert not dense.factors and torch.equal(dense.delta["w"], many.product())
    assert not read(reply_to_bytes(FACTORED, "plain")).factors
    assert not read(reply_to_bytes(FACTORED, "int8")).factors  # 4 * 4 * 50 > 600 bytes


def test_a_real_client_sends_less_with_factors_and_the_same_psi() -> None:
    m = method("flowdup-identity")
    psi = m.init(STREAM)
    schema, limit = schema_of(psi), most_bytes(schema_of(psi))
    (reply,) = engine("sequential", m, "float32", ClientConfig()).train(first_task(m, psi))
    sizes = {}
    for encoding in ("plain", "factors"):
        data = reply_to_bytes(reply, encoding)
        found = reply_from_bytes(data, 1, schema, limit).whole_delta()
        sizes[encoding] = len(data)
        assert all(torch.allclose(found[n], d) for n, d in reply.whole_delta().items())
    assert sizes["factors"] < sizes["plain"] / 1.5
    assert sizes["plain"] < limit


@pytest.mark.parametrize(("encoding", "bits", "error"), [("bf16", 16, 2**-8), ("int8", 8, 1 / 254)])
def test_rounded_encodings_are_small_and_near(encoding: str, bits: int, error: float) -> None:
    data = reply_to_bytes(REPLY, encoding)
    found = read(data).delta
    assert len(data) < 631 * bits / 8 + 4 * 32 + 900
    for name, d in REPLY.delta.items():
        rows = d.reshape(-1, d.shape[-1]) if d.ndim else d.reshape(1, 1)
        most = rows.abs().amax(1, keepdim=True)
        assert bool(((found[name].reshape(rows.shape) - rows).abs() <= 1.01 * error * most).all())


def test_zeros_survive_eight_bits() -> None:
    zeros = replace(REPLY, delta={n: torch.zeros_like(p) for n, p in PSI.items()})
    assert same(read(reply_to_bytes(zeros, "int8")).delta, zeros.delta)


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_error_feedback_sends_later_what_rounding_left_out(encoding: str) -> None:
    sums = {kept: {n: torch.zeros_like(p) for n, p in PSI.items()} for kept in (True, False)}
    residual: Params = {}
    for _ in range(50):
        data, residual = reply_with_feedback(REPLY, residual, encoding)
        for kept, sent in ((True, data), (False, reply_to_bytes(REPLY, encoding))):
            for n, d in read(sent).delta.items():
                sums[kept][n] += d / 50
    error = {k: max(float((s[n] - REPLY.delta[n]).abs().max()) for n in s) for k, s in sums.items()}
    assert error[True] < error[False] / 10
    assert all(r.abs().max() < 0.05 for r in residual.values())


def test_a_residual_makes_a_matrix_dense_and_exact_encodings_have_none() -> None:
    residual = {"w": torch.ones(30, 20)}
    wide = replace(FACTORED, factors={"w": Factors(PAIR.left[:1], PAIR.right[:1])})
    data, left = reply_with_feedback(wide, residual, "int8")
    whole = wide.whole_delta()["w"] + 1
    assert torch.allclose(read(data).delta["w"] + left["w"], whole, atol=1e-6)
    assert reply_with_feedback(wide, {}, "factors") == (reply_to_bytes(wide), {})
    data, left = reply_with_feedback(wide, {}, "int8")
    assert "w" in read(data).factors and "w" not in left


def test_an_unknown_encoding_is_refused_by_the_sender() -> None:
    with pytest.raises(ConfigError, match="use one of plain, factors"):
        reply_to_bytes(REPLY, "zip")


def test_nothing_above_the_limit_is_parsed() -> None:
    for read_it in (
        lambda data: task_from_bytes(data, SCHEMA, 99),
        lambda data: reply_from_bytes(data, 4, SCHEMA, 99),
    ):
        with pytest.raises(MessageError, match="100 bytes and may have 99"):
            read_it(b"\xff" * 100)


Crafted = Callable[[dict[str, Any]], Any]


def crafted(change: Crafted, reply: Reply = REPLY, encoding: str = "plain") -> bytes:
    """A reply's bytes with another table."""
    data = reply_to_bytes(reply, encoding)
    table = table_of(data)
    change(table)
    return with_table(data, table)


def in_header(**values: Any) -> Crafted:
    def change(table: dict[str, Any]) -> None:
        header = json.loads(table["__metadata__"]["flowdup"]) | values
        kept = {key: value for key, value in header.items() if value is not ...}
        table["__metadata__"]["flowdup"] = json.dumps(kept)

    return change


def with_tensors(change: Crafted, encoding: str = "plain") -> bytes:
    """A well-formed file with other tensors."""
    data = reply_to_bytes(FACTORED if encoding == "factors" else REPLY, encoding)
    tensors = load(data)
    change(tensors)
    return save(tensors, table_of(data)["__metadata__"])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "cut off"),
        (b"\x00" * 8, "malformed"),
        ((2**63).to_bytes(8, "little") + b"{}", "cut off"),
        (reply_to_bytes(REPLY)[:-1], "not as long as its table says"),
        (reply_to_bytes(REPLY) + b"\x00", "not as long as its table says"),
        (task_to_bytes(TASK), "it is no reply"),
        (crafted(lambda t: t.pop("__metadata__")), "no header"),
        (crafted(lambda t: t["__metadata__"].update(x="y")), "no header, or more"),
        (crafted(lambda t: t["__metadata__"].update(flowdup="[]")), "not a JSON object"),
        (crafted(lambda t: t["__metadata__"].update(flowdup="[" * 10**5)), "malformed"),
        (crafted(lambda t: t["__metadata__"].update(flowdup='{"a":1,"a":1}')), "twice"),
        (crafted(in_header(format=2)), "format 2 instead of 1"),
        (crafted(in_header(format=True)), "format True instead of 1"),
        (crafted(in_header(points=float("nan"))), "NaN"),
        (crafted(in_header(points=-1)), "from 0 on"),
        (crafted(in_header(points=True)), "instead of a whole number"),
        (crafted(in_header(points=1.5)), "instead of a whole number"),
        (crafted(in_header(rows=2**80)), "from 0 on"),
        (crafted(in_header(points=9)), "loss or counts"),
        (crafted(in_header(rows=...)), "'rows' is missing"),
        (crafted(in_header(more=1)), "'more' is missing in its header, or does not belong"),
        (crafted(in_header(round=3)), "to round 3 came in round 4"),
        (crafted(in_header(clients=1000)), "of 1000 clients and 1 were asked"),
        (crafted(in_header(encoding="zip")), "no encoding 'zip'"),
        (crafted(in_header(encoding="int8")), "lacks some"),
        (crafted(lambda t: t["delta/b"].update(shape=[-30])), "from 0 on"),
        (crafted(lambda t: t["delta/b"].update(shape=[15])), "not the size"),
        (crafted(lambda t: t["delta/b"].update(dtype="I32")), "torch.int32 instead of"),
        (crafted(lambda t: t["delta/b"].update(dtype="P64")), "has the type P64"),
        (crafted(lambda t: t["delta/b"].update(data_offsets=[0, 120])), "overlap or leave gaps"),
        (crafted(lambda t: t.update({"delta/c": t.pop("delta/b")})), "'c', which psi has not"),
        (with_tensors(lambda t: t.pop("loss")), "it has no loss"),
        (with_tensors(lambda t: t.update(loss=torch.zeros(2))), "loss or counts"),
        (with_tensors(lambda t: t.update(loss=torch.tensor(float("nan")))), "NaN or infinite"),
        (with_tensors(lambda t: t.update(odd=torch.zeros(2))), "'odd', which does not belong"),
        (with_tensors(lambda t: t.pop("delta/b")), r"other tensors than psi \('b'\)"),
        (with_tensors(lambda t: t.update({"delta/b": torch.zeros(3)})), r"\(3,\)"),
        (with_tensors(lambda t: t["delta/b"].fill_(float("inf"))), "NaN or infinite"),
        (with_tensors(lambda t: t["left/w"].fill_(float("nan")), "factors"), "NaN or infinite"),
        (with_tensors(lambda t: t.pop("left/w"), "factors"), "without their partners"),
        (with_tensors(lambda t: t["scale/w"].fill_(float("nan")), "int8"), "NaN or infinite"),
        (with_tensors(lambda t: t.update({"scale/w": torch.ones(2)}), "int8"), "wrong shape"),
        (with_tensors(lambda t: t.pop("scale/w"), "int8"), "lacks some"),
    ],
)
def test_whatever_is_malformed_is_one_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(MessageError, match=sentence) as caught:
        reply_from_bytes(data, 4, SCHEMA, 10 * LIMIT)
    assert str(caught.value).endswith(": drop it") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cohort", "sentence"),
    [
        ({"-1": 0}, "no numbers"),
        ({"1": 0, "01": 0}, "twice"),
        ({"\u0663": 0}, "no numbers"),
        ({"0": -1}, "from 0 on"),
        ([], "instead of an object"),
    ],
)
def test_a_task_with_a_cohort_that_cannot_be_is_refused(cohort: Any, sentence: str) -> None:
    data = task_to_bytes(TASK)
    table = table_of(data)
    in_header(cohort=cohort)(table)
    with pytest.raises(MessageError, match=sentence):
        task_from_bytes(with_table(data, table), SCHEMA, LIMIT)


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (replace(TASK, psi=PSI | {"b": torch.full((30,), float("nan"))}), "NaN"),
        (replace(TASK, psi=PSI | {"b": torch.zeros(2)}), r"\(2,\)"),
        (replace(TASK, broadcast={"b": torch.zeros(())}), "name of one of psi"),
        (replace(TASK, broadcast={"c": torch.zeros((), dtype=torch.int64)}), "floating-point"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(task: Task, sentence: str) -> None:
    with pytest.raises(MessageError, match=sentence):
        task_from_bytes(task_to_bytes(task), SCHEMA, LIMIT)


@settings(max_examples=1500, deadline=None)
@given(st.sampled_from([*ENCODINGS, "task"]), st.data())
def test_changed_bytes_are_a_message_or_a_message_error(kind: str, draw: st.DataObject) -> None:
    data = bytearray(task_to_bytes(TASK) if kind == "task" else reply_to_bytes(FACTORED, kind))
    head = 8 + int.from_bytes(data[:8], "little")
    for _ in range(draw.draw(st.integers(1, 4))):
        place = draw.draw(st.integers(0, min(head, len(data)) - 1) | st.integers(0, len(data) - 1))
        match draw.draw(st.sampled_from(["change", "cut", "insert", "repeat"])):
            case "change":
                data[place] = draw.draw(st.integers(0, 255))
            case "cut":
                del data[place:]
            case "insert":
                data[place:place] = draw.draw(st.binary(max_size=9))
            case "repeat":
                data[place:place] = data[max(0, place - 40) : place]
        if not data:
            break
    try:
        if kind == "task":
            task_from_bytes(bytes(data), SCHEMA, 2 * LIMIT).check(SCHEMA)
        else:
            found = reply_from_bytes(bytes(data), 4, SCHEMA, 2 * LIMIT)
            found.check(4, SCHEMA).check_finite()
    except MessageError as error:
        assert "\n" not in str(error)
