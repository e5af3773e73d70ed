"""Kafka producers, one for each call that runs: what is given to one of them is purged without harm to the others."""

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from .. import clock
from .base import Deadline
from .kafka_client import ClientLog

PATIENCE = 0.9  # of message.timeout.ms: all that is left is then given up together, not one by one
DOWN_SECONDS = 5.0  # how long a call goes on after the last broker was lost
STEP_SECONDS = 0.05
PURGE_SECONDS_MAX = 10.0


class _Trouble:
    """What the client says about its connections; apart from the sender, which the client must not keep alive."""

    def __init__(self) -> None:
        self.any = False
        self.down_at: float | None = None

    def note(self, error: KafkaError) -> None:
        if error.fatal() or error.code() == KafkaError._FATAL:  # a gap that we made or were told of ourselves
            return
        self.any = True
        if error.code() in {KafkaError._ALL_BROKERS_DOWN, KafkaError._AUTHENTICATION} and self.down_at is None:
            self.down_at = clock.monotonic()


class Sender:
    """A producer in the hands of one call, and what it reported."""

    def __init__(self, settings: Mapping[str, Any], batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self._trouble = _Trouble()
        self._reports: dict[int, KafkaError] = {}
        self._patience = PATIENCE * float(settings["message.timeout.ms"]) / 1000
        own = {"batch.size": batch_bytes, "error_cb": self._trouble.note, "logger": ClientLog()}
        self._producer = Producer({**settings, **own})
        self._produce = self._producer.produce
        self.spoilt = False  # something was purged or failed: its sequence has a gap, so it is not used again
        # No connection was lost in this call, so what is in the queue did not come back there after it was sent.
        self.certain = True

    def begin(self) -> bool:
        """Serve what happened since the last call; false if this one can't be used any more."""
        self._serve(0)
        self._trouble.any, self._trouble.down_at, self.certain = False, None, True
        return not self.spoilt and len(self._producer) == 0

    def produce(
        self, place: int, topic: str, value: bytes, key: str | None, headers: Mapping[str, str], deadline: Deadline
    ) -> bool:
        """Hand over one record; false if the client's queue stays full until the deadline."""
        given: Any = headers
        while True:
            try:
                self._produce(topic, value, key, headers=given, on_delivery=partial(self._report, place))
            except BufferError:
                self._serve(STEP_SECONDS)
                if deadline.over:
                    return False
            else:
                return True

    def settle(self, deadline: Deadline) -> dict[int, KafkaError] | None:
        """Wait until each record is acknowledged or has failed; give up what is left at the deadline.

        What failed, by place; None if the client did not even say that.
        """
        give_up_at = clock.monotonic() + self._patience
        while len(self._producer):
            self._serve(min(STEP_SECONDS, deadline.remaining()))
            if deadline.remaining() <= 0 or clock.monotonic() > self._until(give_up_at):
                self._purge(in_flight=True)
                break
            if deadline.over or self._reports or self.spoilt:
                self._purge(in_flight=False)
        self.certain = self.certain and not self._trouble.any
        reports, self._reports = self._reports, {}
        self.spoilt = self.spoilt or bool(reports)
        return None if len(self._producer) else reports

    def close(self) -> None:
        """Leave nothing in the client, then let it go; its threads end by themselves."""
        if len(self._producer):
            self._purge(in_flight=True)

    def _until(self, give_up_at: float) -> float:
        down_at = self._trouble.down_at
        return give_up_at if down_at is None else min(give_up_at, down_at + DOWN_SECONDS)

    def _purge(self, *, in_flight: bool) -> None:
        self.spoilt = True
        self._producer.purge(in_queue=True, in_flight=in_flight)
        patience = clock.monotonic() + PURGE_SECONDS_MAX
        while in_flight and len(self._producer) and clock.monotonic() < patience:
            self._serve(STEP_SECONDS)

    def _serve(self, seconds: float) -> None:
        """Send what lingers, and take the reports that are there; a producer with a gap says no, and is then spoilt."""
        try:
            self._producer.flush(seconds)
        except KafkaException:
            self.spoilt = True
            self._producer.poll(seconds)

    def _report(self, place: int, error: KafkaError, _message: object) -> None:
        self._reports[place] = error


class Pool:
    """Producers that nobody uses at the moment, by the size of their batches."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[int, list[Sender]] = {}
        self._closed = False

    def take(self, batch_bytes: int) -> Sender:
        """One that works, for this call alone."""
        while True:
            with self._lock:
                idle = self._idle.get(batch_bytes)
                sender = idle.pop() if idle else None
            if sender is None:
                return Sender(self._settings, batch_bytes)
            if sender.begin():
                return sender

    def give_back(self, sender: Sender) -> None:
        """For the next call, unless it is spoilt."""
        if not sender.spoilt:
            with self._lock:
                if not self._closed:
                    self._idle.setdefault(sender.batch_bytes, []).append(sender)
                    return
        sender.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for senders in idle.values():
            for sender in senders:
                sender.close()
