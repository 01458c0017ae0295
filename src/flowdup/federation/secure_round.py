"""The coordinator's part in a secure sum: it carries messages between nodes and sees the sum.

Four calls to the nodes of a round: keys, sealed shares, masked sums (in which they train), and
shares that take the masks off.  A node that disappears between any two of them is left out, if
enough stay (`SumTerms.threshold`); who is left out after masks were sent is recovered from.
"""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowdup.config import Config
from flowdup.errors import ConfigError, FederationError, MessageError
from flowdup.federation.calls import Calls
from flowdup.federation.secure_keys import FEWEST, SignedKeys, SumTerms, check_keys
from flowdup.federation.secure_node import LOSS_SCALE, numbers_of, terms_to_text
from flowdup.messages import Reply, Schema
from flowdup.params import unpack
from flowdup.secure_sum import (
    FixedPoint,
    Numbers,
    PublicKeys,
    Shares,
    check_threshold,
    route,
    sound_keys,
    unmasked_sum,
)

_LATER = "the run goes on when more of them are there"


def check_secure(config: Config, encoding: str, bound: float) -> None:
    """Refuse settings that need to see single updates, which a secure sum hides."""
    if any(stage.server.sees_each for stage in config.stages):
        raise ConfigError(
            "a secure sum hides the updates that server.aggregation and server.privacy must look "
            "at one by one: take these settings out, or go without --secure-sum"
        )
    if encoding != "plain":
        raise ConfigError(
            f"a secure sum adds whole numbers, and '{encoding}' sends an update in another form: "
            "use --encoding plain, or go without --secure-sum"
        )
    if not 0 < bound < 1e6:
        raise ConfigError(f"--number-bound is above 0 and below a million, not {bound:g}")


@dataclass
class SecureRound:
    """One sum over the nodes of a round; `refused` and `missing` say why others are not in it."""

    calls: Calls
    kit: Path  # of the coordinator, for the authority's certificate
    terms: SumTerms
    schema: Schema
    refused: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    up: dict[str, int] = field(default_factory=dict)  # bytes, by node
    down: dict[str, int] = field(default_factory=dict)

    def run(
        self, tasks: Mapping[str, bytes], clients: Mapping[str, int]
    ) -> tuple[Reply, list[str]]:
        """The sum, and whose numbers are in it; MessageError if too few stay to the end."""
        terms = self.terms
        check_threshold(len(terms.nodes), terms.threshold)
        signed, keys = self._keys()
        self._check_enough(keys)
        shared = self._ask("secure_share", {node: (signed,) for node in keys})
        self._check_enough(shared)
        inbox = route({terms.number(n): _numbered(terms, own) for n, own in shared.items()})
        named = {
            node: {terms.nodes[n]: sealed for n, sealed in inbox[terms.number(node)].items()}
            for node in shared
        }
        masked = self._ask("secure_mask", {n: (tasks[n], named[n]) for n in shared})
        for node, content in list(masked.items()):
            if not isinstance(content, bytes) or len(content) != 4 * numbers_of(self.schema):
                self.refused[node] = "its masked sum has another length than psi: drop it"
                del masked[node]
        survivors = sorted(masked)
        self._check_enough(survivors)
        revealed = self._ask("secure_reveal", {node: (survivors,) for node in survivors})
        total = unmasked_sum(
            {terms.number(n): own for n, own in keys.items()},
            [terms.number(n) for n in shared],
            {terms.number(n): content for n, content in masked.items()},
            {terms.number(n): _shares(terms, own) for n, own in revealed.items()},
            terms.threshold,
            terms.context,
        )
        for node in survivors:
            self.missing.pop(node, None)  # it left after its numbers had come
        return self._reply(total, sum(clients[node] for node in survivors)), survivors

    def _keys(self) -> tuple[dict[str, SignedKeys], dict[str, PublicKeys]]:
        """Of nodes whose signature is right and whose keys can be used; others are refused, or
        every node that meets their keys would have to leave.
        """
        text = terms_to_text(self.terms)
        signed = self._ask("secure_keys", {node: (text,) for node in self.terms.nodes})
        keys: dict[str, PublicKeys] = {}
        for node, own in signed.items():
            try:
                keys[node] = check_keys(self.kit, node, self.terms, own)
            except MessageError as error:
                self.refused[node] = str(error)
        sound = sound_keys(keys)
        for node in set(keys).difference(sound):
            self.refused[node] = "its keys for a secure sum are none, or another's: leave it out"
        return {node: signed[node] for node in sound}, {node: keys[node] for node in sound}

    def _check_enough(self, nodes: Collection[str]) -> None:
        """MessageError if so few are left that nothing would be revealed."""
        if len(nodes) < self.terms.threshold:
            raise MessageError(
                f"{len(nodes)} nodes stayed in the secure sum and {self.terms.threshold} are needed"
            )

    def _reply(self, total: Numbers, clients: int) -> Reply:
        """Of so many clients; how many points they have is not told."""
        fixed = FixedPoint(self.terms.bound, self.terms.clients)
        numbers = torch.from_numpy(fixed.decode(total))
        like = {n: torch.empty(shape) for n, (shape, _) in self.schema.items()}
        delta = unpack(numbers[:-1], like)
        delta = {n: d.to(self.schema[n].dtype) for n, d in delta.items()}
        loss = (numbers[-1] * LOSS_SCALE).float()
        return Reply(self.terms.round, delta, loss, clients, clients, clients=clients)

    def _ask(self, name: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Contents of the answers, by node; who has none is missing."""
        answers, found = self.calls.call(name, arguments), {}
        for node, words in arguments.items():
            self.down[node] = self.down.get(node, 0) + _size(words)
            answer = answers.get(node)
            if isinstance(answer, dict) and "error" not in answer and "content" in answer:
                found[node] = answer["content"]
                self.up[node] = self.up.get(node, 0) + _size(found[node])
            elif node in self.calls.lost:
                self.missing[node] = self.calls.lost[node]
            else:
                why = answer.get("error", "") if isinstance(answer, dict) else ""
                self.missing[node] = f"it left the secure sum ({why}), and its output says why"
        return found


def further_members(nodes: Collection[str], alive: Sequence[str]) -> list[str]:
    """Nodes without a client in the cohort that a sum needs to have three members: the first of
    those that are there.  They add zeros.
    """
    others = [node for node in alive if node not in nodes]
    return others[: max(FEWEST - len(nodes), 0)]


def new_terms(round: int, nodes: Mapping[str, int], bound: float) -> SumTerms:
    """Of a sum over these nodes with so many clients each; FederationError if they are too few."""
    if len(nodes) < FEWEST:
        raise FederationError(
            f"round {round}: {len(nodes)} nodes are there, a secure sum is of {FEWEST} or more: "
            f"{_LATER}"
        )
    return SumTerms(round, tuple(nodes), sum(nodes.values()), bound, secrets.token_hex(16))


def _numbered(terms: SumTerms, sealed: Any) -> dict[int, bytes]:
    table = sealed if isinstance(sealed, dict) else {}
    return {
        terms.nodes.index(n): content
        for n, content in table.items()
        if n in terms.nodes and isinstance(content, bytes)
    }


def _shares(terms: SumTerms, told: Any) -> Shares:
    table = told if isinstance(told, dict) else {}
    return Shares(_numbered(terms, table.get("seeds")), _numbered(terms, table.get("keys")))


def _size(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0
