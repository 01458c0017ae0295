"""Calls to nodes, all at once, each with a timeout, and given up on a node that is silent.

FLARE tells of a dead node only when a call times out, and by default never.  So nodes that have
work in hand are asked for a sign of life every few seconds: a call may then take an hour, and a
dead node still holds up a round for seconds only.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_PING_SECONDS = 2.0


@dataclass(frozen=True)
class CallSettings:
    """How long to wait for nodes."""

    timeout: float = 600.0  # seconds for any call
    silence: float = 10.0  # seconds without a sign of life after which a node is given up


@dataclass
class Calls:
    """The nodes of a job; one that is given up stays so until the next job."""

    proxies: Mapping[str, Any]  # of FLARE, by node
    settings: CallSettings
    lost: dict[str, str] = field(default_factory=dict)  # why, by node
    lost_at: dict[str, float] = field(default_factory=dict)  # a time by which it was silent

    @property
    def alive(self) -> list[str]:
        """Nodes that have not been given up, in order."""
        return [node for node in self.proxies if node not in self.lost]

    def give_up(self, node: str, reason: str, since: float = 0.0) -> None:
        """Call a node no more in this job; it was silent for so many seconds at least."""
        self.lost.setdefault(node, reason)
        self.lost_at.setdefault(node, time.time() - since)

    def call(self, name: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Answers by node; who gives none is lost, and `lost` says why."""
        answers: dict[str, Any] = {}
        arrived: queue.Queue[tuple[str, Any, str]] = queue.Queue()
        waiting = [node for node in arguments if node not in self.lost]
        now = time.monotonic()
        heard = dict.fromkeys(waiting, now)
        deadline, asked = now + self.settings.timeout, now

        def send(node: str) -> None:
            def work() -> Any:  # FLARE waits longer than we do, who can tell slow from silent
                proxy = self.proxies[node](timeout=self.settings.timeout + self.settings.silence)
                return getattr(proxy, name)(*arguments[node])

            arrived.put((node, *_outcome(work)))

        def ping(node: str) -> None:
            proxy = self.proxies[node](timeout=self.settings.silence)
            if _outcome(proxy.ping)[0] == "here":
                heard[node] = time.monotonic()

        for node in waiting:
            _in_background(send, node)
        while waiting:
            try:
                node, answer, error = arrived.get(timeout=_PING_SECONDS / 4)
                if node not in waiting:
                    continue  # it was given up before
                waiting.remove(node)
                if error:
                    self.give_up(node, error)
                else:
                    answers[node] = answer
            except queue.Empty:
                pass
            now = time.monotonic()
            if now - asked > _PING_SECONDS:
                asked = now
                for node in waiting:
                    _in_background(ping, node)
            for node in list(waiting):
                is_silent = now - heard[node] > self.settings.silence
                if is_silent or now > deadline:
                    waiting.remove(node)
                    # its last sign of life may have been somewhat later than we heard one
                    silent = max(0.0, now - heard[node] - self.settings.silence / 2)
                    slow = f"too slow ({self.settings.timeout:g} s)"
                    self.give_up(node, f"'{name}': {'silent' if is_silent else slow}", silent)
        return {node: answers[node] for node in arguments if node in answers}


def _outcome(work: Callable[[], Any]) -> tuple[Any, str]:
    """What it gives, or the kind of what went wrong, whatever it is: nobody sees a thread end."""
    try:
        return work(), ""
    except Exception as error:
        return None, f"the call failed ({type(error.__cause__ or error).__name__})"


def _in_background(work: Callable[[str], None], node: str) -> None:
    """A thread that the process does not wait for: FLARE's calls cannot be taken back."""
    threading.Thread(target=work, args=(node,), daemon=True).start()
